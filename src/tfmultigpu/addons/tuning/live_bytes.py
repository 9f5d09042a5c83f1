"""The least memory in which a graph can run, whatever the order of its operations.

While an operation runs, a tensor is there for sure if what makes it comes before in every order,
and something that reads it comes after in every order: one is an ancestor of the operation, another
a descendant. The bytes of all such tensors, at the operation where they are most, are a bound::

    a -> b -> op -> c       a is there while op runs if c, or what follows it, reads a

TensorFlow rewrites a graph before it runs it. So a tensor counts as nothing if it may be another
one in the end: a view, a transposed or constant one. Equal operations count once. Waits without
data are left out, which makes the bound smaller and never wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.types import Array, Tensor


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Their first output may be, or becomes, their first input.
_SAME = _names(
    "Bitcast BroadcastTo CheckNumerics Conj EnsureShape ExpandDims Identity IdentityN Pad PadV2 "
    "PlaceholderWithDefault PreventGradient Reshape ReverseV2 Snapshot Squeeze StopGradient Tile "
    "Transpose"
)
# Their outputs may be views of parts of their first input, or of any.
_VIEWS = _names("Slice StridedSlice Split SplitV Unpack")
_OF_SEVERAL = _names("AddN ConcatV2 Pack")
_REDUCE = _names("All Any Max Mean Min Prod Sum")
# Nothing of them is known, or it is there before the step and after it.
_NOTHING = _names(
    "Const Placeholder ReadVariableOp VarHandleOp TensorListGetItem TensorListFromTensor "
    "TensorListReserve EmptyTensorList TensorListSetItem "
    # A branch may return what it was given.
    "Case If StatelessCase StatelessIf"
)
# They need their inputs and memory of another size or order for their output, at one time.
_NOT_IN_PLACE = _names(
    "BatchMatMulV2 BatchMatMulV3 Conv2D Conv2DBackpropFilter Conv2DBackpropInput MatMul MaxPool "
    "MaxPoolGrad"
)
_BY_NUMBERS = {"AddV2", "Add", "Mul", "RealDiv", "Sub"}
_OF_SHAPE = {"OnesLike", "Rank", "Shape", "Size", "ZerosLike"}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_LOOPS = {"While", "StatelessWhile"}
_COUNTS = {"Const", "Identity", "Less", "LogicalAnd", "Placeholder"}


@dataclasses.dataclass(eq=False)
class _Value:
    """A tensor of the flat graph.

    Attributes:
        maker: The number of the operation that makes it.
        size: Its bytes, as far as they are known; 0 for what may be no memory of its own.
        root: What its memory may be: itself, or what it is a view of.
        is_part: Whether it is a part of the root.
        is_constant: Whether TensorFlow may compute it before the step.
        readers: The numbers of the operations that read it.
    """

    maker: int
    size: int = 0
    root: _Value | None = None
    is_part: bool = False
    is_constant: bool = False
    readers: list[int] = dataclasses.field(default_factory=list)

    def settle(self, operation: Any, inputs: Sequence[_Value], tensor: Tensor) -> None:
        """Notes what memory it may share, and whether it may be computed before.

        Args:
            operation: What makes it.
            inputs: The inputs of that.
            tensor: Which of its outputs it is.
        """
        kind = operation.type
        self.is_constant = kind == "Const" or _is_folded(operation, inputs)
        if self.is_constant or kind in _NOTHING:
            self.size = 0
        elif not inputs:
            return
        elif kind in _SAME or (kind in _OF_SEVERAL and len(inputs) <= 2):
            self._share(inputs[tensor.value_index if kind == "IdentityN" else 0])
        elif kind in _REDUCE and self.size == _bytes_of(operation.inputs[0]):
            self._share(inputs[0])
        elif kind in _VIEWS:
            self.is_part = True
            self._share(inputs[1 if kind == "Split" else 0])
        elif kind in _BY_NUMBERS and len(inputs) == 2:
            for number, other in ((0, 1), (1, 0)):
                if inputs[number].is_constant and _may_change_nothing(operation.inputs[number]):
                    self._share(inputs[other])

    def _share(self, source: _Value) -> None:
        """Is what it is made of, or a part of it."""
        self.root = source.root or source
        self.is_part = self.is_part or source.is_part
        self.is_constant = self.is_constant or source.is_constant
        # Of another size it may be memory of its own, but then the other is no longer needed.
        if not self.is_part and self.size:
            self.root.shrink(self.size)

    def shrink(self, size: int) -> None:
        """Counts no more bytes than these."""
        self.size = min(self.size, size)


@dataclasses.dataclass(eq=False)
class _Node:
    """An operation of the flat graph, whose calls of functions are in the place of the calls."""

    kind: str
    inputs: list[_Value]
    outputs: list[_Value] = dataclasses.field(default_factory=list)


def least_bytes(graph: Any, outputs: Sequence[Tensor], *, keeps_outputs: bool) -> int:
    """Returns bytes that a graph needs at some moment, besides its inputs and variables.

    Args:
        graph: The graph of a function.
        outputs: The tensors of it that are wanted; nothing else is computed.
        keeps_outputs: Whether they are all there at the end.
    """
    flat = _Flat()
    wanted = flat.add_graph(graph, None, outputs)
    return flat.least(wanted, keeps_outputs=keeps_outputs)


class _Flat:
    """A graph without calls, in which equal operations are one."""

    def __init__(self) -> None:
        self.nodes: list[_Node] = []
        self.values: list[_Value] = []
        self._known: dict[Any, _Node] = {}
        self._inner = 0  # The bytes that the body of a loop needs.

    # From a graph -------------------------------------------------------------------------------

    def add_graph(
        self, graph: Any, given: Sequence[_Value] | None, outputs: Sequence[Tensor]
    ) -> list[_Value]:
        """Adds the operations that outputs need, and returns their values.

        Args:
            graph: The graph.
            given: The values of its inputs; None if they come from outside.
            outputs: The tensors that are wanted.
        """
        values: dict[int, _Value] = {}
        if given is not None:
            for tensor, value in zip(graph.inputs, given, strict=True):
                values[id(tensor)] = value
        for operation in _in_order(outputs, values):
            made = self._add(operation, [values[id(tensor)] for tensor in operation.inputs])
            for tensor, value in zip(operation.outputs, made, strict=True):
                values.setdefault(id(tensor), value)
        return [values[id(tensor)] for tensor in outputs]

    def _add(self, operation: Any, inputs: list[_Value]) -> list[_Value]:
        kind = operation.type
        graphs = _compat.graphs_inside(operation)
        if kind in _CALLS and graphs:
            return self.add_graph(graphs[0], inputs, graphs[0].outputs)
        key = _key_of(operation, inputs)
        if key is not None and key in self._known:
            return self._known[key].outputs
        node = _Node(kind, inputs)
        for value in inputs:
            value.readers.append(len(self.nodes))
        sizes = list(map(_bytes_of, operation.outputs))
        if kind in _LOOPS:
            sizes = self._of_loop(operation, graphs, sizes)
        for tensor, size in zip(operation.outputs, sizes, strict=True):
            value = _Value(len(self.nodes), size)
            value.settle(operation, inputs, tensor)
            node.outputs.append(value)
        self.nodes.append(node)
        self.values += node.outputs
        if key is not None:
            self._known[key] = node
        return node.outputs

    def _of_loop(self, operation: Any, graphs: Sequence[Any], sizes: list[int]) -> list[int]:
        """Returns the bytes of the outputs of a loop, with what it keeps for the backward pass."""
        # Its functions are in the order of the definition: the condition, then the body.
        condition, body = graphs
        inner = _Flat()
        wanted = inner.add_graph(body, None, body.outputs)
        self._inner = max(self._inner, inner.least(wanted, keeps_outputs=False))
        turns = _most_turns(operation)
        counts = {each.type for each in condition.get_operations()} <= _COUNTS
        if not turns or not counts:
            return sizes
        kept: set[int] = set()
        by_output = list(sizes)
        for number, (tensor, value) in enumerate(zip(body.outputs, wanted, strict=True)):
            if tensor.op.type != "TensorListPushBack":
                continue
            pushed = inner.nodes[value.maker].inputs[1]
            root = pushed.root or pushed
            # In two lists it is the same memory; from outside it was there before.
            if id(root) in kept or pushed.is_part:
                continue
            kept.add(id(root))
            by_output[number] = turns * root.size
        return by_output

    # The bound ----------------------------------------------------------------------------------

    def least(self, wanted: Sequence[_Value], *, keeps_outputs: bool) -> int:
        """Returns the bytes that are there at some operation, in every order."""
        if keeps_outputs:
            for value in wanted:
                value.readers.append(len(self.nodes))
            self.nodes.append(_Node("end", list(wanted)))
        before, after = self._before(), self._after()
        whole: dict[int, int] = {}
        parts: dict[int, list[tuple[int, int]]] = {}
        roots: dict[int, _Value] = {}
        for value in self.values:
            alive = self._alive(value, before, after)
            root = value.root or value
            if not alive or not root.size:
                continue
            roots[id(root)] = root
            if value.is_part:
                parts.setdefault(id(root), []).append((alive, value.size))
            else:
                whole[id(root)] = whole.get(id(root), 0) | alive
        total = np.zeros(len(self.nodes), np.int64)
        for key, root in roots.items():
            alive = whole.get(key, 0)
            there = self._as_array(alive) * root.size
            if of_root := parts.get(key):
                # Parts are views of the whole, or memory of their own, and never more than it.
                together = np.zeros(len(self.nodes), np.int64)
                for number, size in of_root:
                    together += self._as_array(number) * size
                there = np.maximum(there, np.minimum(together, root.size))
            total += there
        return max(int(total.max(initial=0)), self._inner)

    def _before(self) -> list[int]:
        """Returns for each operation the bits of all that come before it."""
        before: list[int] = []
        for node in self.nodes:
            bits = 0
            for value in node.inputs:
                if value.maker >= 0:
                    bits |= before[value.maker] | 1 << value.maker
            before.append(bits)
        return before

    def _after(self) -> list[int]:
        """Returns for each operation the bits of all that come after it."""
        after = [0] * len(self.nodes)
        for number in reversed(range(len(self.nodes))):
            for value in self.nodes[number].outputs:
                for reader in value.readers:
                    after[number] |= after[reader] | 1 << reader
        return after

    def _alive(self, value: _Value, before: Sequence[int], after: Sequence[int]) -> int:
        """Returns the bits of the operations during which a tensor is there in every order."""
        read = 0
        for reader in value.readers:
            read |= before[reader]
            if self.nodes[reader].kind in (*_NOT_IN_PLACE, "end"):
                read |= 1 << reader
        alive = after[value.maker] & read
        if value.readers and self.nodes[value.maker].kind in _NOT_IN_PLACE:
            alive |= 1 << value.maker
        return alive

    def _as_array(self, bits: int) -> Array:
        """Returns bits as numbers, one for each operation."""
        count = len(self.nodes)
        data = np.frombuffer(bits.to_bytes(count // 8 + 1, "little"), np.uint8)
        return np.unpackbits(data, bitorder="little")[:count].astype(np.int64)


def _in_order(outputs: Iterable[Tensor], values: dict[int, _Value]) -> list[Any]:
    """Returns the operations that make tensors, each after those that make its inputs."""
    order: list[Any] = []
    done: set[int] = set()
    pending: list[tuple[Any, bool]] = [(tensor.op, False) for tensor in outputs]
    while pending:
        operation, is_ready = pending.pop()
        if id(operation) in done:
            continue
        if is_ready:
            done.add(id(operation))
            order.append(operation)
            continue
        if operation.outputs and all(id(tensor) in values for tensor in operation.outputs):
            done.add(id(operation))
            continue
        pending.append((operation, True))
        pending += [(tensor.op, False) for tensor in operation.inputs]
    return order


def _is_folded(operation: Any, inputs: Sequence[_Value]) -> bool:
    """Returns whether TensorFlow may compute an operation before the step."""
    if operation.op_def.is_stateful or not inputs:
        return False
    if operation.type in _OF_SHAPE:
        return bool(operation.inputs[0].shape.is_fully_defined())
    return all(value.is_constant for value in inputs)


def _most_turns(loop: Any) -> int:
    """Returns after how many turns a loop ends, as its second input says; 0 if that is not known.

    A layer of Keras gives the length of its sequence, the largest of one number.
    """
    if len(loop.inputs) < 2:
        return 0
    tensor = loop.inputs[1]
    if tensor.op.type == "Max":
        tensor = tensor.op.inputs[0]
    turns = tf.get_static_value(tensor)
    return 0 if turns is None or np.size(turns) != 1 else max(int(np.max(turns)), 0)


def _may_change_nothing(tensor: Tensor) -> bool:
    """Returns whether a constant may be all ones or zeros, by which nothing changes."""
    if tensor.op.type != "Const":
        return True
    number = tf.make_ndarray(tensor.op.get_attr("value"))
    return bool(number.size != 1 or number.item() in (0, 1, -1))


def _bytes_of(tensor: Tensor) -> int:
    """Returns the bytes of a tensor; 0 if they are not known."""
    count = tensor.shape.num_elements()
    if count is None or tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return int(count * tensor.dtype.size)


def _key_of(operation: Any, inputs: Sequence[_Value]) -> Any:
    """Returns what equal operations have in common; None if each is another."""
    if operation.op_def.is_stateful or operation.type == "Placeholder":
        return None
    attributes = operation.node_def.attr
    given = [(name, attributes[name].SerializeToString()) for name in sorted(attributes)]
    return operation.type, tuple(given), tuple(map(id, inputs))
