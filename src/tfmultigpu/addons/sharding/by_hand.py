"""Layers placed by hand on several devices under one replica, computed where their weights are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu.addons.sharding.reads import resource_outside
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.steps.features.feature import BoundStep, Feature
from tfmultigpu.steps.features.micro_batches import MicroBatches
from tfmultigpu.strategies.topology import devices_of
from tfmultigpu.types import Scalar


class LayersByHand(Feature):
    """Computes each layer where its weights are, for layers that were built under ``tf.device``.

    That holds for forward pass, backward pass and update. By itself TensorFlow would compute all of
    them on the first device.

    Args:
        pipeline: Whether devices overlap, with ``micro_batches=n`` in ``make_train_step``: as many
            micro-batches are computed at one time as there are devices, and one more.

    Example:
        >>> import keras, tensorflow as tf, tfmultigpu as tmg
        >>> inputs = keras.Input((4,))
        >>> with tf.device("CPU:0"):
        ...     outputs = keras.layers.Dense(4)(inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> by_hand = tmg.sharding.LayersByHand()
        >>> step = tmg.make_train_step(model, keras.optimizers.SGD(), "mse", features=[by_hand])
    """

    # By ``tf.gradients`` the gradient of an operation is computed where that was; by a tape not.
    colocates_gradients = True

    def __init__(self, pipeline: bool = False) -> None:
        self.loop = self._side_by_side if pipeline else None

    def bind(self, step: BoundStep) -> None:
        """Keeps the model, if there is one replica, and for a pipeline several micro-batches."""
        self._model = step.model
        replicas = step.strategy.num_replicas_in_sync
        if replicas > 1:
            raise TfMultiGpuError(
                "Layers are placed by hand on one replica.",
                f"LayersByHand and {replicas} replicas",
                "Write make_train_step(..., tf.distribute.get_strategy()).",
            )
        in_parts = any(isinstance(feature, MicroBatches) for feature in step.features)
        if self.loop is not None and not in_parts:
            raise TfMultiGpuError(
                "A pipeline needs several micro-batches.",
                "micro_batches=1",
                "Write micro_batches=8.",
            )

    def on_one_device(self) -> Feature:
        """Returns the same without a pipeline: the layers are where they are."""
        return LayersByHand()

    @contextmanager
    def around_trace(self) -> Iterator[None]:
        """Places what a step traces, its update included."""
        graph: Any = tf.compat.v1.get_default_graph()
        with graph.device(_device_of):
            yield

    def _side_by_side(
        self, body: Callable[..., Any], most: int, count: Scalar, values: Sequence[Any]
    ) -> list[Any]:
        """Adds micro-batches without a loop, so that TensorFlow computes them at one time."""
        # With one more than devices, none of these waits for the gradients of another.
        at_once = len(devices_of(self._model)) + 1
        done = [list(values)]
        for number in range(1, most):
            with tf.device("CPU:0"):
                here = tf.constant(number) < count
                part = tf.minimum(number, count - 1)
            waits = done[-at_once] if number >= at_once else []
            with tf.control_dependencies(waits):
                _, *added = body(part, *done[-1])
            # One without rows has computed the last rows again.
            pairs = zip(added, done[-1], strict=True)
            done.append([tf.where(here, new, old) for new, old in pairs])
        return done[-1]


def _device_of(operation: Any) -> str:
    """Returns the device of an operation that was just made; empty if TensorFlow chooses.

    That is the device of the variable that it reads, else of its last input: a weight is after the
    input of its layer. Numbers and indices, such as a learning rate, are copied instead.
    """
    if operation.device:
        return str(operation.device)
    placed: list[tuple[Any, str]] = []
    for tensor in operation.inputs:
        if tensor.dtype == tf.resource:
            return str(getattr(resource_outside(tensor), "device", ""))
        # TensorFlow asks nobody where it reads a variable.
        read = any(source.dtype == tf.resource for source in tensor.op.inputs)
        device = _device_of(tensor.op) if read else tensor.op.device
        placed += [(tensor, device)] if device else []
    values = [pair for pair in placed if pair[0].shape.rank != 0 and pair[0].dtype.is_floating]
    return (values or placed)[-1][1] if placed else ""
