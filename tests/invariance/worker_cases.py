"""Runs cases in this process, as one worker among several."""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path

from case import Case

import tfmultigpu as tmg

FOLDER = Path(__file__).parent
NOT_CASES = {"test_workers"}


def worker_cases() -> dict[str, Case]:
    """All cases that workers train, by the name of their file and their own."""
    modules = sorted(path.stem for path in FOLDER.glob("test_*.py"))
    return {
        f"{module}: {case.name}": case
        for module in modules
        if module not in NOT_CASES
        for case in getattr(importlib.import_module(module), "CASES", ())
        if case.workers
    }


def run(names: list[str]) -> dict[str, str]:
    """Trains the cases and returns what went wrong, by name; an empty text where nothing did."""
    strategy = tmg.create_strategy("multi_worker", fallback=False)
    cases = worker_cases()
    return {name: _outcome(cases[name], strategy) for name in names}


def _outcome(case: Case, strategy: object) -> str:
    try:
        # Evaluating and predicting on workers have tests of their own, which cost less.
        case.hold(strategy=strategy, predict=False)
    except Exception:  # Reported by the test of this case; the other cases go on.
        return traceback.format_exc()
    return ""
