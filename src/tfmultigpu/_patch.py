"""Replaces functions, methods and properties of other libraries for a while, on one thread.

Keras and TensorFlow look them up at each call. Replicas are threads that take turns, and a process
may train several models in threads of its own. So a wrapper serves only the thread that entered the
context, and the calls of all other threads pass through.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_Method = Callable[..., Any]
_lock = threading.RLock()


class _Thread(threading.local):
    """What this thread has entered.

    Attributes:
        wrappers: The wrappers of each patch, the innermost first.
        ignored: One entry for each context that ignores warnings.
    """

    def __init__(self) -> None:
        self.wrappers: dict[_Patch, tuple[_Method, ...]] = {}
        self.ignored: list[str] = []


_thread = _Thread()


class _Patch:
    """One attribute of an owner while some thread wraps it: it asks each thread for its wrappers.

    Attributes:
        original: What the innermost wrapper calls.
        is_inherited: Whether the owner has the attribute from its class.
        entered: How many contexts are open, on all threads.
    """

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name, self.entered = owner, name, 0
        self.is_inherited = name not in vars(owner)
        # Methods of one object are bound to it; those of a class are given each object.
        is_object = not isinstance(owner, (type, types.ModuleType))
        self.original: Any = getattr(owner, name)
        if not is_object:
            self.original = inspect.getattr_static(owner, name)
        self.passing = self._passing()
        setattr(owner, name, self.passing)

    def enter(self) -> None:
        """Counts one more context."""
        self.entered += 1

    def wrap_inside(self, wrapper: _Method) -> None:
        """Puts a wrapper around the original that stays when all contexts have ended."""
        self.original, self.is_inherited = functools.partial(wrapper, self.original), False

    def leave(self) -> None:
        """Counts one less; the last puts back the original, if nobody has put in anything else."""
        self.entered -= 1
        if self.entered or vars(self.owner).get(self.name) is not self.passing:
            return
        if self.is_inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)

    def _passing(self) -> Any:
        is_property = isinstance(self.original, property)

        @functools.wraps(self.original.fget if is_property else self.original)
        def call(*args: Any, **kwargs: Any) -> Any:
            function = self.original.fget if is_property else self.original
            for wrapper in _thread.wrappers.get(self, ()):
                function = functools.partial(wrapper, function)
            return function(*args, **kwargs)

        return property(call) if is_property else call


_patches: dict[tuple[int, str], _Patch] = {}


@contextmanager
def patching(owner: object, name: str, wrapper: _Method) -> Iterator[None]:
    """Has calls on this thread go through ``wrapper(original, *args, **kwargs)``.

    The context is re-entrant. A wrapper's ``original`` calls the wrapper of the context around it.
    The owner is a class, a module, or one object whose methods are called.
    """
    key = id(owner), name
    with _lock:
        patch = _patches.get(key)
        if patch is None:
            patch = _patches[key] = _Patch(owner, name)
        patch.enter()
    wrappers = _thread.wrappers
    before = wrappers.get(patch, ())
    wrappers[patch] = (*before, wrapper)
    try:
        yield
    finally:
        wrappers[patch] = before
        if not before:
            del wrappers[patch]
        with _lock:
            patch.leave()
            if not patch.entered:
                del _patches[key]


def wrap_for_good(owner: object, name: str, wrapper: _Method) -> None:
    """Has calls of a method of one object go through a wrapper, on all threads, from now on.

    Contexts of ``patching``, also those that other threads have open now, stay around it.
    """
    with _lock:
        patch = _patches.get((id(owner), name))
        if patch is None:
            setattr(owner, name, functools.partial(wrapper, getattr(owner, name)))
        else:
            patch.wrap_inside(wrapper)


@contextmanager
def setting(owner: object, **values: object) -> Iterator[None]:
    """Sets attributes of one object for a while.

    All threads see them, so the object is of this thread alone, as the context of a replica is, or
    ``lock_of`` it is held.
    """
    attributes = vars(owner)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(before)


_locks: weakref.WeakKeyDictionary[object, dict[str, threading.RLock]] = weakref.WeakKeyDictionary()


def lock_of(owner: object, purpose: str = "") -> threading.RLock:
    """Returns the re-entrant lock of an object, such as an optimizer: the same for each caller.

    Who holds one must not wait for another thread that takes it, as ``outside_scopes`` would.
    """
    with _lock:
        return _locks.setdefault(owner, {}).setdefault(purpose, threading.RLock())


class _OfThread(type):
    """Makes a category of warnings that has all while this thread ignores its message, else none.

    Each message has a category of its own: a filter that stays must not match what another context
    lets through.
    """

    message: str

    def __subclasscheck__(cls, category: type) -> bool:
        return cls.message in _thread.ignored


_ignored: dict[str, Any] = {}


@contextmanager
def ignoring_warnings(message: str = "") -> Iterator[None]:
    """Ignores warnings that begin with a message, on this thread.

    ``warnings.catch_warnings`` sets the filters of all threads, and at its end those that it found:
    of two threads in it, the one that leaves last would bring back the filters of the other. Here
    a filter is added that stays, and matches nothing outside of the context.
    """
    with _lock:
        if message not in _ignored:
            _ignored[message] = _OfThread("Ignored", (Warning,), {"message": message})
    warnings.filterwarnings("ignore", re.escape(message), _ignored[message])
    _thread.ignored.append(message)
    try:
        yield
    finally:
        _thread.ignored.pop()
