"""Computation on the device of the weights, for a model whose layers were placed by hand.

``tf.device`` around a layer that is built places its weights. What a step computes is traced later,
outside of it, and TensorFlow would compute all of it on the first device. A ``tf.device`` inside
``call`` places the forward pass and not the backward pass, which a tape records without devices.
Here an operation without a device is computed where the weights are that it is computed from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.steps.weight_reads import resource_outside

__all__ = ["computing_at_weights", "devices_of"]


def devices_of(model: Any) -> tuple[str, ...]:
    """Returns the devices of the weights of a model on one replica, in the order of its layers."""
    return tuple(dict.fromkeys(parse_device_name(one.value.device) for one in model.weights))


@contextmanager
def computing_at_weights(strategy: tf.distribute.Strategy, model: Any) -> Iterator[None]:
    """Places what is traced in the context where the weights of the model are.

    It changes nothing on several replicas, outside of graphs, if all weights are on one device, and
    for operations under ``tf.device``.

    Args:
        strategy: The strategy of the step.
        model: The Keras model.
    """
    if tf.executing_eagerly() or strategy.num_replicas_in_sync > 1:
        yield
        return
    if len(devices_of(model)) < 2:
        yield
        return
    graph: Any = tf.compat.v1.get_default_graph()
    places = _Places()
    with graph.device(places.device_of):
        yield
    places.forget()


class _Places:
    """Devices of the operations of a trace, in the order in which they are made."""

    def __init__(self) -> None:
        """Begins with a graph in which no operation was made."""
        self._devices: dict[Any, str] = {}
        self._order: dict[Any, int] = {}
        self._scopes: dict[tuple[int, str], str] = {}

    def forget(self) -> None:
        """Lets go of the operations; a graph keeps the function that told their devices."""
        self._devices.clear()
        self._order.clear()
        self._scopes.clear()

    def device_of(self, operation: Any) -> str:
        """Returns the device of an operation that was just made; empty if TensorFlow chooses."""
        graph, scope = id(operation.graph), _compat.forward_scope(operation)
        device = operation.device or self._of_forward(graph, scope) or self._of_inputs(operation)
        self._order[operation] = len(self._order)
        if device:
            self._devices[operation] = device
            if scope is None:
                self._scopes[graph, operation.name.rpartition("/")[0]] = device
        return device

    def _of_forward(self, graph: int, scope: str | None) -> str:
        """Returns the device of the operations whose gradient is computed."""
        while scope:
            if (graph, scope) in self._scopes:
                return self._scopes[graph, scope]
            scope = scope.rpartition("/")[0]
        return ""

    def _of_inputs(self, operation: Any) -> str:
        """Returns the device of the variable that is read, else that of the input made last.

        A weight is read after the input of its layer was made. Numbers, such as a learning rate,
        are copied instead.
        """
        for tensor in operation.inputs:
            if tensor.dtype == tf.resource:
                return str(getattr(resource_outside(tensor), "device", ""))
        for tensor in operation.inputs:
            if tensor.op not in self._order:  # TensorFlow asks nobody where it reads a variable.
                self.device_of(tensor.op)
        placed = [one for one in operation.inputs if one.op in self._devices]
        placed = [one for one in placed if one.shape.rank != 0] or placed
        if not placed:
            return ""
        return self._devices[max(placed, key=lambda one: self._order[one.op]).op]
