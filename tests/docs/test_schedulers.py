"""The job file for Slurm is that of the page."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "schedulers" / "train.sbatch"
PAGE = (ROOT / "docs" / "how-to" / "slurm.md").read_text()


def test_the_page_shows_the_job_file() -> None:
    shown = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("# ")]
    assert shown[1].splitlines() == lines
