"""Seeing what Keras does on one thread while a step is traced, and changing what it assigns.

Replicas are threads that take turns, so what is seen is kept by thread. Each context replaces a
public method of Keras for as long as any thread is in it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf

__all__ = ["changing_assignments", "recording_added_losses", "recording_calls"]

_lock = threading.RLock()
_entered: dict[str, int] = {}
_thread = threading.local()
# What runs around a call: ``f(call, self, arguments)``, where ``call(*arguments)`` goes on.
_Around = Callable[..., Any]


def recording_added_losses() -> AbstractContextManager[list[tuple[Any, Any]]]:
    """Collects the layer and the value of each ``add_loss`` on this thread in the context.

    The public ``model.losses`` is one list per model: a synchronized layer makes replicas clear and
    read each other's losses. Activity regularizers go through ``add_loss`` too.
    """
    import keras

    return _collecting(
        keras.layers.Layer,
        "add_loss",
        lambda layer, arguments, _: [(layer, one) for one in tf.nest.flatten(arguments)],
    )


def recording_calls() -> AbstractContextManager[list[tuple[Any, Any]]]:
    """Collects each call of a layer or operation that ends on this thread, with what it returns.

    Keras offers no way to see the outputs of layers that a model written as a class calls.
    """
    import keras

    # Each layer is one.
    return _collecting(keras.Operation, "__call__", lambda layer, _, result: [(layer, result)])


def changing_assignments(change: Callable[[Any, Any], Any]) -> AbstractContextManager[None]:
    """Has Keras variables on this thread assigned other values while the context lasts.

    ``assign`` is the one place that the updates of all metrics pass: each metric overrides
    ``update_state``, and ``assign_add`` calls it too.

    Args:
        change: ``f(variable, value)``, which returns the value to assign instead.
    """
    import keras

    return _around(
        keras.Variable,
        "assign",
        lambda call, variable, value: call(variable, change(variable, value)),
    )


@contextmanager
def _collecting(
    owner: Any, method: str, what: Callable[[Any, Any, Any], list[Any]]
) -> Iterator[list[Any]]:
    found: list[Any] = []

    def collect(call: Any, this: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(this, *args, **kwargs)
        found.extend(what(this, args, result))
        return result

    with _around(owner, method, collect):
        yield found


@contextmanager
def _around(owner: Any, method: str, around: _Around) -> Iterator[None]:
    key = f"{owner.__name__}.{method}"
    before = getattr(_thread, key, ())
    setattr(_thread, key, (*before, around))
    with _lock:
        _entered[key] = _entered.get(key, 0) + 1
        if _entered[key] == 1:
            setattr(owner, method, _wrapped(getattr(owner, method), key))
    try:
        yield
    finally:
        setattr(_thread, key, before)
        with _lock:
            _entered[key] -= 1
            if not _entered[key]:
                setattr(owner, method, getattr(owner, method).__wrapped__)


def _wrapped(original: Any, key: str) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        inner = original
        for around in getattr(_thread, key, ()):
            inner = functools.partial(around, inner)
        return inner(*args, **kwargs)

    return call
