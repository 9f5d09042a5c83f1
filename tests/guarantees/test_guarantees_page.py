"""The page says what was measured, about every case, and nobody has edited it."""

from __future__ import annotations

import dataclasses

import page
import pytest
from cases import CASES
from guarantee import Outcome
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
