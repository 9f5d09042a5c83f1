"""Runs cases in this process, as one worker among several."""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path

from case import Case

import tfmultigpu as tmg

FOLDER = Path(__file__).parent
NOT_CASES = {"test_workers"}
# Most of what the cases try comes before the sum over replicas or after it, where a worker does
# what a replica of one process does: of these files every fourth case is trained on workers too, of
# the others every second.
EVERY_FOURTH = {"test_optimizers", "test_sample_weights", "test_sparse_gradients"}


def worker_cases() -> dict[str, Case]:
    """All cases that workers train, by the name of their file and their own."""
    found: dict[str, Case] = {}
    for module in sorted(path.stem for path in FOLDER.glob("test_*.py")):
        if module not in NOT_CASES:
            cases = getattr(importlib.import_module(module), "CASES", ())
            chosen = [case for case in cases if case.workers]
            chosen = chosen[:: 4 if module in EVERY_FOURTH else 2]
            found |= {f"{module}: {case.name}": case for case in chosen}
    return found


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
