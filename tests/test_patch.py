"""Wrappers of one thread around what all threads call, and what stays when they have ended."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest

from tfmultigpu._patch import ignoring_warnings, lock_of, patching, wrap_for_good


class Owner:
    def double(self, number: int) -> int:
        return 2 * number


def plus(amount: int) -> Any:
    return lambda original, number: original(number) + amount


def in_another_thread(function: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


# Fails if a method of one object is wrapped for other objects or threads, or for longer.
def test_a_method_of_one_object_is_wrapped_on_one_thread() -> None:
    owner, other = Owner(), Owner()
    with patching(owner, "double", plus(1)), patching(owner, "double", plus(10)):
        assert (owner.double(3), other.double(3)) == (17, 6)
        assert in_another_thread(lambda: owner.double(3)) == 6
    assert owner.double(3) == 6
    assert not vars(owner)


# Fails if what stays is lost with a context that was open when it came, or wraps the context.
@pytest.mark.parametrize("while_open", [True, False])
def test_what_is_wrapped_for_good_stays_inside_of_contexts(while_open: bool) -> None:
    owner = Owner()
    if not while_open:
        wrap_for_good(owner, "double", plus(100))
    with patching(owner, "double", lambda original, number: -original(number)):
        if while_open:
            wrap_for_good(owner, "double", plus(100))
        assert owner.double(3) == -106
    assert in_another_thread(lambda: owner.double(3)) == 106
    assert owner.double(3) == 106


# Fails if the end of a context takes away what somebody else has put in meanwhile.
def test_what_others_put_in_meanwhile_stays() -> None:
    owner = Owner()
    with patching(owner, "double", plus(1)):
        ours = owner.double
        vars(owner)["double"] = lambda number: ours(number) * 1000
    assert owner.double(3) == 6000
    with patching(owner, "double", plus(1)):
        assert owner.double(3) == 6001


# Fails if warnings of other threads, or later ones, are ignored too, or filters are put back.
def test_warnings_are_ignored_on_one_thread() -> None:
    def warn() -> None:
        warnings.warn("ours and more", stacklevel=1)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with ignoring_warnings("ours"):
            warn()
            assert not shown
            in_another_thread(warn)
            assert len(shown) == 1
            warnings.warn("not ours", stacklevel=1)
            assert len(shown) == 2
        warn()
        assert len(shown) == 3

        # A context that ignores all of them, and is over.
        with ignoring_warnings():
            warnings.warn("not ours", stacklevel=1)
        with ignoring_warnings("ours"):
            warnings.warn("not ours", stacklevel=1)
        assert len(shown) == 4


# Fails if two callers get two locks of one object, or the lock keeps the object alive.
def test_an_object_has_one_lock_for_each_purpose() -> None:
    owner = Owner()
    assert lock_of(owner) is lock_of(owner) is not lock_of(owner, "build")
    assert lock_of(Owner()) is not lock_of(owner)
