"""The job files for schedulers are those of the page, and Ray runs its example."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCHEDULERS = ROOT / "examples" / "schedulers"
PAGE = (ROOT / "docs" / "workers.md").read_text()


def test_the_page_shows_the_job_files() -> None:
    def lines(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith("# ")]

    files = sorted(path.name for path in SCHEDULERS.iterdir() if path.is_file())
    assert files == ["ray_train.py", "tfjob.yaml", "train.sbatch"]
    assert all(f"examples/schedulers/{name}" in PAGE for name in files)
    for name in ("train.sbatch", "tfjob.yaml"):
        text = PAGE.split(f"`examples/schedulers/{name}`")[1]
        shown = re.search(r"```text\n(.*?)```", text, re.DOTALL)
        assert shown is not None
        assert lines((SCHEDULERS / name).read_text()) == lines(shown[1])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: nox -s ray")
def test_ray_starts_killed_workers_again() -> None:
    ended = subprocess.run(
        [sys.executable, str(SCHEDULERS / "ray_train.py")],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    restored, last = ended.stdout.splitlines()[-2:]
    assert restored == "restored: 4 None"
    found = re.fullmatch(
        r"2 workers, one killed, largest weight difference to one device: (\S+)", last
    )
    assert found is not None, last
    assert float(found[1]) <= 1e-6
