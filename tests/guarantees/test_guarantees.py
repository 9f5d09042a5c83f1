"""Each line of the page, measured again: this library always, and plain code as it was recorded.

What plain TensorFlow and Keras do is held too, so that the page stays true. When a release mends
something, the test fails, and says what to do.
"""

from __future__ import annotations

import math

import isolated
import keras
import page
import pytest
import tensorflow as tf
from catalogue import CASES
from guarantee import Case, Outcome

AGAIN = "run `python tests/guarantees/measure.py` again"
Outcomes = dict[tuple[str, str], Outcome]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Outcomes:
    chosen = {item.callspec.params["case"].name for item in request.session.items if holds(item)}
    cases = [case for case in CASES if case.name in chosen]
    return isolated.measured(cases, ("plain", "ours") if recorded_here() else ("ours",))


def holds(item: pytest.Item) -> bool:
    return getattr(item, "originalname", None) == "test_the_line_holds"


def recorded_here() -> bool:
    """Whether the record was made with these versions."""
    return (page.read()["tensorflow"], page.read()["keras"]) == (tf.__version__, keras.__version__)


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_line_holds(case: Case, found: Outcomes) -> None:
    assert case.fault(found[case.name, "ours"]) == ""
    if not recorded_here():
        pytest.skip("plain code was recorded for other versions of TensorFlow and Keras")
    hold_plain(case, found[case.name, "plain"])


def hold_plain(case: Case, outcome: Outcome) -> None:
    expected = Outcome.from_json(page.read()["cases"][case.name]["plain"])
    changed = f"plain code did {expected} and does {outcome}: {AGAIN}" + (
        ", and rejoice" if outcome.kind == "same" else ""
    )
    assert outcome.kind == expected.kind, changed
    assert case.plain_says in outcome.message
    if expected.kind == "different":
        now, then = outcome.difference, expected.difference
        assert now is not None
        assert then is not None
        right = then / 3 <= now <= then * 3 if math.isfinite(then) else not math.isfinite(now)
        assert right, changed


# The page -----------------------------------------------------------------------------------------


def test_the_page_is_what_the_record_says_of_each_case(subtests: pytest.Subtests) -> None:
    record = page.read()
    assert page.PAGE.read_text() == page.render(record), (
        "guarantees.md is not what guarantees.json says; it is never edited by hand: "
        "run `python tests/guarantees/measure.py`"
    )
    assert list(record["cases"]) == [case.name for case in CASES]
    for case in CASES:
        with subtests.test(case=case):
            recorded = record["cases"][case.name]
            assert {key: recorded[key] for key in case.described()} == case.described()
            assert case.fault(Outcome.from_json(recorded["ours"])) == ""
