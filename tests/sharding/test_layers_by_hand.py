"""Layers placed by hand: computed where their weights are, alone or as a pipeline."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from cases.case import Case, hold
from law.model import Training
from one_device import cut, graph_of
from problems import labelled, normal_rows

import tfmultigpu as tmg
from tfmultigpu.devices.names import parse_device_name

layers = keras.layers
PLACES = "CPU:1", "CPU:2"
PIPELINE = {"micro_batches": 3}
X, Y = normal_rows(30, 6, 1, seed=5)
_, _, WEIGHTS = labelled(30, 1, 1)


def build() -> keras.Model:
    """Two blocks with normalization and dropout, and a sum of activations of both."""
    keras.utils.set_random_seed(2)
    x = inputs = keras.Input((6,))
    for i, place in enumerate(PLACES):
        with tf.device(place):
            inner = layers.Dense(6, "tanh", kernel_regularizer="l2", name=f"block_{i}")(x)
            inner = layers.LayerNormalization()(layers.Dropout(0.2, seed=i)(inner))
            x = layers.Add()([inner, x])
    with tf.device(PLACES[-1]):
        return keras.Model(inputs, layers.Dense(1, name="block_2")(x))


def by_hand(pipeline: bool = False) -> list[Any]:
    return [tmg.sharding.LayersByHand(pipeline)]


# Fails if activations, gradients, updates or slots are on the first device.
@pytest.mark.parametrize("pipeline", [False, True])
def test_all_is_computed_where_the_weights_are(pipeline: bool) -> None:
    options = PIPELINE if pipeline else {}
    model, sgd = build(), keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0)
    step = tmg.make_train_step(
        model, sgd, "mse", verify=False, features=by_hand(pipeline), **options
    )
    graph = graph_of(step, (X[:6], Y[:6]))
    devices: dict[str, set[str]] = {}
    large = set()
    for operation in graph.get_operations():
        device = parse_device_name(operation.device) if operation.device else ""
        if operation.type in ("MatMul", "TanhGrad", "BiasAddGrad"):
            layer = next(part for part in operation.name.split("/") if part.startswith("block_"))
            devices.setdefault(layer[:7], set()).add(device)
        if operation.type in ("L2Loss", "AssignSubVariableOp", "AssignAddVariableOp", "Mul"):
            large |= {device for one in operation.inputs if tuple(one.shape) in ((6, 6), (6,))}
    assert devices == {"block_0": {"CPU:1"}, "block_1": {"CPU:2"}, "block_2": {"CPU:2"}}
    assert large == set(PLACES)
    for variable in model.trainable_variables:
        slots = [slot for slot in sgd.variables if slot.shape == variable.shape]
        assert variable.value.device in {slot.value.device for slot in slots}


# Fails if a micro-batch without rows is added, or a weight is another device's.
@pytest.mark.parametrize("pipeline", [False, True])
def test_training_is_that_of_one_device(pipeline: bool) -> None:
    def make() -> Training:
        adam = keras.optimizers.Adam(0.01, global_clipnorm=0.5)
        loss, metric = keras.losses.MeanSquaredError(), keras.metrics.MeanSquaredError()
        return Training(build(), adam, loss, [metric])

    batches = cut((X, Y, WEIGHTS), (8, 7, 1, 2, 9))  # Also fewer rows than micro-batches.
    options = {"features": by_hand(pipeline), "verify": False, **(PIPELINE if pipeline else {})}
    hold(
        Case(
            "layers by hand", make, batches, options, replicas=(1,), bound=2e-6,
            reason="Adam divides by the root of a small moment",
        )
    )  # fmt: skip
