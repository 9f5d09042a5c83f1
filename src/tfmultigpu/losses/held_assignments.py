"""Assignments that wait: a step that raises has changed nothing.

Layers, draws and metrics assign while a step runs, before it is known whether the step succeeds.
Inside ``holding`` a Keras variable is not assigned: the value is kept, and is what is found by
whoever reads the variable on this replica. A step assigns what was held when all that can fail has
succeeded.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import tensorflow as tf

__all__ = ["Held", "assign_held", "assign_if", "holding"]

_current = threading.local()


class Held(Protocol):
    """What was assigned inside ``holding`` on one replica.

    Attributes:
        variables: The Keras variables that were assigned, in the order of their first assignment.
        at_once: Those of them that could not be held, see ``holding``.
    """

    variables: list[Any]
    at_once: list[Any]

    def current(self, variable: Any) -> tf.Tensor:
        """Returns the value that a variable was last assigned, its own where there is none."""

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Takes a variable and its new value."""


@contextmanager
def holding(given: Iterable[tuple[Any, Any]] = (), held: Any = None) -> Iterator[Held]:
    """Holds what Keras variables are assigned on this thread; replica context.

    An assignment in an inner graph cannot be held, because its value does not exist outside: in the
    body of a loop, a branch of ``tf.cond``, a ``tf.function`` of a layer. There the variable is
    assigned at once, and before that what was held of it.

    Args:
        given: Variables with the values that they have in here in place of their own.
        held: What an earlier context yielded in the same graph, to be continued.
    """
    with _kind()(given) if held is None else held as scope:
        yield scope


def assign_held(variables: Sequence[Any], values: Sequence[Any], after: Sequence[Any]) -> None:
    """Assigns values that were held, when what comes before has succeeded; replica context."""
    with tf.control_dependencies(after):
        for variable, value in zip(variables, values, strict=True):
            # Copies wait too: a variable with an aggregation is assigned somewhere else.
            variable.assign(tf.identity(value))


def assign_if(condition: Any, update: Callable[[], Any]) -> None:
    """Calls a function that assigns variables, which changes them where a bool scalar is true.

    Inside ``holding`` the assignments are held; else they are made in a branch.
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
def _kind() -> Any:
    import keras

    class Holding(keras.StatelessScope):  # type: ignore[misc]
        """The scope by which Keras asks layers and metrics not to assign."""

        def __init__(self, given: Iterable[tuple[Any, Any]]) -> None:
            super().__init__(collect_losses=True)  # What layers add stays in ``layer.losses``.
            self.variables: list[Any] = []
            self.at_once: list[Any] = []
            self._given = list(given)  # Keeps the variables alive, and with them their ids.
            self._values = {id(variable): value for variable, value in self._given}
            self._outer = _innermost()
            self._graph = tf.compat.v1.get_default_graph()

        def __enter__(self) -> Any:
            self._before = _innermost()
            _current.scope = self
            return super().__enter__()

        def __exit__(self, *args: Any) -> None:
            _current.scope = self._before  # Keras initializes variables now, which may fail.
            super().__exit__(*args)

        def current(self, variable: Any) -> tf.Tensor:
            value = self._found(variable)
            return tf.convert_to_tensor(_own_value(variable) if value is None else value)

        def add_update(self, update: tuple[Any, Any]) -> None:
            variable, value = update
            if self._in_inner_graph():
                self._assign_at_once(variable)
                with _left():
                    variable.assign(value)
                _note(self.at_once, variable)
            else:
                # A gradient goes to variables, not through them to what they were assigned.
                self._values[id(variable)] = tf.stop_gradient(value)
            _note(self.variables, variable)

        def get_current_value(self, variable: Any) -> Any:
            # What is run several times must find what it assigned the time before.
            if self._in_inner_graph() and not variable.trainable:
                self._assign_at_once(variable)
            value = self._found(variable)
            if value is None:
                return _own_value(variable)
            value = _aggregated(variable, value)
            return _in_place_of(_own_value(variable), value) if variable.trainable else value

        def _in_inner_graph(self) -> bool:
            return tf.compat.v1.get_default_graph() is not self._graph

        def _found(self, variable: Any) -> Any:
            value = self._values.get(id(variable))
            if value is None and self._outer is not None:
                return self._outer._found(variable)
            return value

        def _assign_at_once(self, variable: Any) -> None:
            """Assigns what is held of a variable, where it is held."""
            if self._outer is not None:
                self._outer._assign_at_once(variable)
            value = self._values.pop(id(variable), None)
            if value is not None:
                _note(self.at_once, variable)
                with self._graph.as_default(), _left():
                    variable.assign(value)

    return Holding


def _innermost() -> Any:
    return getattr(_current, "scope", None)


@contextmanager
def _left() -> Iterator[None]:
    """Leaves all scopes for a while, so that variables are those of TensorFlow."""
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
    with _left():
        return variable.value


def _note(variables: list[Any], variable: Any) -> None:
    if all(variable is not one for one in variables):
        variables.append(variable)


def _in_place_of(own: Any, value: Any) -> Any:
    """The value that a trained variable was assigned; its gradient is that of the variable."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def read(_: Any) -> Any:
        return tf.identity(value), tf.convert_to_tensor

    return read(tf.convert_to_tensor(own))


def _aggregated(variable: Any, value: Any) -> Any:
    """The value that a variable has once it is assigned, which may be one of all replicas."""
    context = tf.distribute.get_replica_context()
    how = variable.aggregation
    if how == "none" or variable.synchronization == "on_read" or context is None:
        return value
    if context.num_replicas_in_sync == 1:
        return value
    if how == "only_first_replica":
        first = context.replica_id_in_sync_group == 0
        return context.all_reduce("SUM", tf.where(first, value, tf.zeros_like(value)))
    return context.all_reduce(how.upper(), value)
