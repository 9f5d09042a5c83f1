"""Owners of variables, and optimizer state that lives with its owner alone.

Owners are numbers of replicas of one process. An owner updates its variables and copies them to the
others; what an optimizer remembers of a variable exists once, on the device of its owner.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import tensorflow as tf

__all__ = ["assign_owners", "component_as_keras", "outside_scopes", "owned_state", "using"]

_T = TypeVar("_T")


def assign_owners(
    sizes: Sequence[int], owners: int, fixed: Mapping[int, int] | None = None
) -> tuple[int, ...]:
    """Returns the owner of each variable, so that none owns much more than another.

    Largest first, each to whoever owns least: no owner has more than the mean and the largest
    variable together.

    Args:
        sizes: Elements or bytes of each variable.
        owners: How many owners there are, at least 1.
        fixed: The owner of each variable that has one already, by its number.

    Example:
        >>> assign_owners([100, 10, 60, 50], 2)
        (0, 0, 1, 1)
    """
    chosen = [0] * len(sizes)
    given = [0] * owners
    for i, owner in (fixed or {}).items():
        chosen[i] = owner
        given[owner] += sizes[i]
    loads = [(load, owner) for owner, load in enumerate(given)]
    heapq.heapify(loads)
    for i in sorted(set(range(len(sizes))) - set(fixed or ()), key=lambda i: (-sizes[i], i)):
        load, owner = heapq.heappop(loads)
        chosen[i] = owner
        heapq.heappush(loads, (load + sizes[i], owner))
    return tuple(chosen)


def outside_scopes(function: Callable[[], _T]) -> _T:
    """Calls a function where no strategy is in effect, in the graph of the caller.

    TensorFlow has no way out of a scope but another thread. Variables made there belong to no
    strategy; operations go into the same graph.
    """
    return _on_another_thread(function) if tf.distribute.has_strategy() else function()


def _on_another_thread(function: Callable[[], _T]) -> _T:
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    results: list[_T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            with nullcontext() if graph is None else graph.as_default():
                results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def using(existing: Iterator[Any]) -> Iterator[None]:
    """Has everything that makes a ``tf.Variable`` take the next of those that exist, in order."""

    def take(_: Any, **__: Any) -> Any:
        return next(existing)

    with tf.variable_creator_scope(take):
        yield


@contextmanager
def owned_state(
    optimizer: Any,
    owner_of: Callable[[Any], int],
    devices: Sequence[str],
    existing: Iterator[tf.Variable] | None = None,
) -> Iterator[list[tuple[int, tf.Variable]]]:
    """Has an optimizer that is built in here keep its state of a variable with the owner of that.

    Args:
        optimizer: A Keras optimizer that is not built.
        owner_of: From a variable to the number of its owner.
        devices: The device of each owner.
        existing: What to take, in order, where nothing is to be made.

    Yields:
        The owner and the ``tf.Variable`` of everything that is made, in its order.
    """
    made: list[tuple[int, tf.Variable]] = []
    current: list[int] = []
    # Keras' class for TensorFlow first enters ``colocate_vars_with``, which takes mirrored
    # variables only. The one it inherits from does not.
    method = "add_variable_from_reference"
    from_reference = [vars(one)[method] for one in type(optimizer).__mro__ if method in vars(one)][
        -1
    ]

    def note_owner(reference_variable: Any, *args: Any, **options: Any) -> Any:
        current.append(owner_of(reference_variable))
        try:
            return from_reference(optimizer, reference_variable, *args, **options)
        finally:
            current.pop()

    def create(create_for_all: Any, **options: Any) -> Any:
        if not current:
            return create_for_all(**options)
        owner = current[-1]
        kept = {name: options[name] for name in ("initial_value", "dtype", "name", "trainable")}

        def on_owner() -> tf.Variable:
            with tf.device(devices[owner]):
                return tf.Variable(**kept)

        # On this thread it would come back here.
        one = _on_another_thread(on_owner) if existing is None else next(existing)
        made.append((owner, one))
        return made[-1][1]

    optimizer.add_variable_from_reference = note_owner
    try:
        with tf.variable_creator_scope(create):
            yield made
    finally:
        del optimizer.add_variable_from_reference


def component_as_keras(variable: Any, component: tf.Variable) -> Any:
    """Returns the copy of a Keras variable that one replica holds, as a Keras variable.

    Optimizers ask variables for their path, constraint and trainability, which a ``tf.Variable``
    does not tell.

    Args:
        variable: The Keras variable.
        component: Its ``tf.Variable`` on the replica.
    """
    import keras

    *parents, name = variable.path.split("/")
    with ExitStack() as stack:
        for parent in parents:
            stack.enter_context(keras.name_scope(parent))
        stack.enter_context(using(iter([component])))
        twin = keras.Variable(
            "zeros", shape=variable.shape, dtype=variable.dtype, autocast=False, name=name
        )
    twin.trainable = variable.trainable
    twin.constraint = variable.constraint
    return twin
