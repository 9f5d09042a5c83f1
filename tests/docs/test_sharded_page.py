"""The page on large models shows the plan that its program prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
from one_device import strategy_of
from test_documentation import blocks_of

import tfmultigpu as tmg

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sharded-variables.md").read_text()


def test_the_plan_on_the_page_is_the_one_that_is_printed() -> None:
    blocks = blocks_of(PAGE)
    program = next(block.code for block in blocks if block.language == "python")
    build = re.search(r"^def build\(\):\n(?: .*\n|\n)+", program, re.MULTILINE)
    assert build is not None
    names: dict[str, Any] = {"keras": keras}
    exec(build[0], names)
    plan = tmg.tuning.plan_memory(
        names["build"], keras.optimizers.Adam(1e-4), strategy_of(4), rows=64
    )
    shown = next(block.code for block in blocks if block.language == "text")
    assert shown.rstrip() == str(plan).split("\n\n")[0]
