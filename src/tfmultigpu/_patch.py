"""Replaces functions, methods and properties of other libraries for a while.

Keras and TensorFlow look them up at each call. Replicas are threads that take turns, so a wrapper
serves only the thread that entered the context; the calls of other threads pass through.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_Key = tuple[int, str]
_lock = threading.RLock()
_entered: dict[_Key, int] = {}  # How many contexts are open, on all threads.
_originals: dict[_Key, tuple[bool, Any]] = {}  # Whether the owner inherits it, and what it is.
_thread = threading.local()


@contextmanager
def patching(owner: Any, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Has calls on this thread go through ``wrapper(original, *args, **kwargs)``.

    The context is re-entrant. The ``original`` of a wrapper calls that of the context around it.
    """
    key = id(owner), name
    wrappers = _wrappers()
    before = wrappers.get(key, ())
    with _lock:
        _entered[key] = _entered.get(key, 0) + 1
        if _entered[key] == 1:
            original = inspect.getattr_static(owner, name)
            _originals[key] = name not in vars(owner), original
            setattr(owner, name, _passing(original, key))
    wrappers[key] = (*before, wrapper)
    try:
        yield
    finally:
        wrappers[key] = before
        with _lock:
            _entered[key] -= 1
            if not _entered[key]:
                inherited, original = _originals.pop(key)
                delattr(owner, name) if inherited else setattr(owner, name, original)


@contextmanager
def setting(owner: Any, **values: Any) -> Iterator[None]:
    """Sets attributes of one object for a while, on all threads."""
    attributes = vars(owner)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(before)


def _passing(original: Any, key: _Key) -> Any:
    function: Any = original.fget if isinstance(original, property) else original

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        layers = [function, *_wrappers().get(key, ())]
        return functools.reduce(lambda inner, wrap: functools.partial(wrap, inner), layers)(
            *args, **kwargs
        )

    return property(call) if isinstance(original, property) else call


def _wrappers() -> dict[_Key, tuple[Callable[..., Any], ...]]:
    return _thread.__dict__.setdefault("wrappers", {})  # type: ignore[no-any-return]
