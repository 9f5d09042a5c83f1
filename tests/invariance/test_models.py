"""Kinds of models: nested, subclassed, shared and frozen layers, several inputs and outputs."""

from __future__ import annotations

import keras
import pytest
from case import Case, cut, integers, normal

from tfmultigpu.testing import Training

X = normal(24, 6)
Y = integers(4, 24)


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def crossentropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp() -> Training:
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(4)]
    )
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    return Training(model, sgd(), crossentropy(), metrics=[accuracy])


CASES = [
    Case("dense layers", mlp, cut(X, Y)),
    Case("dense layers in micro-batches", mlp, cut(X, Y), options={"micro_batches": 3}),
    Case("dense layers, unequal shares", mlp, cut(X, Y), options={"shares": (3, 1)}, replicas=(2,)),
    Case("dense layers, many steps in one call", mlp, cut(X, Y), options={"steps_per_call": 2}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replicas_give_what_one_device_gives(case: Case) -> None:
    case.hold()
