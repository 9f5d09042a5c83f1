"""Contexts that record the calls of Keras on one thread, or change its assignments.

Replicas are threads that take turns, so records are kept per thread. While any thread is inside a
context, a public method or property of Keras is replaced.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf

__all__ = [
    "changing_assignments",
    "noting_losses_read",
    "recording_added_losses",
    "recording_calls",
    "recording_devices",
]

_lock = threading.RLock()
_entered: dict[str, int] = {}
_originals: dict[str, Any] = {}
_thread = threading.local()
# ``f(call, self, *arguments)``, which calls ``call(self, *arguments)`` itself.
_Wrapper = Callable[..., Any]


def recording_added_losses() -> AbstractContextManager[list[tuple[Any, Any]]]:
    """Records the layer and the value of each ``add_loss`` on this thread.

    The public ``model.losses`` is one list per model: with a synchronized layer, replicas clear and
    read each other's losses. Activity regularizers use ``add_loss`` too.
    """
    import keras

    return _recording(
        keras.layers.Layer,
        "add_loss",
        lambda layer, arguments, _: [(layer, one) for one in tf.nest.flatten(arguments)],
    )


def recording_calls() -> AbstractContextManager[list[tuple[Any, Any]]]:
    """Records each finished call of a layer or operation on this thread, with its result.

    Keras offers no access to the outputs of layers inside a subclassed model.
    """
    import keras

    # Every layer is an Operation.
    return _recording(keras.Operation, "__call__", lambda layer, _, result: [(layer, result)])


def recording_devices() -> AbstractContextManager[list[tuple[Any, str, bool]]]:
    """Records each Keras variable made on this thread.

    With it, the device that ``tf.device`` names, and whether it is trained.
    """
    import keras

    def device(variable: Any, *_: Any) -> list[tuple[Any, str, bool]]:
        with tf.init_scope():
            return [(variable, tf.zeros([]).device, variable.trainable)]

    return _recording(keras.Variable, "__init__", device)


def changing_assignments(change: Callable[[Any, Any], Any]) -> AbstractContextManager[None]:
    """Changes the values that Keras variables on this thread are assigned.

    The updates of all metrics pass through ``assign``: each metric overrides ``update_state``, and
    ``assign_add`` calls ``assign`` too.

    Args:
        change: ``f(variable, value)``, which returns the value to assign.
    """
    import keras

    return _wrapping(
        keras.Variable,
        "assign",
        lambda call, variable, value: call(variable, change(variable, value)),
    )


def noting_losses_read(note: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Calls a function with each layer whose ``losses`` are read on this thread, if it has any."""
    import keras

    def read(call: Any, layer: Any) -> Any:
        found = call(layer)
        if found:
            note(layer)
        return found

    return _wrapping(keras.layers.Layer, "losses", read)


@contextmanager
def _recording(
    owner: Any, method: str, entries: Callable[[Any, Any, Any], list[Any]]
) -> Iterator[list[Any]]:
    found: list[Any] = []

    def collect(call: Any, this: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(this, *args, **kwargs)
        found.extend(entries(this, args, result))
        return result

    with _wrapping(owner, method, collect):
        yield found


@contextmanager
def _wrapping(owner: Any, method: str, wrapper: _Wrapper) -> Iterator[None]:
    key = f"{owner.__name__}.{method}"
    before = getattr(_thread, key, ())
    setattr(_thread, key, (*before, wrapper))
    with _lock:
        _entered[key] = _entered.get(key, 0) + 1
        if _entered[key] == 1:
            original = _originals[key] = inspect.getattr_static(owner, method)
            if isinstance(original, property):
                setattr(owner, method, property(_with_wrappers(original.fget, key)))
            else:
                setattr(owner, method, _with_wrappers(original, key))
    try:
        yield
    finally:
        setattr(_thread, key, before)
        with _lock:
            _entered[key] -= 1
            if not _entered[key]:
                setattr(owner, method, _originals.pop(key))


def _with_wrappers(original: Any, key: str) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        inner = original
        for wrapper in getattr(_thread, key, ()):
            inner = functools.partial(wrapper, inner)
        return inner(*args, **kwargs)

    return call
