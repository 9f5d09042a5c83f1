"""Reads of sharded variables in the graph of a step: the weights of few layers at a time.

A replica reads a variable of another device by copying it. TensorFlow starts all reads when a step
begins, and keeps each copy until the backward pass has used it: in the end a replica holds a copy
of the whole model. Here a read waits for the inputs of the layer before, and the backward pass
reads once more.

A replica that runs ahead of the others leaves its gradients waiting where they are added, in the
end those of the whole model. So the backward pass reads the weights of a layer only when the
gradients of the second layer before have been added.

A variable that is written to in either pass is left alone: read once more, it would have another
value, and its reads could wait for a write that waits for them.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.strategies.variable_sharding import is_sharded

__all__ = ["BackwardReads", "bounding_reads", "keep_in_step", "resource_outside"]

_AHEAD = 1  # Layers whose weights are copied while the layer before them computes.
_PASSED_ON = ("Cast", "Identity")
_LOOPS = ("StatelessWhile", "While")
_WRITES = ("AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp")


@dataclasses.dataclass(frozen=True)
class _Again:
    """A read of a backward pass.

    Attributes:
        key: The number of the backward pass, and the ``id`` of the handle of the variable.
        operation: The operation.
        place: The number in the graph of the operation that uses it first.
    """

    key: tuple[int, int]
    operation: Any
    place: int


class BackwardReads:
    """Reads of the backward passes of one replica, in the order of their use.

    Attributes:
        reads: The reads; empty outside of graphs, or if no variable is sharded.
        begins: Number of operations in the graph where each backward pass begins.
        end: Number of operations where the last one ends.
    """

    def __init__(self) -> None:
        """Begins with the forward pass."""
        self.reads: list[_Again] = []
        self.begins: list[int] = []
        self.end = 0

    def backward_begins(self) -> None:
        """Notes that what follows is a backward pass."""
        self.begins.append(_count())

    def backward_ends(self) -> None:
        """Notes that what follows only scales the gradients."""
        self.end = _count()


def _count() -> int:
    if tf.executing_eagerly():
        return 0
    return len(tf.compat.v1.get_default_graph().get_operations())


@contextmanager
def bounding_reads(variables: Sequence[Any]) -> Iterator[BackwardReads]:
    """Bounds what the reads of sharded variables in the context keep on this replica.

    It changes the graph, not the results. Nothing happens outside of a graph.

    Args:
        variables: Keras variables; those that are not sharded are left out, as are those
            that are written to in the context.

    Yields:
        The reads of the backward pass, which is told when that begins and ends. If it is not told,
        all is forward.
    """
    found = BackwardReads()
    alone = {id(one.value.handle): one.value.device for one in variables if is_sharded(one)}
    if not alone or tf.executing_eagerly():
        yield found
        return
    begin = _count()
    graph: Any = tf.compat.v1.get_default_graph()
    with _compat.reading_before_loops(graph) as loops:
        yield found
    operations = graph.get_operations()
    for one in operations[begin:]:
        if one.type in _WRITES:
            alone.pop(id(resource_outside(one.inputs[0])), None)
    begins = found.begins or [len(operations)]
    places = {one: place for place, one in enumerate(operations)}
    uses = _uses(operations[begin:], places, _own_device(), alone, loops)
    _wait_in_turn([one for one in uses if one.place < begins[0]], places)
    found.reads = _read_again([one for one in uses if one.place >= begins[0]], begins, places)


def keep_in_step(
    replicas: Sequence[BackwardReads],
    parts: Mapping[tuple[int, int], Sequence[Any]],
    sums: Mapping[tuple[int, int], Any],
) -> None:
    """Has the replicas go backward together, so that gradients do not wait for each other.

    Args:
        replicas: The reads of each replica.
        parts: The gradient of each replica, by the number of the backward pass and the ``id`` of
            the handle of the variable.
        sums: Their sum, likewise.
    """
    orders = [[one.key for one in each.reads] for each in replicas]
    if not orders[0] or any(order != orders[0] for order in orders):
        return
    graph: Any = tf.compat.v1.get_default_graph()
    places = {one: place for place, one in enumerate(graph.get_operations())}
    for i in range(_AHEAD + 1, len(orders[0])):
        before = orders[0][i - _AHEAD - 1]
        if before not in sums:
            continue
        first = [each.reads[i] for each in replicas]
        # A weight that is used twice has its gradient at the second use, which may come later.
        if all(
            _made_before(part.op, one.place, each.end, places)
            for part, one, each in zip(parts[before], first, replicas, strict=True)
        ):
            for one in first:
                _compat.add_control_inputs(one.operation, [sums[before].op])


def _made_before(operation: Any, place: int, end: int, places: Mapping[Any, int]) -> bool:
    """Returns whether a gradient needs nothing of the backward pass from some place on."""
    pending, seen = [operation], set()
    while pending:
        one = pending.pop()
        if one in seen:
            continue
        seen.add(one)
        if places[one] >= end:
            pending += [tensor.op for tensor in one.inputs]
        elif places[one] >= place:
            return False
    return True


@dataclasses.dataclass(frozen=True)
class _Use:
    """An operation of this replica that takes the value of a sharded variable.

    Attributes:
        read: The operation that reads the variable.
        handle: The ``id`` of the handle of the variable.
        device: The device of the variable.
        value: The tensor that it takes.
        casts: The casts between the two.
        user: The operation.
        place: Its number in the graph.
    """

    read: Any
    handle: int
    device: str
    value: Any
    casts: tuple[Any, ...]
    user: Any
    place: int


def _own_device() -> str | None:
    """Returns the device of this replica; None outside of replicas."""
    context: Any = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return None
    number = tf.get_static_value(context.replica_id_in_sync_group)
    devices = context.strategy.extended.worker_devices
    return parse_device_name(devices[number % len(devices)])


def _uses(
    operations: Sequence[Any],
    places: Mapping[Any, int],
    own: str | None,
    alone: Mapping[int, str],
    loops: Sequence[Any],
) -> list[_Use]:
    found: list[_Use] = []
    for read in operations:
        if read.type != "ReadVariableOp":
            continue
        handle = id(resource_outside(read.inputs[0]))
        device = alone.get(handle)
        if device is None:
            continue
        pending: list[tuple[Any, tuple[Any, ...]]] = [(read.outputs[0], ())]
        while pending:
            value, casts = pending.pop()
            for user in value.consumers():
                if own is not None and (not user.device or parse_device_name(user.device) != own):
                    continue
                if user.type in _PASSED_ON:
                    pending.append((user.outputs[0], (*casts, user)))
                else:
                    found.append(_Use(read, handle, device, value, casts, user, places[user]))
                if value.op in loops and user.type in _LOOPS:
                    # The loop hands it on to that of the backward pass.
                    ends = [i for i, tensor in enumerate(user.inputs) if tensor is value]
                    pending += [(user.outputs[i], casts) for i in ends]
    return sorted(found, key=lambda one: one.place)


def resource_outside(tensor: Any) -> Any:
    """Returns the resource around all graphs that a tensor in a graph stands for."""
    while (graph := getattr(tensor, "graph", None)) is not None:
        outer = [outside for outside, inside in graph.captures if inside is tensor]
        if not outer:
            return tensor
        tensor = outer[0]
    return tensor


def _wait_in_turn(uses: Sequence[_Use], places: Mapping[Any, int]) -> None:
    """Has each read wait for the inputs of the layer before the one that uses it."""
    first = {one.read: one for one in reversed(uses)}
    reads = sorted(first, key=places.__getitem__)
    # What was made before the read cannot depend on it.
    inputs = [
        [tensor.op for tensor in first[read].user.inputs if places[tensor.op] < places[read]]
        for read in reads
    ]
    waits = [[one for one in ops if one.type not in ("Const", "Placeholder")] for ops in inputs]
    for i, read in enumerate(reads):
        _compat.add_control_inputs(read, waits[max(i - _AHEAD, 0)])


def _read_again(
    uses: Sequence[_Use], begins: Sequence[int], places: Mapping[Any, int]
) -> list[_Again]:
    """Has each backward pass take its own copy, which waits for the gradient that comes before."""
    by_read: dict[tuple[int, Any], list[_Use]] = {}
    for one in uses:
        by_read.setdefault((bisect.bisect(begins, one.place), one.read), []).append(one)
    # Before any is replaced: an operation may use several weights.
    gradients = {
        key: [tensor.op for tensor in users[0].user.inputs if places[tensor.op] >= begins[0]]
        for key, users in by_read.items()
    }
    before: list[list[Any]] = []
    found: list[_Again] = []
    for key, users in by_read.items():  # In the order of their first use.
        number, read = key
        before.append(gradients[key] or (before[-1] if before else []))
        waits = before[max(len(before) - 1 - _AHEAD, 0)] or before[-1]
        if not waits:
            continue
        with tf.control_dependencies(waits), tf.device(users[0].device):
            again = tf.raw_ops.ReadVariableOp(resource=read.inputs[0], dtype=read.outputs[0].dtype)
        found.append(_Again((number - 1, users[0].handle), again.op, users[0].place))
        again.set_shape(read.outputs[0].shape)
        values: dict[Any, Any] = {(): again}
        for one in users:
            for end in range(1, len(one.casts) + 1):
                chain = one.casts[:end]
                if chain not in values:
                    with tf.device(chain[-1].device):
                        # A loop carries what it takes where that was made: on this replica.
                        copy = tf.identity(values[chain[:-1]])
                        values[chain] = tf.cast(copy, chain[-1].outputs[0].dtype)
            for i, tensor in enumerate(one.user.inputs):
                if tensor is one.value:
                    _compat.replace_input(one.user, i, values[one.casts])
    return found
