"""One start of one process and of two workers, for all scripts that both can run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tfmultigpu.addons.testing import run_workers

SCRIPT = Path(__file__).with_name("worker_together.py")
ON_BOTH = ("loops", "fit")
ON_WORKERS = ("data", "verification")


def by_script(output: str) -> dict[str, str]:
    parts = [part.partition("\n") for part in output.split("SCRIPT ")[1:]]
    return {name.strip(): printed for name, _, printed in parts}


@pytest.fixture(scope="session")
def printed() -> Callable[[str], list[str]]:
    """Returns what a script printed: as one process, if it can run as one, and on each worker."""
    runs = run_workers(SCRIPT, 1, args=ON_BOTH, timeout=600)
    runs += run_workers(SCRIPT, 2, args=[*ON_BOTH, *ON_WORKERS], timeout=900)
    outputs = [by_script(run.output) for run in runs]
    return lambda name: [one[name] for one in outputs if name in one]


@pytest.fixture(scope="session")
def results(printed: Callable[[str], list[str]]) -> Callable[..., list[dict[str, Any]]]:
    """Returns what a script printed behind a word."""

    def find(name: str, word: str = "RESULT") -> list[dict[str, Any]]:
        found = []
        for output in printed(name):
            (line,) = [one for one in output.splitlines() if one.startswith(f"{word} ")]
            found.append(json.loads(line.removeprefix(word)))
        return found

    return find
