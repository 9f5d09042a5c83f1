"""What is trained: five small models on made-up data, the same for every contender."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["BATCH_SIZE", "CLASSES", "WORKLOADS", "Workload", "mlp"]

BATCH_SIZE = 64
CLASSES = 10
_BATCHES = 32
_WORDS = 1000


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, the shape of what it is fed, and how long it is measured.

    Attributes:
        title: What a table calls it.
        example_shape: Shape of one example; float32, or int32 where ``words`` is given.
        layers: Makes what is between input and logits: a function of a Keras tensor.
        words: Examples are numbers of words below this; 0 where they are not.
        batch_size: Rows of a global batch.
        steps: Steps of a turn, a multiple of ten.
        epoch: Steps of an epoch of ``fit``, a multiple of ``steps``.
        rounds: Turns of each contender.
        forms: Ways to write the loop by hand that are tried.
        thorough: Whether the loop by hand also runs on the reduction that is fastest on CPUs, and
            Keras ``fit`` on data without end.
    """

    title: str
    example_shape: tuple[int, ...]
    layers: Callable[[Any], Any]
    words: int = 0
    batch_size: int = BATCH_SIZE
    steps: int = 50
    epoch: int = 50
    rounds: int = 7
    forms: tuple[str, ...] = ("iterator",)
    thorough: bool = False

    def model(self) -> Any:
        """Returns a new Keras model; the same weights each time."""
        import keras

        keras.utils.set_random_seed(0)
        inputs = keras.Input(self.example_shape, dtype="int32" if self.words else "float32")
        return keras.Model(inputs, keras.layers.Dense(CLASSES)(self.layers(inputs)))

    def arrays(self, rows: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns examples and integer labels, a whole number of global batches of them."""
        rng = np.random.default_rng(0)
        rows = self.batch_size * _BATCHES if rows is None else rows
        if self.words:
            examples = rng.integers(0, self.words, (rows, *self.example_shape), dtype=np.int32)
        else:
            examples = rng.standard_normal((rows, *self.example_shape), dtype=np.float32)
        return examples, rng.integers(0, CLASSES, rows, dtype=np.int32)

    def dataset(self) -> Any:
        """Returns a dataset of global batches without end, in a fixed order.

        Without end and without a partial batch because that is where ``tf.distribute`` is fastest:
        it then leaves out the check for the end of data, and ``fit`` does not fail.
        """
        import tensorflow as tf

        batches = tf.data.Dataset.from_tensor_slices(self.arrays()).batch(self.batch_size)
        options = tf.data.Options()
        # With it, letting go of TensorFlow's iterators, as fit does, waits for the tuning: seconds.
        options.autotune.enabled = False
        return batches.repeat().prefetch(4).with_options(options)


def mlp(width: int, layers: int = 2) -> Callable[[Any], Any]:
    """Returns dense layers of this width, one after the other."""

    def stack(x: Any) -> Any:
        import keras

        for _ in range(layers):
            x = keras.layers.Dense(width, activation="relu")(x)
        return x

    return stack


def _cnn(x: Any) -> Any:
    from keras import layers

    for channels in (16, 32):
        x = layers.Conv2D(channels, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    return layers.Flatten()(x)


def _transformer(x: Any) -> Any:
    from keras import layers

    x = layers.Embedding(_WORDS, 64)(x)
    for _ in range(2):
        attended = layers.MultiHeadAttention(num_heads=2, key_dim=32)(x, x)
        x = layers.LayerNormalization()(x + attended)
        hidden = layers.Dense(128, activation="relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(64)(hidden))
    return layers.GlobalAveragePooling1D()(x)


def _resnet(x: Any) -> Any:
    from keras import layers

    def convolution(x: Any, channels: int, size: int = 3, strides: int = 1) -> Any:
        # A bias before a normalisation has no gradient but noise, which Adam makes large.
        x = layers.Conv2D(channels, size, strides, padding="same", use_bias=False)(x)
        return layers.BatchNormalization(synchronized=True)(x)

    x = layers.ReLU()(convolution(x, 8))
    for channels in (8, 16, 32):
        strides = 1 if channels == 8 else 2
        beside = x if strides == 1 else convolution(x, channels, 1, strides)
        y = layers.ReLU()(convolution(x, channels, 3, strides))
        x = layers.ReLU()(convolution(y, channels) + beside)
    return layers.GlobalAveragePooling2D()(x)


_FEWER: dict[str, Any] = {"steps": 20, "epoch": 40, "rounds": 5}
_THOROUGH: dict[str, Any] = {"forms": ("batch", "iterator"), "thorough": True}
WORKLOADS = {
    "small_mlp": Workload("small MLP", (32,), mlp(64), steps=100, epoch=100, **_THOROUGH),
    "cnn": Workload("CNN 16x16x3", (16, 16, 3), _cnn),
    "wide_mlp": Workload("wide MLP, 1.3 M parameters", (256,), mlp(1024), **_FEWER),
    "transformer": Workload(
        "small transformer: embedding and 2 attention blocks", (32,), _transformer, _WORDS, **_FEWER
    ),
    "resnet": Workload(
        "ResNet with synchronized BatchNormalization", (16, 16, 3), _resnet, **_FEWER
    ),
}
