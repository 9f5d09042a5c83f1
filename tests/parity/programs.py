"""Programs whose rows touch each other, or nearly: what users write, by name.

Each is trained by a plain GradientTape on one device, with none of this library's code, and by the
train step on two replicas. The outcome is ``"same"`` (weights as on one device), ``"told"`` (a
ReplicaDependenceWarning) or ``"refused"`` (an error of this library). tests/promises have losses
and layers that compare rows, steps/test_objective.py what layers add.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from problems import network

import tfmultigpu as tmg

L = keras.layers
ROWS, FEATURES, CLASSES = 7, 6, 3
_random = np.random.default_rng(5)
X = _random.normal(size=(3 * ROWS, FEATURES)).astype("float32")
Y = _random.normal(size=(3 * ROWS, CLASSES)).astype("float32")
IDS = _random.integers(1, 9, (3 * ROWS, 5))
IDS[:, 3:] *= _random.integers(0, 2, (3 * ROWS, 2))  # Zeros are masked.
SOUNDS = _random.normal(size=(3 * ROWS, 40)) * _random.uniform(0.01, 3.0, (3 * ROWS, 1))


def mse(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean(tf.square(y - model(x, training=True)))


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
    plain: Callable[[Any, Any, Any], Any] = mse
    options: dict[str, Any] = dataclasses.field(default_factory=lambda: {"loss": "mse"})
    watched: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Case:
    """A program, and what two replicas make of it.

    Attributes:
        name: What rows do to each other, in a few words.
        build: Makes the program; called in the scope.
        outcome: ``"same"``, ``"told"`` or ``"refused"``.
        says: A text in the warning or error.
        x: Features of three batches of seven rows.
        sizes: Rows of the batches.
    """

    name: str
    build: Callable[[], Program]
    outcome: str
    says: str = ""
    x: Any = dataclasses.field(default_factory=lambda: X, repr=False)
    sizes: tuple[int, ...] = (ROWS, ROWS, ROWS)


def sequential(*layers: Any, inputs: tuple[int, ...] = (FEATURES,), dtype: str = "float32") -> Any:
    return keras.Sequential([keras.Input(inputs, dtype=dtype), *layers, L.Dense(CLASSES)])


def with_layers(*make: Callable[[], Any], **inputs: Any) -> Callable[[], Program]:
    return lambda: Program(sequential(*[layer() for layer in make], **inputs))


# Layers -------------------------------------------------------------------------------------------


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


class PythonCounter(L.Layer):
    calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        return x * (1.0 + 0.5 * (self.calls % 2))


class VariableCounter(L.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.steps = tf.Variable(0.0, trainable=False)

    def call(self, x: Any) -> Any:
        self.steps.assign_add(1.0)
        return x * (1.0 + 0.1 * self.steps)


class WeightNoise(L.Layer):
    """Noise on weights, whose shape is by chance that of a shard's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(9)

    def call(self, x: Any) -> Any:
        noise = keras.random.normal((4, 3), seed=self.seed_generator)
        return x + 0.3 * tf.reduce_sum(noise * tf.range(4.0)[:, None], 0)[0]


class DropTokens(L.Layer):
    """Dropout on the tokens that are not padding, all rows' in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.dropout = L.Embedding(9, 4), L.Dropout(0.5)

    def call(self, ids: Any, training: bool = False) -> Any:
        flat = tf.RaggedTensor.from_tensor(ids, padding=0)
        tokens = flat.with_flat_values(
            self.dropout(self.table(flat.flat_values), training=training)
        )
        return tf.reduce_sum(tokens, 1)


class Overwrites(L.Layer):
    """Keeps a mean in a weight that is trained by default, and that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = self.add_weight(shape=(FEATURES,), initializer="ones")

    def call(self, x: Any) -> Any:
        result = x - tf.stop_gradient(self.mean.value)
        self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, 0))
        return result


class ReadsAnother(keras.regularizers.Regularizer):
    def __init__(self, other: Any) -> None:
        self.other = other

    def __call__(self, x: Any) -> Any:
        return 0.1 * tf.reduce_sum(tf.square(x)) * tf.reduce_sum(tf.square(self.other))


# Programs -----------------------------------------------------------------------------------------


def mean_in_a_layer() -> Program:
    layer = KeepsMean()
    return Program(sequential(layer), watched=layer.mean.variables)


def regularized_by_another() -> Program:
    model = sequential(L.Dense(5, "tanh"))
    model.layers[1].kernel.regularizer = ReadsAnother(model.layers[0].kernel)
    return Program(model)


def calls_another_model() -> Program:
    judge = network(CLASSES, L.Dense(4, activity_regularizer=keras.regularizers.L2(0.5)))

    def values(y: Any, predictions: Any) -> Any:
        return tf.reduce_mean(tf.square(judge(y) - judge(predictions)), axis=-1)

    plain = lambda model, x, y: tf.reduce_mean(values(y, model(x, training=True)))  # noqa: E731
    return Program(sequential(L.Dense(5, "tanh")), plain, {"loss": values})


def in_micro_batches(model: Any, values: Callable[[Any, Any, Any], Any], parts: int) -> Program:
    """A program of ``forward``, which computes ``values(model, x, y)`` of each row."""

    def forward(model: Any, batch: Any, training: bool) -> Any:
        rows = values(model, *batch)
        return tmg.LossSum(tf.reduce_sum(rows), tf.size(rows))

    plain = lambda model, x, y: tf.reduce_mean(values(model, x, y))  # noqa: E731
    return Program(model, plain, {"loss": None, "forward": forward, "micro_batches": parts})


def seeds_beside_the_model() -> Program:
    generator = keras.random.SeedGenerator(11)

    def noisy(model: Any, x: Any, y: Any) -> Any:
        outputs = model(x + 0.3 * keras.random.normal(tf.shape(x), seed=generator), training=True)
        return tf.reduce_mean(tf.square(y - outputs), -1)

    return in_micro_batches(sequential(L.Dense(5, "tanh")), noisy, 3)


class GradientPenalty(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.body = sequential(L.Dense(5, "tanh"))
        self.seed_generator = keras.random.SeedGenerator(8)
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return self.body(x)

    def penalty(self, x: Any) -> Any:
        alpha = keras.random.uniform((tf.shape(x)[0], 1), seed=self.seed_generator)
        between = alpha * x - (1 - alpha) * x
        with tf.GradientTape() as tape:
            tape.watch(between)
            score = tf.reduce_sum(self.body(between))
        return (tf.norm(tape.gradient(score, between), axis=1) - 1) ** 2


def wgan_gp() -> Program:
    def values(model: Any, x: Any, y: Any) -> Any:
        return tf.reduce_mean(model(x) * y, 1) + model.penalty(x)

    return in_micro_batches(GradientPenalty(), values, 2)


CASES = (
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
        x=SOUNDS.astype("float32"),
    ),
    Case(
        "dropout over two views, concatenated",
        lambda: Program(TwoViews()),
        "told",
        "Call the model for each: model(real), model(fake)",
    ),
    Case(
        "dropout on the tokens of all rows",
        with_layers(DropTokens, inputs=(5,), dtype="int64"),
        "told",
        x=IDS,
    ),
    Case("a Mean inside a layer", mean_in_a_layer, "told", "keep sums and counts"),
    Case("a mean in a trained weight", with_layers(Overwrites), "told", "the state 'overwrites"),
    Case("a counter in Python", with_layers(PythonCounter), "told", "PythonCounter"),
    Case("a counter in a tf.Variable", with_layers(VariableCounter), "same"),
    Case("a regularizer that reads another variable", regularized_by_another, "refused"),
    Case("a loss that calls another model", calls_another_model, "same"),
    Case("a generator of seeds beside the model", seeds_beside_the_model, "same"),
    Case("WGAN-GP in micro-batches", wgan_gp, "same"),
    Case("noise of four rows", with_layers(WeightNoise), "same"),
    Case(
        "LSTM with dropout behind a mask",
        with_layers(
            lambda: L.Embedding(9, 4, mask_zero=True),
            lambda: L.LSTM(4, dropout=0.3, recurrent_dropout=0.3),
            inputs=(5,),
            dtype="int64",
        ),
        "same",
        x=IDS,
        sizes=(7, 1),
    ),
)
