"""Deferred assignments: a step that fails leaves all variables unchanged.

Layers, random draws and metrics assign variables before it is known whether the step succeeds.
Inside ``deferring`` a Keras variable is not assigned. Code that reads it on this replica finds the
new value, and the step assigns that after everything that can fail has succeeded.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import tensorflow as tf

from tfmultigpu.steps.draws import sharing_seeds
from tfmultigpu.steps.rows import standing_at_all
from tfmultigpu.strategies.collectives import add_on_device, replicas_share_memory

_thread = threading.local()


class Deferred(Protocol):
    """Assignments inside ``deferring`` on one replica.

    Attributes:
        variables: The assigned Keras variables, in the order of their first assignment.
    """

    variables: list[Any]

    def current(self, variable: Any) -> tf.Tensor:
        """Returns the value last assigned to a variable, or its own value."""


def deferring(
    before: Iterable[tuple[Any, Any]] = (), counts: Any = True, *, again: Any = None
) -> AbstractContextManager[Deferred]:
    """Defers the assignments of Keras variables on this thread; enter it in replica context.

    An inner graph is the body of a loop, a branch of ``tf.cond`` or a ``tf.function`` of a layer.
    Its values do not exist outside, so an assignment in it cannot be deferred. There the variable
    is assigned at once, after any value deferred for it.
    """
    scope: Any = _scope_class()(before, counts) if again is None else again
    return scope  # type: ignore[no-any-return]


def assign(variables: Sequence[Any], values: Sequence[Any], after: Sequence[Any]) -> None:
    """Assigns deferred values after the operations ``after``; call it in replica context."""
    with tf.control_dependencies(after):
        for variable, value in zip(variables, values, strict=True):
            # The copy carries the dependency: an aggregated variable is assigned elsewhere.
            variable.assign(tf.identity(value))


def assigned_variables(
    forward: Callable[[Any], Any], strategy: tf.distribute.Strategy, batch_spec: Any
) -> list[Any]:
    """Returns the Keras variables that a forward pass assigns: states of layers, metrics, seeds."""
    variables: list[Any] = []

    def look(batch: Any) -> None:
        with sharing_seeds(strategy), standing_at_all(batch), deferring() as deferred:
            forward(batch)
        variables.extend(deferred.variables)

    traced: Any = tf.function(look, autograph=False)
    traced.get_concrete_function(batch_spec)
    return variables


@functools.cache
def _scope_class() -> Any:
    import keras

    class DeferringScope(keras.StatelessScope):  # type: ignore[misc]
        """Keras scope in which layers and metrics do not assign."""

        def __init__(self, before: Iterable[tuple[Any, Any]], counts: Any) -> None:
            super().__init__(collect_losses=True)  # Keeps added losses in ``layer.losses``.
            self.variables: list[Any] = []
            self._before = list(before)  # Keeps the variables alive, so ids stay unique.
            self._values = {id(variable): value for variable, value in self._before}
            self._counts = counts
            self._graph = tf.compat.v1.get_default_graph()

        def __enter__(self) -> Any:
            _thread.scope = self
            return super().__enter__()

        def __exit__(self, *args: Any) -> None:
            _thread.scope = None  # Keras initializes variables next, which may fail.
            super().__exit__(*args)

        def current(self, variable: Any) -> tf.Tensor:
            value = self._values.get(id(variable))
            return tf.convert_to_tensor(_own_value(variable) if value is None else value)

        def add_update(self, update: tuple[Any, Any]) -> None:
            variable, value = update
            is_metric = variable.aggregation == "sum" and variable.synchronization == "on_read"
            if is_metric and self._counts is not True:
                old = self.current(variable)
                value = tf.where(self._counts, tf.cast(value, old.dtype), old)
            if self._in_inner_graph():
                self._assign_at_once(variable)
                with _outside_scopes():
                    variable.assign(value)
            else:
                # A gradient stops at the variable, as for a real assignment.
                self._values[id(variable)] = tf.stop_gradient(value)
            if all(variable is not known for known in self.variables):
                self.variables.append(variable)

        def get_current_value(self, variable: Any) -> Any:
            # A loop body must find the value that its last iteration assigned.
            if self._in_inner_graph() and not variable.trainable:
                self._assign_at_once(variable)
            value = self._values.get(id(variable))
            if value is None:
                return _own_value(variable)
            value = _aggregated(variable, value)
            return _with_gradient_of(_own_value(variable), value) if variable.trainable else value

        def _in_inner_graph(self) -> bool:
            return tf.compat.v1.get_default_graph() is not self._graph

        def _assign_at_once(self, variable: Any) -> None:
            """Assigns the deferred value of a variable in the graph that has it."""
            value = self._values.pop(id(variable), None)
            if value is not None:
                with self._graph.as_default(), _outside_scopes():
                    variable.assign(value)

    return DeferringScope


@contextmanager
def _outside_scopes() -> Iterator[None]:
    """Leaves all Keras scopes for a while, so that variables have their TensorFlow values."""
    import keras

    scope = getattr(_thread, "scope", None)
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


def _with_gradient_of(own: Any, value: Any) -> Any:
    """Returns the value assigned to a trained variable, with the gradient of the variable."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def read(_: Any) -> Any:
        return tf.identity(value), tf.convert_to_tensor

    return read(tf.convert_to_tensor(own))


def _aggregated(variable: Any, value: Any) -> Any:
    """Returns the value of a variable after its assignment, aggregated over the replicas."""
    context: Any = tf.distribute.get_replica_context()
    how = variable.aggregation
    if how == "none" or variable.synchronization == "on_read" or context is None:
        return value
    if context.num_replicas_in_sync == 1:
        return value
    value = tf.convert_to_tensor(value)
    if how == "only_first_replica":
        first = tf.equal(context.replica_id_in_sync_group, 0)
        value = tf.where(first, value, tf.zeros_like(value))
    if replicas_share_memory(context.strategy):  # A second strategy has the keys of the first.

        def add(strategy: tf.distribute.Strategy, value: Any) -> tf.Tensor:
            parts = strategy.experimental_local_results(value)
            return add_on_device(parts, strategy.extended.worker_devices[0])

        total = context.merge_call(add, args=(value,))
    else:
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, value)
    return total / context.num_replicas_in_sync if how == "mean" else total
