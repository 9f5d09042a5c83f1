"""State that is not a variable, and what else a trace of a step touches.

A table, a queue, an iterator or Python code is found by the operations of the trace that change
something: in the trace itself, and in its loops, branches and functions. It is not found by layer.
"""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeAlias

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.lists import by_id, names_of, present
from tfmultigpu.types import Array, Tensor

# What TensorFlow calls stateful, and what changes no result: reads of resources, checks, texts and
# summaries for people, copies between devices, and what is made and used within one step.
_CHANGES_NOTHING = re.compile(
    r"_?(Anonymous|Assert|CheckNumerics|Collective|CudnnRNN|Debug|DeepCopy|DeviceIndex|Dummy|Empty"
    r"|GuaranteeConst|Is|LookupTable(Find|Size|Export)|Nccl|Print|ReadVariable|Recv|Restore|Send"
    r"|Sleep|Stack|StatelessRandom|SyncDevice|TensorArray|Var|WriteFile|Xla).*"
    r"|.*(Dataset|ImportEvent|IsClosed|Size|Summary|TPU).*|Timestamp"
)
_COLLECTIVE = re.compile("Collective|Nccl")  # Takes a variable only for its order among others.
_PYTHON = re.compile(r"(Eager)?PyFunc")
_WRITES_TABLE = re.compile(r"LookupTable(Insert|Import|Remove)V2")
_OF_ROWS = re.compile("Resource(Gather|Scatter|Sparse)")
_READS_VARIABLE = (
    *("ReadVariableOp", "_ReadVariablesOp", "ResourceGather", "ResourceGatherNd"),
    *("VarIsInitializedOp", "VariableShape"),
)
_SEEDS = {"seed", "seed2"}
Handle: TypeAlias = Tensor  # A tensor of dtype resource outside of graphs.
Kind: TypeAlias = Literal["table", "python", "draws", "other", "variable"]
_Key: TypeAlias = tuple[Kind, int]  # With the ``id`` of the handle.


@dataclasses.dataclass(frozen=True, eq=False)
class OtherState:
    """State that a trace changes beside Keras, by one kind of operation.

    Attributes:
        kind: ``"table"`` can be read and put back; ``"draws"`` are draws by ``tf.random`` without a
            generator; ``"python"`` and ``"other"`` are out of reach. ``"variable"`` is one copy of
            a variable that is assigned and read, whether Keras knows it or not.
        operation: The name of its operation in the trace, in which the layer's name is.
        handle: The resource; None for Python and draws.
        dtypes: Of the keys and of the values of a table.
    """

    kind: Kind
    operation: str
    handle: Handle = None
    dtypes: tuple[tf.DType, tf.DType] | None = None

    @property
    def key(self) -> _Key:
        """Its kind and resource: two states that are the same have them in common."""
        return self.kind, id(self.handle)

    def read(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the keys and the values of a table."""
        assert self.dtypes is not None
        return read_table(self.handle, *self.dtypes)

    def write(self, keys: tf.Tensor, values: tf.Tensor) -> None:
        """Puts keys and values in place of a table's."""
        write_table(self.handle, keys, values)


class Touched:
    """What the traces of a step touch.

    Attributes:
        states: The state that they change.
        by_rows: The handles of the variables of which they read or write single rows, by ``id``.
            TensorFlow copies the whole of such a variable at each read of its value, for good.
        assigns: Whether they assign a variable, and not the step at the end.
    """

    def __init__(self) -> None:
        self.states: list[OtherState] = []
        self.assigns = False
        self.by_rows: dict[int, Handle] = {}
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def tables(self) -> list[OtherState]:
        """The tables among the states."""
        return [state for state in self.states if state.kind == "table"]

    @contextmanager
    def putting_back_tables(self) -> Iterator[None]:
        """Puts back, at the end, what is in the tables."""
        contents = [(table, table.read()) for table in self.tables]
        try:
            yield
        finally:
            for table, content in contents:
                table.write(*content)

    @property
    def assigned(self) -> list[Handle]:
        """The handles of the variables that they assign and read, each copy by itself."""
        return [state.handle for state in self.states if state.kind == "variable"]

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables of TensorFlow that they read or assign, each copy by itself."""
        variables: dict[int, tf.Variable] = {}
        for graph in self._graphs:
            with suppress(AssertionError):  # Nobody has one of them any more.
                variables.update(by_id(graph.variables))
        return list(variables.values())

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Adds what the operations touch that are made in the context, in a graph."""
        graph: Any = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        yield
        # The body of a loop and a branch are graphs in another, which has the resources.
        search = _Search(graph)
        for operation in graph.get_operations()[before:]:
            if operation.op_def.is_stateful:
                search.add(operation.node_def, list(map(search.outside, operation.inputs)))
        self.by_rows |= search.by_rows
        self.assigns = self.assigns or search.assigns
        known = {state.key for state in self.states}
        self.states += [state for state in search.found() if state.key not in known]
        self._graphs.add(graph)  # Which knows its variables once it is complete.


class _Search:
    """Search of a graph for operations that change state."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._functions: Mapping[str, Any] | None = None
        self._captures: dict[Any, dict[int, tf.Tensor]] = {}
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        self._states: dict[_Key, OtherState] = {}
        self._dtypes: dict[int, tuple[tf.DType, tf.DType]] = {}
        self._assigned: dict[_Key, OtherState] = {}
        self._read: set[int] = set()
        self.by_rows: dict[int, Handle] = {}

    @property
    def assigns(self) -> bool:
        """Whether an operation assigns a variable."""
        return bool(self._assigned)

    def found(self) -> list[OtherState]:
        """Returns the states; a table whose dtypes nothing tells is out of reach."""
        states = []
        for state in self._states.values():
            dtypes = self._dtypes.get(id(state.handle))
            if state.kind == "table" and dtypes is None:
                state = dataclasses.replace(state, kind="other")
            states.append(dataclasses.replace(state, dtypes=dtypes))
        remembered = [state for (_, key), state in self._assigned.items() if key in self._read]
        return states + remembered

    def outside(self, tensor: Tensor) -> Handle:
        """Returns the resource from outside of all graphs that a tensor is; None for another."""
        if tensor.dtype != tf.resource:
            return None
        while not hasattr(tensor, "numpy"):
            if tensor.op.type == "Identity":
                tensor = tensor.op.inputs[0]
                continue
            if tensor.graph not in self._captures:
                captures = tensor.graph.captures
                self._captures[tensor.graph] = {id(inner): out for out, inner in captures}
            tensor = self._captures[tensor.graph].get(id(tensor))
            if tensor is None:
                return None
        return tensor

    def add(self, node: Any, handles: list[Handle], within: str = "") -> None:
        """Adds what an operation changes, or what the functions that it calls do.

        Args:
            node: The operation.
            handles: For each of its inputs the resource from outside; None for other inputs.
            within: The names of the operations that call the function that it is in.
        """
        called: set[str] = set()
        for attribute in node.attr.values():
            called.update(_functions_in(attribute))
        for function in called:
            self._add_function(function, handles, f"{within}{node.name}/")
        if called:
            return

        # A resource without one here is made in the step, and ends with it.
        handle = next(iter(present(handles)), None)
        if handle is None and tf.resource in _compat.types_of_inputs(node.op):
            return
        if handle is not None and _compat.is_variable_handle(handle):
            if _COLLECTIVE.match(node.op):
                return
            self._add_variable(node.op, handle, f"{within}{node.name}")
            return
        if {"Tin", "Tout"} <= set(node.attr) and handle is not None:
            pair = tf.as_dtype(node.attr["Tin"].type), tf.as_dtype(node.attr["Tout"].type)
            self._dtypes[id(handle)] = pair
        kind = _kind_of(node)
        if kind is not None:
            where = f"{within}{node.name}"
            self._states.setdefault((kind, id(handle)), OtherState(kind, where, handle))

    def _add_variable(self, operation: str, handle: Handle, where: str) -> None:
        """Notes what an operation does to a variable."""
        if _OF_ROWS.match(operation):
            self.by_rows[id(handle)] = handle
        # What is only assigned, such as a number for people, has no say in later steps.
        if operation != "AssignVariableOp":
            self._read.add(id(handle))
        if operation not in _READS_VARIABLE:
            key: _Key = "variable", id(handle)
            self._assigned.setdefault(key, OtherState("variable", where, handle))

    def _add_function(self, name: str, handles: list[Handle], within: str) -> None:
        # Replicas call a function with their own resources.
        key = name, tuple(map(id, handles))
        if key in self._seen:
            return
        self._seen.add(key)
        if self._functions is None:
            library = self._graph.as_graph_def().library.function
            self._functions = {one.signature.name: one for one in library}
        function = self._functions[name]

        # A call has the arguments of its function last, such as a branch those behind the choice.
        names = names_of(function.signature.input_arg)
        resources = dict(zip(reversed(names), reversed(handles), strict=False))
        for node in function.node_def:
            given: list[Handle] = []
            for name in node.input:
                if not name.startswith("^"):  # An operation that it only waits for.
                    given.append(resources.get(name.partition(":")[0]))
            if node.op == "Identity":
                resources[node.name] = given[0]
            elif _compat.is_stateful(node.op):
                self.add(node, given, within)


def _functions_in(attribute: Any) -> list[str]:
    """Returns the names of the functions in an attribute of an operation."""
    if attribute.WhichOneof("value") == "func":
        return [attribute.func.name]
    return names_of(attribute.list.func)


def _kind_of(node: Any) -> Kind | None:
    """Returns what kind of state an operation changes that is stateful; None for none."""
    if _PYTHON.fullmatch(node.op):
        return "python"
    if _WRITES_TABLE.fullmatch(node.op):
        return "table"
    if _CHANGES_NOTHING.fullmatch(node.op):
        return None
    if set(node.attr) >= _SEEDS:
        return "draws"
    return "other"


def read_table(handle: Handle, key: tf.DType, value: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the keys and the values of a table."""
    with tf.device(handle.device):
        pair: Any = tf.raw_ops.LookupTableExportV2(table_handle=handle, Tkeys=key, Tvalues=value)
    # A table with room for deleted keys gives its own memory, which it goes on writing to.
    return tf.constant(np.array(pair.keys.numpy())), tf.constant(np.array(pair.values.numpy()))


def write_table(handle: Handle, keys: tf.Tensor, values: tf.Tensor) -> None:
    """Puts keys and values in place of all of a table's."""
    with tf.device(handle.device):
        tf.raw_ops.LookupTableImportV2(table_handle=handle, keys=keys, values=values)


def in_order(keys: tf.Tensor, values: tf.Tensor) -> list[Array]:
    """Returns the keys of a table in order, once each, and their values; texts as numbers."""
    numbers = []
    for tensor in (keys, values):
        if tensor.dtype == tf.string:
            tensor = tf.strings.to_hash_bucket_fast(tensor, 2**53)
        numbers.append(tensor.numpy())
    _, places = np.unique(numbers[0], axis=0, return_index=True)
    return [number[places] for number in numbers]
