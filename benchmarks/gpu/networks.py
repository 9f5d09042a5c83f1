"""The two networks that are timed, in full size and in one for rehearsals."""

from __future__ import annotations

import dataclasses
import functools
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
        optimizer: The name of the Keras optimizer.
        dense: Whether a loop by hand sums gradients of rows into place, as Adam needs it.
    """

    title: str
    unit: str
    units_per_row: int
    flops_per_row: float
    classes: int
    make: Callable[[], Any]
    examples: Callable[[np.random.Generator, int], np.ndarray]
    optimizer: str = "Adam"
    dense: bool = True

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


def _remat(tiny: bool) -> Network:
    """Blocks of a transformer without attention, each computed once more in the backward pass."""
    length, width, blocks = (16, 32, 2) if tiny else (512, 1024, 12)

    def make() -> Any:
        import keras
        from keras import layers

        class Block(layers.Layer):
            """Two dense layers beside a path around them."""

            def __init__(self, **options: Any) -> None:
                super().__init__(**options)
                self.wide = layers.Dense(4 * width, "gelu")
                self.narrow = layers.Dense(width)

            def build(self, shape: Any) -> None:
                self.wide.build(shape)
                self.narrow.build((*shape[:-1], 4 * width))
                self.built = True

            def call(self, x: Any) -> Any:
                return x + keras.remat(lambda x: self.narrow(self.wide(x)))(x)

        inputs = keras.Input((length, width))
        x = inputs
        for _ in range(blocks):
            x = Block()(x)
        x = layers.Dense(10)(layers.GlobalAveragePooling1D()(x))
        return keras.Model(inputs, layers.Activation("linear", dtype="float32")(x))

    def examples(random: np.random.Generator, rows: int) -> np.ndarray:
        return random.standard_normal((rows, length, width), dtype=np.float32)

    flops = length * 8.0 * blocks * 8 * width**2  # Forward twice, backward, four times 4 x width.
    return Network(f"{blocks} blocks in keras.remat", "tokens", length, flops, 10, make, examples)


def _embedding(tiny: bool) -> Network:
    """A large table, of which a step reads and changes few rows."""
    words, width = (1000, 8) if tiny else (2_000_000, 32)

    def make() -> Any:
        import keras
        from keras import layers

        inputs = keras.Input((1,), dtype="int32")
        x = layers.Flatten()(layers.Embedding(words, width)(inputs))
        return keras.Model(
            inputs, layers.Activation("linear", dtype="float32")(layers.Dense(10)(x))
        )

    def examples(random: np.random.Generator, rows: int) -> np.ndarray:
        return random.integers(0, words, (rows, 1), dtype=np.int32)

    title = f"embedding of {words} x {width}, SGD"
    return Network(title, "ids", 1, 60.0 * width, 10, make, examples, "SGD", dense=False)


def _hub(tiny: bool, *, lora: bool) -> Network:
    """The networks of Keras' own benchmarks, with random weights, from the package KerasHub."""
    import keras_hub

    length = 16 if tiny else 512
    kind = keras_hub.models.GemmaBackbone if lora else keras_hub.models.BertBackbone
    sizes: dict[str, int]
    if lora:
        sizes = {"num_query_heads": 8, "num_key_value_heads": 1, "head_dim": 256}
        sizes |= {"hidden_dim": 2048, "intermediate_dim": 32768, "num_layers": 18}
        tiny_sizes = {"num_query_heads": 2, "head_dim": 8, "hidden_dim": 16}
        tiny_sizes |= {"intermediate_dim": 32, "num_layers": 2}
    else:
        sizes = {"num_heads": 12, "hidden_dim": 768, "intermediate_dim": 3072, "num_layers": 12}
        tiny_sizes = {"num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32, "num_layers": 2}
    sizes |= tiny_sizes if tiny else {}
    words = 100 if tiny else 30522

    def make() -> Any:
        import keras
        from keras import layers

        backbone = kind(vocabulary_size=words, **sizes)
        if lora:
            backbone.enable_lora(4)
        ids = keras.Input((length,), dtype="int32")
        given = {"token_ids": ids, "padding_mask": keras.ops.ones_like(ids)}
        if not lora:
            given["segment_ids"] = keras.ops.zeros_like(ids)
        found = backbone(given)
        x = layers.GlobalAveragePooling1D()(found if lora else found["sequence_output"])
        return keras.Model(ids, layers.Activation("linear", dtype="float32")(layers.Dense(10)(x)))

    def examples(random: np.random.Generator, rows: int) -> np.ndarray:
        return random.integers(0, words, (rows, length), dtype=np.int32)

    width, layers_of = sizes["hidden_dim"], sizes["num_layers"]
    weights = layers_of * (4 * width**2 + 2 * width * sizes["intermediate_dim"])
    title = "Gemma with LoRA" if lora else "BERT base"
    return Network(title, "tokens", length, 6.0 * weights * length, 10, make, examples)


NETWORKS: dict[str, Callable[[bool], Network]] = {
    "resnet": _resnet,
    "transformer": _transformer,
    "remat": _remat,
    "embedding": _embedding,
    "bert": functools.partial(_hub, lora=False),
    "gemma": functools.partial(_hub, lora=True),
}
