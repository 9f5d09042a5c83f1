"""Programs whose rows touch each other, or nearly: what users write, by name.

Each is trained by a plain GradientTape on one device, with none of this library's code, and by the
train step on two replicas. The outcome is ``"same"`` (weights as on one device), ``"told"`` (a
ReplicaDependenceWarning), ``"unverified"`` (the same of a step that could not be compared) or
``"refused"`` (an error of this library).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

L = keras.layers
ROWS, FEATURES, CLASSES = 7, 6, 3
_random = np.random.default_rng(5)
X = _random.normal(size=(3 * ROWS, FEATURES)).astype("float32")
Y = _random.normal(size=(3 * ROWS, CLASSES)).astype("float32")
IDS = _random.integers(1, 9, (3 * ROWS, 5))
IDS[:, 3:] *= _random.integers(0, 2, (3 * ROWS, 2))  # Zeros are masked.


@dataclasses.dataclass
class Program:
    """What is trained.

    Attributes:
        model: The model.
        plain: ``f(model, x, y) -> scalar``, the loss of a batch as one writes it for one device,
            without ``model.losses``, which are added.
        options: For ``make_train_step``.
        watched: More variables that must end equal, such as those of a metric.
    """

    model: Any
    plain: Callable[[Any, Any, Any], Any]
    options: dict[str, Any]
    watched: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Case:
    """A program, and what two replicas make of it.

    Attributes:
        name: What rows do to each other, in a few words.
        build: Makes the program; called in the scope.
        outcome: ``"same"``, ``"told"``, ``"unverified"`` or ``"refused"``.
        says: A text in the warning or error.
        x: Features of three batches of seven rows.
        y: Labels.
        sizes: Rows of the batches.
    """

    name: str
    build: Callable[[], Program]
    outcome: str
    says: str = ""
    x: Any = dataclasses.field(default_factory=lambda: X, repr=False)
    y: Any = dataclasses.field(default_factory=lambda: Y, repr=False)
    sizes: tuple[int, ...] = (ROWS, ROWS, ROWS)


def mse(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean(tf.square(y - model(x, training=True)))


def sequential(*layers: Any, inputs: tuple[int, ...] = (FEATURES,), dtype: str = "float32") -> Any:
    return keras.Sequential([keras.Input(inputs, dtype=dtype), *layers, L.Dense(CLASSES)])


def with_layers(*make: Callable[[], Any], **inputs: Any) -> Callable[[], Program]:
    def build() -> Program:
        model = sequential(*[one() for one in make], **inputs)
        return Program(model, mse, {"loss": "mse"})

    return build


def with_loss(values: Callable[[Any, Any], Any]) -> Callable[[], Program]:
    """A loss of one value per row, whose mean is taken."""

    def build() -> Program:
        model = sequential(L.Dense(5, "tanh"))
        plain = lambda model, x, y: tf.reduce_mean(values(y, model(x, training=True)))  # noqa: E731
        return Program(model, plain, {"loss": values})

    return build


def ranking(y: Any, predictions: Any) -> Any:
    apart = predictions[:, None, 0] - predictions[None, :, 0]
    wanted = tf.sign(y[:, None, 0] - y[None, :, 0])
    return tf.reduce_mean(tf.nn.softplus(-apart * wanted), axis=1)


class AddsLoss(L.Layer):
    def __init__(self, loss: Callable[[Any], Any], weight: float = 0.3) -> None:
        super().__init__()
        self._loss, self._weight = loss, weight

    def call(self, x: Any) -> Any:
        self.add_loss(self._weight * self._loss(x))
        return x


class KLSparsity(keras.regularizers.Regularizer):
    def __call__(self, x: Any) -> Any:
        mean = tf.clip_by_value(tf.reduce_mean(tf.sigmoid(x), 0), 0.01, 0.99)
        return tf.reduce_sum(0.1 * tf.math.log(0.1 / mean) + 0.9 * tf.math.log(0.9 / (1 - mean)))


class KeepsMean(L.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.mean = keras.metrics.Mean()

    def call(self, x: Any) -> Any:
        self.mean.update_state(tf.reduce_mean(x))
        return x


class TwoViews(keras.Model):
    """Runs two views of each row through one dropout, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.body = keras.Sequential([L.Dense(8, "tanh"), L.Dropout(0.5), L.Dense(CLASSES)])
        self.build((None, FEATURES))

    def build(self, shape: Any) -> None:
        self.body.build(shape)
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        both = self.body(tf.concat([x, -x], 0), training=training)
        first, second = tf.split(both, 2)
        return first - second


def mean_in_a_layer() -> Program:
    layer = KeepsMean()
    return Program(sequential(layer), mse, {"loss": "mse"}, layer.mean.variables)


class ReadsAnother(keras.regularizers.Regularizer):
    def __init__(self, other: Any) -> None:
        self.other = other

    def __call__(self, x: Any) -> Any:
        return 0.1 * tf.reduce_sum(tf.square(x)) * tf.reduce_sum(tf.square(self.other))


def regularized_by_another() -> Program:
    first = L.Dense(5, "tanh")
    model = keras.Sequential([keras.Input((FEATURES,)), first, L.Dense(CLASSES)])
    model.layers[1].kernel.regularizer = ReadsAnother(first.kernel)
    return Program(model, mse, {"loss": "mse"})


def calls_another_model() -> Program:
    model = sequential(L.Dense(5, "tanh"))
    judge = keras.Sequential(
        [keras.Input((CLASSES,)), L.Dense(4, activity_regularizer=keras.regularizers.L2(0.5))]
    )

    def values(y: Any, predictions: Any) -> Any:
        return tf.reduce_mean(tf.square(judge(y) - judge(predictions)), axis=-1)

    plain = lambda model, x, y: tf.reduce_mean(values(y, model(x, training=True)))  # noqa: E731
    return Program(model, plain, {"loss": values})


def seeds_beside_the_model() -> Program:
    model = sequential(L.Dense(5, "tanh"))
    generator = keras.random.SeedGenerator(11)

    def noisy(model: Any, x: Any) -> Any:
        return model(x + 0.3 * keras.random.normal(tf.shape(x), seed=generator), training=True)

    def forward(model: Any, batch: Any, training: bool) -> Any:
        x, y = batch
        return tmg.loss_sum("mse", y, noisy(model, x))

    plain = lambda model, x, y: tf.reduce_mean(tf.square(y - noisy(model, x)))  # noqa: E731
    return Program(model, plain, {"loss": None, "forward": forward, "micro_batches": 3})


CASES = (
    Case("a loss that compares rows: ranking", with_loss(ranking), "told", "gather_rows"),
    Case(
        "an activity regularizer that is no mean over rows",
        with_layers(lambda: L.Dense(4, activity_regularizer=KLSparsity())),
        "told",
        "added loss",
    ),
    Case(
        "MelSpectrogram, which clips at the maximum of the batch",
        with_layers(
            lambda: L.MelSpectrogram(
                num_mel_bins=4, sampling_rate=80, sequence_stride=8, fft_length=16, top_db=5.0
            ),
            L.Flatten,
            inputs=(40,),
        ),
        "told",
        "MelSpectrogram",
        x=_random.normal(size=(3 * ROWS, 40)).astype("float32")
        * _random.uniform(0.01, 3.0, (3 * ROWS, 1)).astype("float32"),
    ),
    Case(
        "dropout over two views, concatenated",
        lambda: Program(TwoViews(), mse, {"loss": "mse"}),
        "told",
        says="Call the model for each: model(real), model(fake)",
    ),
    Case("a Mean inside a layer", mean_in_a_layer, "told", "keep sums and counts"),
    Case("a regularizer that reads another variable", regularized_by_another, "refused"),
    Case("a loss that calls another model", calls_another_model, "same"),
    Case("a generator of seeds beside the model", seeds_beside_the_model, "same"),
)
