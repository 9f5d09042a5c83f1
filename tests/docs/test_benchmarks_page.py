"""The page of benchmarks says what the record says; nothing is measured here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS, DOCS = ROOT / "benchmarks", ROOT / "docs"


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import speed.page

    yield speed
    for name in [name for name in sys.modules if name.partition(".")[0] == "speed"]:
        del sys.modules[name]


@pytest.fixture
def record() -> dict[str, Any]:
    return json.loads((BENCHMARKS / "speed.json").read_text())


def test_the_page_says_what_the_record_says(speed: Any, record: dict[str, Any]) -> None:
    text = speed.page.to_markdown(record)
    assert text in (DOCS / "benchmarks.md").read_text(), "python benchmarks/run.py --page-only"


def test_the_record_is_of_contenders_that_train_one_model(
    speed: Any, record: dict[str, Any]
) -> None:
    results = [result for part in record["parts"].values() for result in part.get("results", ())]
    measured = {(one["workload"], one["replicas"]) for one in results}
    assert measured >= {("small_mlp", 2), ("cnn", 2), ("wide_mlp", 2), ("wide_mlp", 4)}
    for result in results:
        assert speed.report.disagreements(result) == {}


def test_a_contender_that_trains_another_model_is_found(speed: Any, record: dict[str, Any]) -> None:
    (result,) = (one for one in record["parts"]["cnn"]["results"] if one["replicas"] == 2)
    result["losses"]["ours"] += 1e-3
    assert list(speed.report.disagreements(result)) == ["ours"]
