"""What is trained: three small models on made-up data, the same for every contender."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["BATCH_SIZE", "CLASSES", "WORKLOADS", "Workload"]

BATCH_SIZE = 64
CLASSES = 10
_BATCHES = 32


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and the shape of what it is fed.

    Attributes:
        title: What a table calls it.
        example_shape: Shape of one example, float32.
        layers: Makes the hidden layers; the last one, of ``CLASSES`` logits, is added to them.
    """

    title: str
    example_shape: tuple[int, ...]
    layers: Callable[[], list[Any]]

    def model(self) -> Any:
        """Returns a new Keras model; the same weights each time."""
        import keras

        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [keras.Input(self.example_shape), *self.layers(), keras.layers.Dense(CLASSES)]
        )

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns examples and integer labels, a whole number of global batches of them."""
        rng = np.random.default_rng(0)
        rows = BATCH_SIZE * _BATCHES
        examples = rng.standard_normal((rows, *self.example_shape), dtype=np.float32)
        return examples, rng.integers(0, CLASSES, rows, dtype=np.int32)

    def dataset(self) -> Any:
        """Returns a dataset of global batches without end, in a fixed order.

        Without end and without a partial batch because that is where ``tf.distribute`` is fastest:
        it then leaves out the check for the end of data, and ``fit`` does not fail.
        """
        import tensorflow as tf

        batches = tf.data.Dataset.from_tensor_slices(self.arrays()).batch(BATCH_SIZE)
        options = tf.data.Options()
        # With it, letting go of TensorFlow's iterators, as fit does, waits for the tuning: seconds.
        options.autotune.enabled = False
        return batches.repeat().prefetch(4).with_options(options)


def _small_mlp() -> list[Any]:
    import keras

    return [keras.layers.Dense(64, activation="relu") for _ in range(2)]


def _wide_mlp() -> list[Any]:
    import keras

    return [keras.layers.Dense(1024, activation="relu") for _ in range(2)]


def _cnn() -> list[Any]:
    from keras import layers

    return [
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
    ]


WORKLOADS = {
    "small_mlp": Workload("small MLP", (32,), _small_mlp),
    "cnn": Workload("CNN 16x16x3", (16, 16, 3), _cnn),
    "wide_mlp": Workload("wide MLP, 1.3 M parameters", (256,), _wide_mlp),
}
