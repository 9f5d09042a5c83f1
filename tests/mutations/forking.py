"""Runs tests against a copy of the package, in a fork that has nothing of the library yet."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

Ends = dict[str, list[str]]  # Of each test: the outcome, the types of its error, its first line.


class Outcomes:
    """A pytest plugin that keeps how each test ended, and by which error."""

    def __init__(self) -> None:
        self.by_test: Ends = {}

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        name = item.nodeid.removeprefix("tests/")
        if call.excinfo is not None:
            kinds = kinds_of(call.excinfo.value)
            lines = str(call.excinfo.value).strip().splitlines() or [""]
            self.by_test[name] = ["failed", " ".join(kinds), lines[0]]
        elif call.when == "call":
            self.by_test.setdefault(name, ["passed", "", ""])


def kinds_of(error: BaseException) -> list[str]:
    """Returns the names of the classes of an error, and of those that it groups or tells of."""
    names = [kind.__name__ for kind in type(error).__mro__]
    names += getattr(error, "kinds", ())  # Of a WorkerRaised.
    return names + [name for one in getattr(error, "exceptions", ()) for name in kinds_of(one)]


def run(package: str, tests: list[str]) -> Ends:
    """Runs tests of ``tests/`` against one copy."""
    assert "tfmultigpu" not in sys.modules
    sys.path.insert(0, package)
    os.environ["PYTHONPATH"] = package  # For the processes that tests start.
    outcomes = Outcomes()
    names = [str(Path(__file__).parents[1] / test) for test in tests]
    code = pytest.main(["-q", "-p", "no:cacheprovider", *names], plugins=[outcomes])
    if code not in (0, 1):
        outcomes.by_test["pytest"] = ["failed", "", f"pytest ended with {code}"]
    return outcomes.by_test
