"""The job files for schedulers are those of the page."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCHEDULERS = ROOT / "examples" / "schedulers"
PAGE = (ROOT / "docs" / "workers.md").read_text()


def test_the_page_shows_the_job_files() -> None:
    def lines(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith("# ")]

    files = sorted(path.name for path in SCHEDULERS.iterdir() if path.is_file())
    assert files == ["tfjob.yaml", "train.sbatch"]
    for name in files:
        text = PAGE.split(f"`examples/schedulers/{name}`")[1]
        shown = re.search(r"```text\n(.*?)```", text, re.DOTALL)
        assert shown is not None
        assert lines((SCHEDULERS / name).read_text()) == lines(shown[1])
