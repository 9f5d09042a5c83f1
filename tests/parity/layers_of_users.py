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
