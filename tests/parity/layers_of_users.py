"""Layers that users write: with memories, counters, noise, loops and gradients of their own."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from programs import FEATURES, L


class SamplesLatent(L.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, x: Any) -> Any:
        mean, log_variance = keras.ops.split(x, 2, axis=-1)
        kl = -0.5 * (1 + log_variance - mean**2 - keras.ops.exp(log_variance))
        self.add_loss(0.1 * keras.ops.mean(keras.ops.sum(kl, axis=-1)))
        noise = keras.random.normal(keras.ops.shape(mean), seed=self.seed_generator)
        return mean + keras.ops.exp(0.5 * log_variance) * noise


class Quantizes(L.Layer):
    """VQ-VAE: straight-through, the codebook a moving average of what chose each code."""

    def __init__(self) -> None:
        super().__init__()
        start = lambda shape, dtype=None: tf.reshape(tf.linspace(-1.0, 1.0, 20), (4, 5))  # noqa: E731
        self.codes = self.add_weight(shape=(4, 5), initializer=start, trainable=False)

    def call(self, x: Any) -> Any:
        apart = tf.reduce_sum((x[:, None] - self.codes[None]) ** 2, -1)
        chosen = tf.one_hot(tf.argmin(apart, -1), 4)
        quantized = chosen @ self.codes
        mean = tf.math.divide_no_nan(tf.transpose(chosen) @ x, tf.reduce_sum(chosen, 0)[:, None])
        used = tf.reduce_sum(chosen, 0)[:, None] > 0
        moved = 0.8 * self.codes + 0.2 * tf.where(used, mean, self.codes)
        self.codes.assign(tf.stop_gradient(moved))
        self.add_loss(0.25 * tf.reduce_mean((tf.stop_gradient(quantized) - x) ** 2))
        return x + tf.stop_gradient(quantized - x)


class ZeroGate(L.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.gate = self.add_weight(shape=(), initializer="zeros")

    def call(self, x: Any) -> Any:
        return x + self.gate * (x - tf.reduce_mean(x, 0))


class NormalizesItsGradient(L.Layer):
    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def identity(x: Any) -> Any:
            return tf.identity(x), lambda g: g / (tf.norm(g) + 1e-6) * 0.1

        return identity(x)


class Queue(L.Layer):
    """MoCo: keeps the last keys and compares with them."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = self.add_weight(shape=(10, FEATURES), initializer="ones", trainable=False)

    def call(self, x: Any) -> Any:
        old = self.keys.value
        self.keys.assign(tf.concat([tf.stop_gradient(x), self.keys], 0)[:10])
        return tf.concat([x, x @ tf.transpose(old)], 1)


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


class MapRows(L.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = L.Dropout(0.5)

    def call(self, x: Any, training: bool = False) -> Any:
        return tf.map_fn(lambda row: self.dropout(row[None], training=training)[0], x)


class Numpy(L.Layer):
    def call(self, x: Any) -> Any:
        return x + tf.reshape(
            tf.numpy_function(lambda x: x - x.mean(0), [tf.stop_gradient(x)], tf.float32),
            tf.shape(x),
        )


class WeightNoise(L.Layer):
    """Noise on weights, whose shape is by chance that of a shard's rows."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.seed_generator = keras.random.SeedGenerator(9)

    def call(self, x: Any) -> Any:
        noise = keras.random.normal(self.shape, seed=self.seed_generator)
        return (
            x
            + 0.3
            * tf.reduce_sum(noise * tf.cast(tf.range(self.shape[0]), "float32")[:, None], 0)[0]
        )


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


class MixUp(L.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(10)

    def call(self, x: Any) -> Any:
        share = keras.random.beta((), 0.4, 0.4, seed=self.seed_generator)
        return share * x + (1 - share) * tf.reverse(x, [0])


class Overwrites(L.Layer):
    """Keeps a mean in a weight that is trained by default, and that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = self.add_weight(shape=(FEATURES,), initializer="ones")

    def call(self, x: Any) -> Any:
        result = x - tf.stop_gradient(self.mean.value)
        self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, 0))
        return result


class PenalizesItsWeights(L.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = self.add_weight(shape=(FEATURES,), initializer="ones")

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * tf.reduce_sum(self.scale**2))
        return x * self.scale
