"""Many cases in one promise, which a mutation names as one: elsewhere write ``parametrize``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Any], Any]:
    """Makes one test of a function that takes cases.

    A failure names each case that fails, with the traceback of the first.
    """
    wanted = (names,) if isinstance(names, str) else names
    listed = [(case,) if isinstance(names, str) else tuple(case) for case in cases]
    assert listed, "a test without cases cannot fail"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def all_cases(**fixtures: Any) -> None:
            errors: list[tuple[Any, BaseException]] = []
            for case in listed:
                try:
                    test(**fixtures, **dict(zip(wanted, case, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    errors.append((case, error))
            if errors:
                lines = [f"{case}: {type(e).__name__}: {e}" for case, e in errors]
                raise AssertionError("\n".join(lines)) from errors[0][1]

        signature = inspect.signature(test)
        kept = [one for one in signature.parameters.values() if one.name not in wanted]
        assert len(kept) + len(wanted) == len(signature.parameters)
        del all_cases.__wrapped__
        all_cases.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return all_cases

    return decorate
