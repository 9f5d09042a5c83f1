"""On a GPU: each group of checks in a process of its own, because each divides the GPU differently.

The checks are functions in ``gpu_checks``, which ``python benchmarks/run_gpu.py`` runs too, on
machines without pytest.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from gpu_checks.groups import GROUPS, names_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

RUN = Path(__file__).parent / "run.py"


@functools.cache
def results(group: str) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        lines.touch()
        # This process may have taken memory of the GPU by listing it, but starts nothing on it.
        done = subprocess.run(
            [sys.executable, str(RUN), group, str(lines)],
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        found = [json.loads(line) for line in lines.read_text().splitlines()]
    ended = {"status": "failed", "error": f"ended with {done.returncode}: {done.stderr[-2000:]}"}
    return dict.fromkeys(names_of(group), ended) | {
        one["name"]: one for one in found if "name" in one
    }


@pytest.mark.parametrize("name", [name for group in GROUPS for name in names_of(group)])
def test_on_a_gpu(name: str) -> None:
    result = results(name.partition(".")[0])[name]
    if result["status"] == "not run":
        pytest.skip(result["error"])
    assert result["status"] == "passed", result["error"]
