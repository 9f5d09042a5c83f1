"""Many cheap cases in one test: ``each`` in place of ``pytest.mark.parametrize``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Any], Any]:
    """Makes one test of a function that takes cases; a failure names each case that fails."""
    wanted = (names,) if isinstance(names, str) else names
    listed = [(case,) if isinstance(names, str) else tuple(case) for case in cases]
    assert listed, "a test without cases cannot fail"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def all_cases(**fixtures: Any) -> None:
            wrong = []
            for case in listed:
                try:
                    test(**fixtures, **dict(zip(wanted, case, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    wrong.append(f"{case}: {type(error).__name__}: {error}")
            assert not wrong, "\n".join(wrong)

        signature = inspect.signature(test)
        kept = [one for one in signature.parameters.values() if one.name not in wanted]
        assert len(kept) + len(wanted) == len(signature.parameters)
        del all_cases.__wrapped__
        all_cases.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return all_cases

    return decorate
