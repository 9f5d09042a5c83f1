"""First steps over two real workers are held to one device on every worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfmultigpu.testing import run_workers


@pytest.mark.slow
def test_two_workers_verify_the_whole_batch_or_the_same_part_of_it() -> None:
    same = {"outcome": "same", "rows": [12, 12], "culprit": "", "warnings": 0, "steps": 2}
    told = {"outcome": "different", "rows": [12, 12], "culprit": "Lambda", "warnings": 1}
    part = {"rows": [8, 12], "steps": 1}
    for run in run_workers(Path(__file__).with_name("worker_verification.py"), 2, timeout=900):
        (line,) = [one for one in run.output.splitlines() if one.startswith("RESULT ")]
        assert json.loads(line.removeprefix("RESULT ")) == {
            "same": same,
            "different": {**told, "steps": 2},
            "part, same": {**same, **part},
            "part, different": {**told, **part},
        }
