"""The two networks that are timed, in full size and in one for rehearsals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["NETWORKS", "PRECISIONS", "Network", "network"]

# A Keras policy, and whether float32 products may be computed in TF32.
PRECISIONS = {
    "float32": ("float32", False),
    "tf32": ("float32", True),
    "float16": ("mixed_float16", False),
    "bfloat16": ("mixed_bfloat16", False),
}


@dataclasses.dataclass(frozen=True)
class Network:
    """A network and its synthetic data.

    Attributes:
        title: What a table calls it.
        unit: What throughput counts, ``"images"`` or ``"tokens"``.
        units_per_row: How many of them a row is.
        flops_per_row: Floating-point operations of forward and backward, a multiplication and an
            addition counted as two.
        classes: Labels are below this.
        make: Makes the Keras model.
        examples: Makes so many rows.
    """

    title: str
    unit: str
    units_per_row: int
    flops_per_row: float
    classes: int
    make: Callable[[], Any]
    examples: Callable[[np.random.Generator, int], np.ndarray]

    def model(self, precision: str) -> Any:
        """Returns a new model with this policy; the same weights each time."""
        import keras

        before = keras.mixed_precision.dtype_policy()
        keras.mixed_precision.set_dtype_policy(PRECISIONS[precision][0])
        try:
            keras.utils.set_random_seed(0)
            return self.make()
        finally:
            keras.mixed_precision.set_dtype_policy(before)

    def batch(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns examples and integer labels."""
        random = np.random.default_rng(0)
        labels = random.integers(0, self.classes, rows, dtype=np.int32)
        return self.examples(random, rows), labels


def network(name: str, *, tiny: bool = False) -> Network:
    """Returns one of ``NETWORKS``; a tiny one trains on any CPU."""
    return NETWORKS[name](tiny)


def _resnet(tiny: bool) -> Network:
    side, classes = (32, 10) if tiny else (224, 1000)

    def small() -> Any:
        """Two blocks in place of sixteen: XLA takes minutes to compile those on a CPU."""
        import keras
        from keras import layers

        inputs = keras.Input((side, side, 3))
        x = layers.Conv2D(8, 7, strides=2, padding="same")(inputs)
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        for _ in range(2):
            y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 1)(x)))
            y = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(y))
            x = layers.ReLU()(x + y)
        x = layers.Dense(classes)(layers.GlobalAveragePooling2D()(x))
        return keras.Model(inputs, layers.Activation("linear", dtype="float32")(x))

    def large() -> Any:
        import keras

        base = keras.applications.ResNet50(
            weights=None, input_shape=(side, side, 3), classes=classes, classifier_activation=None
        )
        # Logits in float32, whatever the policy.
        logits = keras.layers.Activation("linear", dtype="float32")(base.output)
        return keras.Model(base.input, logits)

    def examples(random: np.random.Generator, rows: int) -> np.ndarray:
        return random.standard_normal((rows, side, side, 3), dtype=np.float32)

    # 4.1e9 multiplications and additions forward at 224 x 224; the backward pass takes twice that.
    flops = 3 * 2 * (1e6 if tiny else 4.1e9)
    title = f"{'two blocks' if tiny else 'ResNet-50'}, {side} x {side}"
    make = small if tiny else large
    return Network(title, "images", 1, flops, classes, make, examples)


def _transformer(tiny: bool) -> Network:
    words, length, width, heads, blocks = (100, 16, 32, 2, 2) if tiny else (30522, 512, 768, 12, 12)
    classes = 10

    def make() -> Any:
        import keras
        from keras import layers

        inputs = keras.Input((length,), dtype="int32")
        x = layers.Embedding(words, width)(inputs)
        x = x + layers.Embedding(length, width)(keras.ops.arange(length))
        for _ in range(blocks):
            attended = layers.MultiHeadAttention(heads, width // heads)(x, x)
            x = layers.LayerNormalization()(x + layers.Dropout(0.1)(attended))
            hidden = layers.Dense(4 * width, "gelu")(x)
            hidden = layers.Dropout(0.1)(layers.Dense(width)(hidden))
            x = layers.LayerNormalization()(x + hidden)
        x = layers.Dense(classes)(layers.GlobalAveragePooling1D()(x))
        return keras.Model(inputs, layers.Activation("linear", dtype="float32")(x))

    def examples(random: np.random.Generator, rows: int) -> np.ndarray:
        return random.integers(0, words, (rows, length), dtype=np.int32)

    weights = blocks * 12 * width**2  # those that multiply each token; not the embeddings
    flops = length * (6.0 * weights + 12.0 * blocks * width * length)
    parameters = weights + (words + length) * width
    size = f"{parameters / 1e6:.0f} M" if not tiny else f"{parameters / 1e3:.0f} thousand"
    title = f"transformer encoder, {size} parameters, {length} tokens"
    return Network(title, "tokens", length, flops, classes, make, examples)


NETWORKS: dict[str, Callable[[bool], Network]] = {"resnet": _resnet, "transformer": _transformer}
