"""The picture of the start page is drawn from its record, and the record shows what is claimed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def same_curve() -> ModuleType:
    path = ROOT / "docs" / "figures" / "same_curve.py"
    spec = importlib.util.spec_from_file_location("same_curve", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_show_the_record(same_curve: ModuleType) -> None:
    record = json.loads(same_curve.RECORD.read_text())
    for name, svg in same_curve.pictures(record).items():
        assert (ROOT / "docs" / name).read_text() == svg, "python docs/figures/same_curve.py --draw"


def test_the_record_holds_what_the_text_says(same_curve: ModuleType) -> None:
    losses = json.loads(same_curve.RECORD.read_text())["losses"]
    assert list(losses) == list(same_curve.RUNS)
    one = losses[same_curve.ONE]
    furthest = {
        name: max(abs(a - b) for a, b in zip(values, one, strict=True))
        for name, values in losses.items()
    }
    assert max(furthest[name] for name in furthest if name.startswith("tmg")) < 5e-7
    assert 0.055 < furthest["Keras fit, 4 replicas"] < 0.07
    assert "up to 0.06 for Keras" in (ROOT / "README.md").read_text()
