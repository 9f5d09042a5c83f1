"""The page says what was measured, about every case, and nobody has edited it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import isolated
import page
import pytest
from catalogue import CASES
from guarantee import Case, Difference, Outcome, telling_line
from test_guarantees import hold_plain, recorded_here

BY_NAME = {case.name: case for case in CASES}


def test_the_page_is_what_the_record_says_of_each_case() -> None:
    record = page.read()
    assert page.PAGE.read_text() == page.render(record), (
        "docs/guarantees.md is not what docs/guarantees.json says; it is never edited by hand: "
        "run `python tests/guarantees/measure.py`"
    )
    assert list(record["cases"]) == list(BY_NAME)
    for case in CASES:
        recorded = record["cases"][case.name]
        assert {key: recorded[key] for key in case.described()} == case.described()
        assert case.fault(Outcome.from_json(recorded["ours"])) == ""


def changed(**changes: Any) -> Case:
    return dataclasses.replace(CASES[0], plain_says="", **changes)


def test_what_is_the_same_and_what_needs_a_reason() -> None:
    for value, kind in ((1e-7, "same"), (2e-6, "different"), (float("nan"), "different")):
        difference = Difference(value)
        outcome = changed(plain=lambda found=difference: found).measure("plain")
        assert outcome.kind == kind, value
        assert bool(changed().fault(outcome)) is (kind != "same"), value
    for options in ({"tolerance": 1e-3}, {"ours_kind": "error"}):
        with pytest.raises(AssertionError, match="say why"):
            changed(**options)


@pytest.mark.skipif(not recorded_here(), reason="needs the versions that plain code is held to")
def test_a_difference_of_another_size_is_noticed() -> None:
    known = BY_NAME["loop-constant-batch-size"]
    then = Outcome.from_json(page.read()["cases"][known.name]["plain"])
    hold_plain(known, then)
    assert then.difference is not None
    for factor in (0.2, 5.0):
        now = dataclasses.replace(then, difference=then.difference * factor)
        with pytest.raises(AssertionError, match=r"run `python tests/guarantees/measure.py` again"):
            hold_plain(known, now)


def test_text_and_numbers_of_the_page() -> None:
    graph = ValueError(
        "Graph execution error:\n\nDetected at node x\n(0) INTERNAL:  Missing 1-th output from "
        "{{node a/b/Conv}}\n\t [[a/b]]\n0 successful operations."
    )
    assert telling_line(graph) == "ValueError: Missing 1-th output from Conv"
    numbers = {2.98e-8: "3e-8", 0.0144: "0.01", 0.42: "0.4", 93.2: "90", float("inf"): "NaN"}
    assert {value: page.number(value) for value in numbers} == numbers
    assert page.code("a `b` | c") == "`` a `b` \\| c ``"
    assert page.code("word " * 100).endswith("word ...`")


TROUBLE = """
import os, signal, time
from guarantee import Case, Difference

CASES = [
    Case(name, "section", name, plain, plain, patience=patience)
    for name, plain, patience in (
        ("dies", lambda: os.kill(os.getpid(), signal.SIGABRT), 60.0),
        ("waits", lambda: time.sleep(60), 20.0),
        ("right", lambda: Difference(0.0), 60.0),
    )
]
"""


def test_a_case_that_dies_or_hangs_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trouble.py").write_text(TROUBLE)
    monkeypatch.syspath_prepend(tmp_path)
    import trouble

    found = isolated.measured(trouble.CASES, ("plain",), module="trouble")
    assert found["dies", "plain"] == Outcome("abort", message="SIGABRT")
    assert found["waits", "plain"] == Outcome("hang", seconds=20.0)
    assert found["right", "plain"].kind == "same"
