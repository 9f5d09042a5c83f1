"""Deferred assignments: a step that fails leaves all variables unchanged.

Layers, random draws and metrics assign variables before it is known whether the step succeeds.
Inside the scope a Keras variable is not assigned. Code that reads it on this replica finds the
new value, and the step assigns that after everything that can fail has succeeded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, Token
from typing import Any, Self

import keras
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching
from tfmultigpu.strategies.topology import is_on_read
from tfmultigpu.types import Function, KerasVariable, Scalar, Tensor

_scope_of_thread: ContextVar[DeferredAssignments | None] = ContextVar("deferred", default=None)


class DeferredAssignments(keras.StatelessScope):  # type: ignore[misc]  # Keras has no types.
    """Defers the assignments of Keras variables on this thread; enter it in replica context.

    It may be entered again. An inner graph is the body of a loop, a branch of ``tf.cond`` or a
    ``tf.function`` of a layer. Its values do not exist outside, so there a variable is assigned at
    once, after any value deferred for it.

    Attributes:
        variables: Those assigned, in order.
        replaced: The ids of those that were assigned other than by ``assign_add``, ``assign_sub``.
        early: Operations that assign a deferred value before the step does.
    """

    def __init__(
        self, before: Iterable[tuple[KerasVariable, Tensor]] = (), counts: Scalar = True
    ) -> None:
        """Keeps the values that variables seem to have, and whether sums over replicas count."""
        super().__init__(collect_losses=True)  # Keeps added losses in ``layer.losses``.
        self.variables: list[KerasVariable] = []
        self.replaced: set[int] = set()
        self.early: set[Any] = set()
        self._before = list(before)  # Keeps the variables alive, so ids stay unique.
        self._values = {id(variable): value for variable, value in self._before}
        self._counts = counts
        self._graph = tf.compat.v1.get_default_graph()
        self._tokens: list[Token[DeferredAssignments | None]] = []
        self._notes: list[dict[int, Tensor]] = []  # One for each ``noting_reads``.
        self._repeats = self._adds = False

    def __enter__(self) -> Self:
        """Defers what is assigned on this thread from now on."""
        self._tokens.append(_scope_of_thread.set(self))
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Assigns nothing: the step does, where all has succeeded."""
        # Keras now creates variables that this code has asked for: they are not deferred here.
        _scope_of_thread.reset(self._tokens.pop())
        super().__exit__(*error)

    @contextmanager
    def noting_reads(self) -> Iterator[dict[int, Tensor]]:
        """Yields values for ``repeating``, complete at the end: what variables seem to have now.

        The reads of states that code in the context reads are among them, for a later read of the
        variable may find what was assigned since.
        """
        values = dict(self._values)
        self._notes.append(values)
        try:
            yield values
        finally:
            self._notes.pop()

    @contextmanager
    def repeating(self, values: dict[int, Tensor]) -> Iterator[None]:
        """Has code that runs once more read these values, and lets go of what it assigns."""
        kept = self._values, self.variables, self._repeats
        self._values, self.variables, self._repeats = dict(values), [], True
        try:
            yield
        finally:
            self._values, self.variables, self._repeats = kept

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Treats what is assigned in the context as additions to the values before."""
        before, self._adds = self._adds, True
        try:
            yield
        finally:
            self._adds = before

    def current(self, variable: KerasVariable) -> tf.Tensor:
        """Returns the value last assigned to a variable, or its own."""
        value = self._values.get(id(variable))
        if value is None:
            value = variable.value
        return tf.convert_to_tensor(value)

    def values_of(self, variables: Iterable[KerasVariable]) -> tuple[tf.Tensor, ...]:
        """Returns what variables would be assigned, or their own values, computed here."""
        return tuple(map(tf.identity, map(self.current, variables)))

    def has_value(self, variable: KerasVariable) -> bool:
        """Returns whether code here reads a value that was assigned, and not the variable."""
        return id(variable) in self._values

    def add_update(self, update: tuple[Tensor, Tensor]) -> None:
        """Keeps an assignment."""
        variable, value = update
        if not self._adds and not _is_sum_with(self._values.get(id(variable)), value):
            self.replaced.add(id(variable))
        if variable.aggregation == "sum" and self._counts is not True:
            old = self.current(variable)
            value = tf.where(self._counts, tf.cast(value, old.dtype), old)
        if self._in_inner_graph():
            self._assign_at_once(variable)
            with self._left():
                variable.assign(value)
        else:
            # A gradient stops at the variable, as for a real assignment.
            self._values[id(variable)] = tf.stop_gradient(value)
        if id(variable) not in map(id, self.variables):
            self.variables.append(variable)

    def get_current_value(self, variable: KerasVariable) -> Tensor:
        """Returns what Keras reads of a variable."""
        # A loop body must find the value that its last iteration assigned.
        if self._in_inner_graph() and not variable.trainable and not self._repeats:
            self._assign_at_once(variable)
        value = self._values.get(id(variable))
        with self._left():
            own = variable.value
        if value is None:
            self._note(variable, own)
            return own
        if variable.trainable:
            return _with_gradient_of(own, value)
        return value

    def _in_inner_graph(self) -> bool:
        return tf.compat.v1.get_default_graph() is not self._graph

    def _assign_at_once(self, variable: KerasVariable) -> None:
        """Assigns the deferred value of a variable in the graph that has it."""
        value = self._values.pop(id(variable), None)
        if value is not None:
            before = len(self._graph.get_operations())
            with self._graph.as_default(), self._left():
                variable.assign(value)
            self.early.update(self._graph.get_operations()[before:])

    def _note(self, variable: KerasVariable, own: Tensor) -> None:
        """Notes what a state has that was not assigned yet."""
        if self._notes and not variable.trainable:
            with self._graph.as_default():
                value = tf.convert_to_tensor(own)
            for values in self._notes:
                values.setdefault(id(variable), value)

    @contextmanager
    def _left(self) -> Iterator[None]:
        """Leaves the scope for a while, in which Keras would not assign."""
        token = _scope_of_thread.set(None)
        super().__exit__()
        try:
            yield
        finally:
            super().__enter__()
            _scope_of_thread.reset(token)


def _is_sum_with(before: Tensor | None, value: Tensor) -> bool:
    """Returns whether a value is a sum in which the value before is one addend."""
    if before is None or not tf.is_symbolic_tensor(value):
        return False
    while value.op.type in ("Identity", "StopGradient", "Cast"):
        value = value.op.inputs[0]
    return value.op.type in ("AddV2", "Add") and any(before is x for x in value.op.inputs)


def deferred_here() -> DeferredAssignments | None:
    """Returns the scope that this code runs in; None outside of one, and in its inner graphs."""
    scope = _scope_of_thread.get()
    if scope is None or scope._in_inner_graph():
        return None
    return scope


@contextmanager
def noting_additions() -> Iterator[None]:
    """Notes which assignments add: Keras assigns the sum, in which the value before is hidden."""

    def add(original: Function, variable: KerasVariable, value: Tensor) -> Tensor:
        scope = _scope_of_thread.get()
        with nullcontext() if scope is None else scope.adding():
            return original(variable, value)

    names = "assign_add", "assign_sub"
    with patching(keras.Variable, names[0], add), patching(keras.Variable, names[1], add):
        yield


def assign(
    variables: Sequence[KerasVariable],
    values: Sequence[Tensor],
    weight: Scalar,
    *,
    replaced: Collection[int],
    after: Sequence[Tensor] = (),
    summed: Collection[int] = (),
) -> None:
    """Assigns deferred values; call it in replica context.

    Args:
        variables: The Keras variables.
        values: What this replica computed for each.
        weight: What the rows of this replica count, 1 or 0; None for 1.
        replaced: The ``id`` of each variable to which values were not only added.
        after: Operations that have to succeed before.
        summed: The ``id`` of each variable to which its value is added.
    """
    with tf.control_dependencies(after):
        for variable, value in zip(variables, values, strict=True):
            # The copy carries the dependency: an aggregated variable is assigned elsewhere.
            value = tf.identity(value)
            if is_added(variable):
                value = _addend(variable, value, weight, adds=id(variable) not in replaced)
            if id(variable) in summed:
                variable.assign_add(value)
            else:
                variable.assign(value)


def is_added(variable: KerasVariable) -> bool:
    """Returns whether TensorFlow assigns to a variable the sum of the values of all replicas."""
    return bool(variable.aggregation == "sum" and not is_on_read(variable))


def _addend(variable: KerasVariable, value: Tensor, weight: Scalar, *, adds: bool) -> Tensor:
    """Returns the part of a replica in the sum that TensorFlow assigns to a variable."""
    context: Any = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return value
    # The value before is in the sum once.
    if adds and tf.get_static_value(context.replica_id_in_sync_group) != 0:
        value -= tf.convert_to_tensor(variable.value)
    return tf.where(weight > 0, value, tf.zeros_like(value))


def _with_gradient_of(own: Tensor, value: Tensor) -> Tensor:
    """Returns the value assigned to a trained variable, with the gradient of the variable."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def read(_: object) -> Tensor:
        return tf.identity(value), tf.convert_to_tensor

    return read(tf.convert_to_tensor(own))


# What a trace does besides ------------------------------------------------------------------------


@contextmanager
def noting_effects() -> Iterator[list[Any]]:
    """Yields a list that has, at the end, the operations of the context that may fail or change."""
    effects: list[Any] = []
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield effects
    for made in graph.get_operations()[before:]:
        if made.op_def.is_stateful and made.type != "ReadVariableOp":
            effects.append(made)


def number_of_operations() -> int:
    """Returns how many operations the current graph has."""
    return len(tf.compat.v1.get_default_graph().get_operations())


def may_not_be_linear(begin: int) -> bool:
    """Returns whether gradients through the operations made since may not be linear.

    Args:
        begin: The ``number_of_operations`` before.
    """
    operations = tf.compat.v1.get_default_graph().get_operations()
    return any(map(_compat.may_not_be_linear, operations[begin:]))
