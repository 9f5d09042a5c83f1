"""Programs whose rows touch each other, or nearly: the answer of one device, or a warning.

Losses and layers that compare rows are in tests/promises, what layers add in ``losses``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from law.model import Training
from problems import network

import tfmultigpu as tmg
from cases import case
from cases.case import Case

L = keras.layers
ROWS, FEATURES, CLASSES = 7, 6, 3
_random = np.random.default_rng(5)
X = _random.normal(size=(3 * ROWS, FEATURES)).astype("float32")
Y = _random.normal(size=(3 * ROWS, CLASSES)).astype("float32")
IDS = _random.integers(1, 9, (3 * ROWS, 5))
IDS[:, 3:] *= _random.integers(0, 2, (3 * ROWS, 2))  # Zeros are masked.
SOUNDS = _random.normal(size=(3 * ROWS, 40)) * _random.uniform(0.01, 3.0, (3 * ROWS, 1))
SOUNDS = SOUNDS.astype("float32")


def program(model: Any, **more: Any) -> Training:
    return Training(model, keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError(), **more)


def sequential(*layers: Any, inputs: tuple[int, ...] = (FEATURES,), dtype: str = "float32") -> Any:
    return keras.Sequential([keras.Input(inputs, dtype=dtype), *layers, L.Dense(CLASSES)])


def with_layer(make: Callable[[], Any]) -> Callable[[], Training]:
    return lambda: program(sequential(make()))


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


# Programs -----------------------------------------------------------------------------------------


def mean_in_a_layer() -> Training:
    layer = KeepsMean()
    return program(sequential(layer), watched=layer.mean.variables)


def calls_another_model() -> Training:
    judge = network(CLASSES, L.Dense(4, activity_regularizer=keras.regularizers.L2(0.5)))

    def values(y: Any, predictions: Any) -> Any:
        return tf.reduce_mean(tf.square(judge(y) - judge(predictions)), axis=-1)

    def whole(model: Any, batch: Any) -> Any:
        x, y = batch
        return tf.reduce_mean(values(y, model(x, training=True)))

    model = sequential(L.Dense(5, "tanh"))
    return Training(model, keras.optimizers.SGD(0.1), values, whole=whole)


def by_forward(model: Any, values: Callable[[Any, Any, Any], Any]) -> Training:
    """A program of ``forward``, which computes ``values(model, x, y)`` of each row."""

    def forward(model: Any, batch: Any, training: bool) -> Any:
        rows = values(model, *batch)
        return tmg.LossSum(tf.reduce_sum(rows), tf.size(rows))

    def whole(model: Any, batch: Any) -> Any:
        return tf.reduce_mean(values(model, *batch))

    return Training(model, keras.optimizers.SGD(0.1), None, forward=forward, whole=whole)


def seeds_beside_the_model() -> Training:
    generator = keras.random.SeedGenerator(11)

    def noisy(model: Any, x: Any, y: Any) -> Any:
        outputs = model(x + 0.3 * keras.random.normal(tf.shape(x), seed=generator), training=True)
        return tf.reduce_mean(tf.square(y - outputs), -1)

    return by_forward(sequential(L.Dense(5, "tanh")), noisy)


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


def wgan_gp() -> Training:
    def values(model: Any, x: Any, y: Any) -> Any:
        return tf.reduce_mean(model(x) * y, 1) + model.penalty(x)

    return by_forward(GradientPenalty(), values)


def touching(name: str, build: Callable[[], Training], x: Any = X, **more: Any) -> Case:
    sizes = more.pop("sizes", (ROWS, ROWS, ROWS))
    return Case(name, build, case.model.cut((x, Y), sizes), **more)


def clips() -> Training:
    sizes = {"num_mel_bins": 4, "sampling_rate": 80, "sequence_stride": 8, "fft_length": 16}
    spectrogram = L.MelSpectrogram(**sizes, top_db=5.0)  # Below the maximum of the batch.
    return program(sequential(spectrogram, L.Flatten(), inputs=(40,)))


def two_views() -> Training:
    return program(TwoViews())


def of_tokens() -> Training:
    return program(sequential(DropTokens(), inputs=(5,), dtype="int64"))


def masked_lstm() -> Training:
    table, lstm = L.Embedding(9, 4, mask_zero=True), L.LSTM(4, dropout=0.3, recurrent_dropout=0.3)
    return program(sequential(table, lstm, inputs=(5,), dtype="int64"))


CASES = [
    touching("MelSpectrogram, which clips at the maximum", clips, SOUNDS, told="MelSpectrogram"),
    touching("dropout over two views", two_views, told="for each: model(real), model(fake)"),
    touching("dropout on the tokens of all rows", of_tokens, IDS, told=""),
    touching("a Mean inside a layer", mean_in_a_layer, told="keep sums and counts"),
    touching("a mean in a trained weight", with_layer(Overwrites), told="the state 'overwrites"),
    touching("a counter in a tf.Variable", with_layer(VariableCounter)),
    touching("a loss that calls another model", calls_another_model),
    touching("seeds beside the model", seeds_beside_the_model, options={"micro_batches": 3}),
    touching("WGAN-GP in micro-batches", wgan_gp, options={"micro_batches": 2}),
    touching("noise of four rows", with_layer(WeightNoise)),
    touching("LSTM with dropout behind a mask", masked_lstm, IDS, sizes=(7, 1)),
]
