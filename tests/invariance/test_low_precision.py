"""Precisions: float64 to its own rounding, sixteen bits within bounds that were measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
from case import SIZES, Case, cut, integers, normal
from keras import layers

from tfmultigpu.testing import Training

ROWS = sum(SIZES)
X = normal(ROWS, 6)
Y = integers(4, ROWS)


def mlp(policy: str, optimizer: Callable[[], Any] | None = None, output: str = "float32") -> Any:
    def build() -> Training:
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(5, "tanh", dtype=policy, kernel_regularizer="l2"),
                layers.Dense(4, dtype=policy),
                layers.Activation("linear", dtype=output),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype=output)
        return Training(model, (optimizer or sgd)(), loss)

    return build


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def scaling() -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**10, dynamic_growth_steps=3)


def one_wide_layer() -> Training:
    inputs = keras.Input((6,))
    hidden = layers.Dense(5, "tanh", dtype="float32")(inputs)
    hidden = layers.Dense(5, "tanh", dtype="float64", kernel_regularizer="l2")(hidden)
    outputs = layers.Dense(4, dtype="float32")(hidden)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Training(keras.Model(inputs, outputs), sgd(), loss)


def normalised(policy: str) -> Callable[[], Training]:
    """Layers that Keras computes in float32 inside a model that does not."""

    def build() -> Training:
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(6, use_bias=False, dtype=policy),
                layers.BatchNormalization(synchronized=True, dtype=policy),
                layers.LayerNormalization(dtype=policy),
                layers.Dense(4, dtype=policy),
                layers.Activation("linear", dtype="float32"),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return Training(model, sgd(), loss)

    return build


def sixteen(
    name: str,
    build: Any,
    loss: float,
    rest: float,
    measured: str,
    workers: bool = False,
    **options: Any,
) -> Case:
    """Losses within one bound; weights, norms and predictions within a wider one.

    TensorFlow cannot make variables of bfloat16 on several workers; of the others, some run there.
    """
    return Case(
        name,
        build,
        cut(X, Y),
        workers=workers,
        reason=f"sums of few digits depend on how a batch is cut; measured: {measured}",
        options={"tolerance": rest, "tolerances": {"loss": loss}, **options},
    )


# The logs are float32 whatever the model is, so that only they differ by its rounding.
WIDE = {"tolerance": 1e-12, "tolerances": {"loss": 1e-6, "gradient_norm": 1e-6}}

CASES = [
    Case("float64", mlp("float64", output="float64"), cut(X, Y), options=WIDE),
    Case(
        "float64 in micro-batches",
        mlp("float64", output="float64"),
        cut(X, Y),
        replicas=(3,),
        options={"micro_batches": 3, **WIDE},
        workers=False,
    ),
    Case("a float64 layer in a float32 model", one_wide_layer, cut(X, Y), workers=False),
    sixteen(
        "mixed_float16 with a dynamic loss scale",
        mlp("mixed_float16"),
        1e-3,
        4e-3,
        "losses 2.1e-4, predictions 9.8e-4, weights 1.1e-4",
        workers=True,
        loss_scale="dynamic",
        micro_batches=2,
    ),
    sixteen(
        "mixed_float16 with a LossScaleOptimizer",
        mlp("mixed_float16", scaling),
        1e-3,
        4e-3,
        "losses 3.0e-4, predictions 9.8e-4, weights 1.1e-4",
    ),
    sixteen(
        "mixed_float16 and normalisation",
        normalised("mixed_float16"),
        2e-3,
        6e-3,
        "losses 5.0e-4, predictions 1.5e-3, weights 5.7e-4",
    ),
    sixteen(
        "mixed_bfloat16 and normalisation",
        normalised("mixed_bfloat16"),
        8e-3,
        3e-2,
        "losses 2.1e-3, predictions 7.8e-3, weights 3.3e-3",
        workers=True,
    ),
    sixteen(
        "mixed_bfloat16",
        mlp("mixed_bfloat16"),
        6e-3,
        3e-2,
        "losses 1.6e-3, predictions 7.8e-3, weights 1.5e-3",
    ),
    sixteen(
        "float16 throughout, loss and labels too",
        mlp("float16", output="float16"),
        4e-3,
        8e-3,
        "losses 8.9e-4, predictions 1.7e-3, weights 9.2e-4",
        workers=True,
    ),
    sixteen(
        "bfloat16 throughout, loss and labels too",
        mlp("bfloat16", output="bfloat16"),
        2e-2,
        3e-2,
        "losses 7.3e-3, predictions 7.8e-3, weights 3.9e-3",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replicas_give_what_one_device_gives(case: Case) -> None:
    case.hold()
