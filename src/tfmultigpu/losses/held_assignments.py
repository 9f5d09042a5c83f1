"""Deferred assignments: a step that fails leaves all variables unchanged.

Layers, random draws and metrics assign variables before it is known whether the step succeeds.
Inside ``holding`` a Keras variable is not assigned. The new value is held, and code that reads the
variable on this replica finds it. After everything that can fail has succeeded, the step assigns
the held values.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import tensorflow as tf

from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.strategies.variable_sharding import aggregated, is_sharded

__all__ = ["Held", "assign_held", "assign_if", "holding"]

_current = threading.local()


class Held(Protocol):
    """Assignments inside ``holding`` on one replica.

    Attributes:
        variables: The assigned Keras variables, in the order of their first assignment.
        at_once: The variables among them that were assigned at once, see ``holding``.
    """

    variables: list[Any]
    at_once: list[Any]

    def current(self, variable: Any) -> tf.Tensor:
        """Returns the value last assigned to a variable, or its own value."""

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Holds a new value of a variable."""


@contextmanager
def holding(given: Iterable[tuple[Any, Any]] = (), held: Any = None) -> Iterator[Held]:
    """Holds the assignments of Keras variables on this thread; enter it in replica context.

    An inner graph is the body of a loop, a branch of ``tf.cond`` or a ``tf.function`` of a layer.
    Its values do not exist outside, so an assignment in it cannot be held. There the variable is
    assigned at once, after any value held for it.

    Args:
        given: Variables with the values that replace their own in this context.
        held: The result of an earlier context in the same graph, to continue it.
    """
    with _holding_class()(given) if held is None else held as scope:
        yield scope


def assign_held(variables: Sequence[Any], values: Sequence[Any], after: Sequence[Any]) -> None:
    """Assigns held values after the operations ``after``; call it in replica context."""
    with tf.control_dependencies(after):
        for variable, value in zip(variables, values, strict=True):
            # The copy carries the dependency: an aggregated variable is assigned elsewhere.
            variable.assign(tf.identity(value))


def assign_if(condition: Any, update: Callable[[], Any]) -> None:
    """Calls a function that assigns variables; they change only if a bool scalar is true.

    Inside ``holding`` the assignments are held; otherwise a branch makes them.
    """
    outer = _innermost()
    if outer is None:
        tf.cond(condition, lambda: (update(), tf.constant(True))[1], lambda: tf.constant(False))
        return
    variables: list[Any] = []
    condition = tf.convert_to_tensor(condition)

    def after() -> list[tf.Tensor]:
        with holding() as inner:
            update()
        variables[:] = inner.variables
        return [condition, *(inner.current(variable) for variable in variables)]

    def before() -> list[tf.Tensor]:
        with holding() as inner:
            return [condition, *(inner.current(variable) for variable in variables)]

    _, *values = tf.cond(condition, after, before)
    for variable, value in zip(variables, values, strict=True):
        outer.add_update((variable, value))


@functools.cache
def _holding_class() -> Any:
    import keras

    class Holding(keras.StatelessScope):  # type: ignore[misc]
        """Keras scope in which layers and metrics do not assign."""

        def __init__(self, given: Iterable[tuple[Any, Any]]) -> None:
            super().__init__(collect_losses=True)  # Keeps added losses in ``layer.losses``.
            self.variables: list[Any] = []
            self.at_once: list[Any] = []
            self._given = list(given)  # Keeps the variables alive, so ids stay unique.
            self._values = {id(variable): value for variable, value in self._given}
            self._outer = _innermost()
            self._graph = tf.compat.v1.get_default_graph()

        def __enter__(self) -> Any:
            self._before = _innermost()
            _current.scope = self
            return super().__enter__()

        def __exit__(self, *args: Any) -> None:
            _current.scope = self._before  # Keras initializes variables next, which may fail.
            super().__exit__(*args)

        def current(self, variable: Any) -> tf.Tensor:
            value = self._held_value(variable)
            return tf.convert_to_tensor(_own_value(variable) if value is None else value)

        def add_update(self, update: tuple[Any, Any]) -> None:
            variable, value = update
            if self._in_inner_graph():
                if is_sharded(variable):
                    raise TfMultiGpuError(
                        "A layer assigns a sharded variable in a loop, a branch or a tf.function, "
                        "where the replicas cannot agree on its value. Received: "
                        f"{variable.path!r}. Make it with add_weight(..., trainable=False), or "
                        "create the layer outside tmg.sharded_variables()."
                    )
                self._assign_at_once(variable)
                with _outside_scopes():
                    variable.assign(value)
                _append_once(self.at_once, variable)
            else:
                # A gradient stops at the variable, as for a real assignment.
                self._values[id(variable)] = tf.stop_gradient(value)
            _append_once(self.variables, variable)

        def get_current_value(self, variable: Any) -> Any:
            # A loop body must find the value that its last iteration assigned.
            if self._in_inner_graph() and not variable.trainable:
                self._assign_at_once(variable)
            value = self._held_value(variable)
            if value is None:
                return _own_value(variable)
            value = _aggregated(variable, value)
            return _with_gradient_of(_own_value(variable), value) if variable.trainable else value

        def _in_inner_graph(self) -> bool:
            return tf.compat.v1.get_default_graph() is not self._graph

        def _held_value(self, variable: Any) -> Any:
            value = self._values.get(id(variable))
            if value is None and self._outer is not None:
                return self._outer._held_value(variable)
            return value

        def _assign_at_once(self, variable: Any) -> None:
            """Assigns the held value of a variable in the graph that holds it."""
            if self._outer is not None:
                self._outer._assign_at_once(variable)
            value = self._values.pop(id(variable), None)
            if value is not None:
                _append_once(self.at_once, variable)
                with self._graph.as_default(), _outside_scopes():
                    variable.assign(value)

    return Holding


def _innermost() -> Any:
    return getattr(_current, "scope", None)


@contextmanager
def _outside_scopes() -> Iterator[None]:
    """Leaves all Keras scopes for a while, so that variables have their TensorFlow values."""
    import keras

    scope = _innermost()
    if scope is None:
        yield
        return
    before, scope.original_scope = scope.original_scope, None
    try:
        keras.StatelessScope.__exit__(scope)
        yield
    finally:
        keras.StatelessScope.__enter__(scope)
        scope.original_scope = before


def _own_value(variable: Any) -> Any:
    with _outside_scopes():
        return variable.value


def _append_once(variables: list[Any], variable: Any) -> None:
    if all(variable is not one for one in variables):
        variables.append(variable)


def _with_gradient_of(own: Any, value: Any) -> Any:
    """Returns the value assigned to a trained variable, with the gradient of the variable."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def read(_: Any) -> Any:
        return tf.identity(value), tf.convert_to_tensor

    return read(tf.convert_to_tensor(own))


def _aggregated(variable: Any, value: Any) -> Any:
    """Returns the value of a variable after its assignment, aggregated over the replicas."""
    context = tf.distribute.get_replica_context()
    how = variable.aggregation
    if how == "none" or variable.synchronization == "on_read" or context is None:
        return value
    if context.num_replicas_in_sync == 1:
        return value
    return aggregated(value, tf.VariableAggregation[how.upper()])
