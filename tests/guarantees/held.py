"""What the tests of every section hold: this library always, and plain code as it was recorded.

What plain TensorFlow and Keras do is held too, so that the page stays true. When a release mends
something, the test fails, and says what to do.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import isolated
import keras
import pytest
import tensorflow as tf
from guarantee import Case, Outcome

RECORD = Path(__file__).resolve().parent.parent.parent / "docs" / "guarantees.json"
AGAIN = "run `python tests/guarantees/measure.py` again"


@functools.cache
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def recorded_here() -> bool:
    """Whether the record was made with these versions."""
    return (record()["tensorflow"], record()["keras"]) == (tf.__version__, keras.__version__)


Outcomes = dict[tuple[str, str], Outcome]


def outcomes(cases: Sequence[Case]) -> Outcomes:
    """Measures both sides of cases, plain code where it was recorded, in processes of their own."""
    sides = ("plain", "ours") if recorded_here() else ("ours",)
    found = isolated.run(isolated.jobs_for(cases, sides))
    return {(name, side): outcome for name, side, outcome, _ in found}


def fault(case: Case, outcome: Outcome) -> str:
    """Returns how an outcome of this library is not what it is held to, or nothing."""
    right = outcome.kind == case.ours_kind and case.ours_says in outcome.message
    if right and outcome.kind == "same":
        right = outcome.difference is not None and outcome.difference <= case.tolerance
    return "" if right else f"held to {case.ours_kind} {case.ours_says!r}, and is {outcome}"


def hold_ours(case: Case, found: Outcomes) -> None:
    assert fault(case, found[case.name, "ours"]) == ""


def hold_plain(case: Case, found: Outcomes) -> None:
    if not recorded_here():
        pytest.skip(
            f"needs TensorFlow {record()['tensorflow']} with Keras {record()['keras']}, for which "
            "plain code was recorded"
        )
    outcome = found[case.name, "plain"]
    expected = Outcome.from_json(record()["cases"][case.name]["plain"])
    changed = f"plain code did {expected} and does {outcome}: {AGAIN}" + (
        ", and rejoice" if outcome.kind == "same" else ""
    )
    if case.plain_kinds:
        assert outcome.kind in case.plain_kinds, changed
        return
    assert outcome.kind == expected.kind, changed
    assert case.plain_says in outcome.message
    if expected.kind == "different":
        now, then = outcome.difference, expected.difference
        assert now is not None
        assert then is not None
        if math.isfinite(then):
            assert then / 3 <= now <= then * 3, changed
        else:
            assert not math.isfinite(now), changed
