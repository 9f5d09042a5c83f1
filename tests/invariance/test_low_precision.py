"""Precisions: float64 to its own rounding, sixteen bits within bounds that were measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
from case import SIZES, Case, cut, integers, normal
from keras import layers

from tfmultigpu.addons.testing import Training

ROWS = sum(SIZES)
X = normal(ROWS, 6)
Y = integers(4, ROWS)


def mlp(policy: str, output: str = "float32") -> Any:
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
        return Training(model, sgd(), loss)

    return build


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)


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


def sixteen(name: str, build: Any, loss: float, rest: float, measured: str, **options: Any) -> Case:
    """Losses within one bound; weights and norms within a wider one."""
    return Case(
        name,
        build,
        cut(X, Y),
        reason=f"sums of few digits depend on how a batch is cut; measured: {measured}",
        options={"tolerance": rest, "tolerances": {"loss": loss}, **options},
    )


# The logs are float32 whatever the model is, so that only they differ by its rounding.
WIDE = {"tolerance": 1e-12, "tolerances": {"loss": 1e-6, "gradient_norm": 1e-6}}

CASES = [
    Case(
        "float64 in micro-batches",
        mlp("float64", output="float64"),
        cut(X, Y),
        options={"micro_batches": 3, **WIDE},
    ),
    sixteen(
        "mixed_float16 with a dynamic loss scale",
        mlp("mixed_float16"),
        1e-3,
        4e-3,
        "losses 2.1e-4, predictions 9.8e-4, weights 1.1e-4",
        loss_scale="dynamic",
        micro_batches=2,
    ),
    sixteen(
        "mixed_bfloat16 and normalisation",
        normalised("mixed_bfloat16"),
        8e-3,
        3e-2,
        "losses 2.1e-3, predictions 7.8e-3, weights 3.3e-3",
    ),
    sixteen(
        "float16 throughout, loss and labels too",
        mlp("float16", output="float16"),
        4e-3,
        8e-3,
        "losses 8.9e-4, predictions 1.7e-3, weights 9.2e-4",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replicas_give_what_one_device_gives(case: Case) -> None:
    case.hold()
