"""Layers placed by hand on several devices under one replica, computed where their weights are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu.addons.sharding.reads import resource_outside
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.steps.features import Feature

__all__ = ["LayersByHand", "devices_of"]


def devices_of(model: Any) -> tuple[str, ...]:
    """Returns the devices of the weights of a model on one replica, in the order of its layers."""
    return tuple(dict.fromkeys(parse_device_name(one.value.device) for one in model.weights))


class LayersByHand(Feature):
    """Computes each layer where its weights are, for layers that were built under ``tf.device``.

    ``tf.device`` around a layer that is built places its weights. What a step computes is traced
    later, outside of it, and TensorFlow would compute all of it on the first device. With this
    feature an operation without a device is computed where the weights are that it is computed
    from, forward and backward, and so is the update.

    Attributes:
        pipeline: Whether the devices compute several micro-batches at one time.

    Example:
        >>> import keras, tensorflow as tf, tfmultigpu as tmg
        >>> inputs = keras.Input((4,))
        >>> with tf.device("CPU:0"):
        ...     outputs = keras.layers.Dense(4)(inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> by_hand = tmg.sharding.LayersByHand()
        >>> step = tmg.make_train_step(model, keras.optimizers.SGD(), "mse", features=[by_hand])
    """

    def __init__(self, pipeline: bool = False) -> None:
        """Takes whether micro-batches overlap.

        Args:
            pipeline: With ``micro_batches=n`` in ``make_train_step``: computes as many of them at
                one time as there are devices, and one more. A micro-batch begins when the gradients
                of an earlier one have been added, so that not all activations are kept.
        """
        self.pipeline = pipeline

    def bind(self, step: Any) -> None:
        """Takes the step.

        Raises:
            TfMultiGpuError: There are several replicas; or nothing that a pipeline can overlap.
        """
        self._step = step
        self._forward: set[Any] = set()
        replicas = step.strategy.num_replicas_in_sync
        if replicas > 1:
            raise TfMultiGpuError(
                "Layers are placed by hand on one replica; several compute the whole model each. "
                f"Received: LayersByHand and {replicas} replicas. Leave it out, or write "
                "make_train_step(..., tf.distribute.get_strategy())."
            )
        if not self.pipeline:
            return
        devices = devices_of(step.model)
        if step.model.built and len(devices) == 1:
            raise TfMultiGpuError(
                "A pipeline needs layers on several devices. Received: LayersByHand(pipeline=True),"
                f" and all weights of model {step.model.name!r} on {devices[0]}. Build each block "
                'under its device, outside of scopes: with tf.device("GPU:1"): x = layer(x).'
            )
        loops = [feature for feature in step.features if hasattr(feature, "loop")]
        if not loops:
            raise TfMultiGpuError(
                "A pipeline computes several micro-batches side by side. Received: "
                "LayersByHand(pipeline=True) and micro_batches=1. Write micro_batches=8."
            )
        loops[0].loop = self._side_by_side

    def on_one_device(self) -> Feature:
        """Returns the same without a pipeline: the layers are where they are."""
        return LayersByHand()

    @contextmanager
    def around_trace(self) -> Iterator[None]:
        """Places what a step traces, its update included."""
        graph: Any = tf.compat.v1.get_default_graph()
        with graph.device(self._device_of):
            yield

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Places the gradient of an operation where that was computed."""
        graph: Any = tf.compat.v1.get_default_graph()
        self._forward = set(graph.get_operations())
        yield
        self._forward = set()

    def _device_of(self, operation: Any) -> str:
        """Returns the device of an operation that was just made; empty if TensorFlow chooses.

        That is the device of the variable that it reads, else of its last input: a weight is after
        the input of its layer. A gradient is computed from what the operation has kept. Numbers,
        such as a learning rate, are copied instead.
        """
        if operation.device:
            return str(operation.device)
        for tensor in operation.inputs:
            if tensor.dtype == tf.resource:
                return str(getattr(resource_outside(tensor), "device", ""))
        # TensorFlow asks nobody where it reads a variable.
        placed = [(tensor, self._device_of(tensor.op)) for tensor in _read_or_placed(operation)]
        placed = [pair for pair in placed if pair[1]]
        placed = [pair for pair in placed if pair[0].shape.rank != 0] or placed
        kept = [pair for pair in placed if pair[0].op in self._forward]
        return (kept or placed)[-1][1] if placed else ""

    def _side_by_side(
        self, body: Callable[..., Any], most: int, count: Any, values: Sequence[Any]
    ) -> list[Any]:
        """Adds micro-batches without a loop, so that TensorFlow computes them at one time."""
        # With one more than devices, none of these waits for the gradients of another.
        at_once = len(devices_of(self._step.model)) + 1
        done = [list(values)]
        for number in range(most):
            with tf.device("CPU:0"):
                here = tf.constant(number) < count
                part = tf.minimum(number, count - 1)
            waits = done[-at_once] if number >= at_once else []
            with tf.control_dependencies(waits):
                _, *added = body(part, *done[-1])
            # One without rows has computed the last rows again.
            pairs = zip(added, done[-1], strict=True)
            done.append([tf.where(here, new, old) for new, old in pairs] if number else added)
        return done[-1]


def _read_or_placed(operation: Any) -> list[Any]:
    """Returns the inputs whose device is known, or is that of a variable."""
    return [
        tensor
        for tensor in operation.inputs
        if tensor.op.device or any(source.dtype == tf.resource for source in tensor.op.inputs)
    ]
