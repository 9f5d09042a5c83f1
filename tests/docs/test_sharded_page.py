"""The page on large models shows the plan that its program prints, and pictures of another."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import pytest
from one_device import strategy_of
from test_documentation import blocks_of

import tfmultigpu as tmg

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sharded-variables.md").read_text()


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = ROOT / "docs" / "figures" / "sharded_bytes.py"
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location("sharded_bytes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plan_on_the_page_is_the_one_that_is_printed() -> None:
    blocks = blocks_of(PAGE)
    program = next(block.code for block in blocks if block.language == "python")
    build = re.search(r"^def build\(\):\n(?: .*\n|\n)+", program, re.MULTILINE)
    assert build is not None
    names: dict[str, Any] = {"keras": keras}
    exec(build[0], names)
    plan = tmg.plan_memory(names["build"], keras.optimizers.Adam(1e-4), strategy_of(4), rows=64)
    shown = next(block.code for block in blocks if block.language == "text")
    assert shown.rstrip() == str(plan).split("\n\n")[0]


def test_the_picture_shows_the_plan(figure: ModuleType) -> None:
    record = json.loads(figure.RECORD.read_text())
    assert record == figure.planned(strategy_of(figure.DEVICES))
    for name, svg in figure.pictures(record).items():
        path = ROOT / "docs" / name
        assert path.read_text() == svg, "python docs/figures/sharded_bytes.py --draw"
    for parts in record.values():
        assert f"{sum(parts.values()) / 2**20:.0f} MiB" in PAGE
