"""The GPU command as a module, which leaves nothing behind."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("run_gpu")
    for name in [name for name in sys.modules if name.split(".")[0] in ("gpu", "run_gpu")]:
        del sys.modules[name]
