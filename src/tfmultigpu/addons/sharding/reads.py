"""Reads of sharded variables in the graph of a step: the weights of few layers at a time.

A replica reads a variable of another device by copying it. TensorFlow starts all reads when a step
begins, and keeps each copy until the backward pass has used it: in the end a copy of the whole
model. Here a read waits for the inputs of the layer before, and the backward pass reads once more.

A replica that runs ahead leaves its gradients waiting where they are added. So gradients are added
on the device of their variable, and the backward pass reads the weights of a layer only when the
weights of the second layer before are added.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.addons.sharding import _private
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.steps.features import Feature
from tfmultigpu.steps.features.xla import CompileByXla
from tfmultigpu.steps.values import Pass, Phase, Rows, Shards, Trace
from tfmultigpu.strategies.collectives import add_on_device
from tfmultigpu.strategies.row_parts import sharded_of

_AHEAD = 1  # Layers whose weights are copied while the layer before them computes.
_PASSED_ON = ("Cast", "Identity")
_LOOPS = ("StatelessWhile", "While")

# The number of a backward pass, and the ``id`` of the handle of a variable.
_Key = tuple[int, int]


class _Use(NamedTuple):
    """An operation, ``place`` in its graph, of a replica that takes the value of a variable."""

    read: Any  # The operation that reads the variable.
    handle: int  # The ``id`` of the handle of the variable.
    device: str  # The device of the variable.
    value: Any  # The tensor that the user takes,
    casts: tuple[Any, ...]  # and the casts between the two.
    user: Any
    place: int


class _SecondRead(NamedTuple):
    """A read of a backward pass, and the place of the operation that uses it first."""

    key: _Key
    operation: Any
    place: int


class _ReplicaTrace:
    """What one replica reads going backward, in the order of use; and where each pass begins.

    Places are numbers of operations. After ``end`` gradients are only scaled.
    """

    def __init__(self) -> None:
        self.graph: Any = tf.compat.v1.get_default_graph()
        self.begins: list[int] = []
        self.end = 0
        self.reads: list[_SecondRead] = []


class ShardedReads(Feature):
    """Bounds the copies of sharded variables in a step, and adds their gradients where they are."""

    def bind(self, step: Any) -> None:
        """Keeps the step, with the model and the variables that it trains."""
        self._step = step
        self._replicas: dict[int, _ReplicaTrace] = {}  # By number.
        self._by_xla = any(isinstance(feature, CompileByXla) for feature in step.features)

    def on_one_device(self) -> Feature:
        """Returns the same: one device reads all weights of all the others."""
        return ShardedReads()

    @contextmanager
    def around_model(self, rows: Rows) -> Iterator[None]:
        """Rewires the reads in what a replica traces."""
        devices = {
            id(variable.value.handle): variable.value.device
            for variable in sharded_of(self._step.model.variables)
        }
        if not devices:
            yield
            return
        if self._by_xla:
            raise TfMultiGpuError(
                "XLA cannot read a variable on another device.",
                f"jit_compile=True for a model with {len(devices)} sharded variables",
                "Leave jit_compile out, or create the model without tmg.sharded_variables().",
            )
        begin, replica = _count(), _ReplicaTrace()
        self._replicas[_own_number()] = replica
        with _private.reading_before_loops(replica.graph) as loops:
            yield
        operations = replica.graph.get_operations()
        begins = replica.begins or [len(operations)]
        places = {operation: place for place, operation in enumerate(operations)}
        uses = _uses(operations[begin:], places, _own_device(), devices, loops)
        _wait_in_turn([use for use in uses if use.place < begins[0]], places)
        backward = [use for use in uses if use.place >= begins[0]]
        replica.reads = _read_again(backward, begins, places)
        if not replica.begins:  # Nobody asks again what an evaluation has read.
            self._replicas.clear()

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Notes where each backward pass begins and ends."""
        replica = _ReplicaTrace()
        if self._replicas:  # Else nothing is sharded, and nobody needs to know which replica it is.
            replica = self._replicas.get(_own_number(), replica)
        replica.begins.append(_count())
        yield
        replica.end = _count()

    def around_phase(self, phase: Phase) -> Phase:
        """Returns the phase, with the gradients of sharded variables added over the replicas."""

        def added(shards: Shards, trace: Trace) -> Any:
            self._replicas = {}
            result: Any = phase(shards, trace)
            # Predictions, and a search for a layer, give something else.
            is_passes = isinstance(result, list) and isinstance(result[0], Pass)
            return self._add(result) if is_passes else result

        return added

    def _add(self, passes: list[Pass]) -> list[Pass]:
        """Returns the passes, the first with the sums and the others with None in their place."""
        parts: dict[_Key, list[Any]] = {}
        sums: dict[_Key, Any] = {}
        trained = self._step.trained if passes[0].gradients else []
        sharded = [(i, each.copies[0]) for i, each in enumerate(trained) if each.is_sharded]
        gradients = [list(map(list, of_replica.gradients)) for of_replica in passes]
        for number in range(len(passes[0].gradients)):
            for i, variable in sharded:
                replicas = [each[number][i] for each in gradients]
                if any(part is None for part in replicas):
                    continue  # The step has said if they differ.
                key = number, id(variable.handle)
                parts[key] = replicas
                sums[key] = add_on_device(replicas, variable.device)
                for replica, each in enumerate(gradients):
                    each[number][i] = None if replica else sums[key]
        _keep_in_step([self._replicas[i] for i in sorted(self._replicas)], parts, sums)
        self._replicas = {}
        return [
            one._replace(gradients=tuple(map(tuple, each)))
            for one, each in zip(passes, gradients, strict=True)
        ]


def _count() -> int:
    graph: Any = tf.compat.v1.get_default_graph()
    return len(graph.get_operations())


def _own_number() -> int:
    """Returns the number of this replica; layers that meet have replicas take turns."""
    context: Any = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def _own_device() -> str | None:
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync == 1:
        return None
    devices = strategy.extended.worker_devices
    return parse_device_name(devices[_own_number() % len(devices)])


def resource_outside(tensor: Any) -> Any:
    """Returns the resource around all graphs that a tensor in a graph stands for."""
    while (graph := getattr(tensor, "graph", None)) is not None:
        outer = [outside for outside, inside in graph.captures if inside is tensor]
        if not outer:
            return tensor
        tensor = outer[0]
    return tensor


def _uses(
    operations: Sequence[Any],
    places: Mapping[Any, int],
    own: str | None,
    devices: Mapping[int, str],
    loops: Sequence[Any],
) -> list[_Use]:
    """Returns what this replica does with the values of sharded variables, in order."""
    uses: list[_Use] = []
    for read in operations:
        if read.type != "ReadVariableOp":
            continue
        handle = id(resource_outside(read.inputs[0]))
        device = devices.get(handle)
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
                    uses.append(_Use(read, handle, device, value, casts, user, places[user]))
                if value.op in loops and user.type in _LOOPS:
                    # The loop hands it on to that of the backward pass.
                    ends = [i for i, tensor in enumerate(user.inputs) if tensor is value]
                    pending += [(user.outputs[i], casts) for i in ends]
    return sorted(uses, key=lambda use: use.place)


def _wait_in_turn(uses: Sequence[_Use], places: Mapping[Any, int]) -> None:
    """Has each read wait for the inputs of the layer before the one that uses it."""
    first = {use.read: use for use in reversed(uses)}
    reads = sorted(first, key=places.__getitem__)
    waits: list[list[tf.Operation]] = []
    for read in reads:
        made_before = []
        for tensor in first[read].user.inputs:
            # What was made before the read cannot depend on it.
            if places[tensor.op] < places[read] and tensor.op.type not in ("Const", "Placeholder"):
                made_before.append(tensor.op)
        waits.append(made_before)
    for i, read in enumerate(reads):
        _compat.add_control_inputs(read, waits[max(i - _AHEAD, 0)])


def _read_again(
    uses: Sequence[_Use], begins: Sequence[int], places: Mapping[Any, int]
) -> list[_SecondRead]:
    """Has each backward pass take its own copy, which waits for the gradient that comes before."""
    by_read: dict[tuple[int, Any], list[_Use]] = {}
    for use in uses:
        by_read.setdefault((bisect.bisect(begins, use.place), use.read), []).append(use)
    # Before any is replaced: an operation may use several weights.
    gradients: dict[tuple[int, Any], list[tf.Operation]] = {}
    for key, users in by_read.items():
        operations = [tensor.op for tensor in users[0].user.inputs]
        gradients[key] = [op for op in operations if places[op] >= begins[0]]
    before: list[list[Any]] = []
    reads: list[_SecondRead] = []
    for key, users in by_read.items():  # In the order of their first use.
        number, read = key
        before.append(gradients[key] or (before[-1] if before else []))
        waits = before[max(len(before) - 1 - _AHEAD, 0)] or before[-1]
        if not waits:
            continue
        with tf.control_dependencies(waits), tf.device(users[0].device):
            again = tf.raw_ops.ReadVariableOp(resource=read.inputs[0], dtype=read.outputs[0].dtype)
        again.set_shape(read.outputs[0].shape)
        reads.append(_SecondRead((number - 1, users[0].handle), again.op, users[0].place))
        values: dict[Any, Any] = {(): again}
        for use in users:
            for end in range(1, len(use.casts) + 1):
                chain = use.casts[:end]
                if chain not in values:
                    with tf.device(chain[-1].device):
                        # A loop carries what it takes where that was made: on this replica.
                        copy = tf.identity(values[chain[:-1]])
                        values[chain] = tf.cast(copy, chain[-1].outputs[0].dtype)
            for i, tensor in enumerate(use.user.inputs):
                if tensor is use.value:
                    _private.replace_input(use.user, i, values[use.casts])
    return reads


def _keep_in_step(
    replicas: Sequence[_ReplicaTrace], parts: Mapping[_Key, Sequence[Any]], sums: Mapping[_Key, Any]
) -> None:
    """Has the replicas go backward together, so that gradients do not wait for their sums."""
    graph: Any = tf.compat.v1.get_default_graph()
    # Replicas with a loop each do not wait for each other.
    orders: list[list[_Key]] = []
    for replica in replicas:
        if replica.graph is graph:
            orders.append([read.key for read in replica.reads])
    if not orders or not orders[0] or any(order != orders[0] for order in orders):
        return
    places = {operation: place for place, operation in enumerate(graph.get_operations())}
    for i in range(_AHEAD + 1, len(orders[0])):
        before = orders[0][i - _AHEAD - 1]
        if before not in sums:
            continue
        reads = [replica.reads[i] for replica in replicas]
        # A weight that is used twice has its gradient at the second use, which may come later.
        if all(
            _made_before(part.op, read.place, replica.end, places)
            for part, read, replica in zip(parts[before], reads, replicas, strict=True)
        ):
            for read in reads:
                _compat.add_control_inputs(read.operation, [sums[before].op])


def _made_before(operation: Any, place: int, end: int, places: Mapping[Any, int]) -> bool:
    """Returns whether a gradient needs nothing of the backward pass from some place on."""
    pending, seen = [operation], set()
    while pending:
        op = pending.pop()
        if op in seen:
            continue
        seen.add(op)
        if places[op] >= end:
            pending += [tensor.op for tensor in op.inputs]
        elif places[op] >= place:
            return False
    return True
