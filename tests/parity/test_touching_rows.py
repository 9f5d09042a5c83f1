"""Programs whose rows touch each other: the answer of one device, or a word."""

from __future__ import annotations

import pytest
from comparing import compare
from more_programs import MORE_CASES
from programs import CASES, Case

import tfmultigpu as tmg


@pytest.mark.parametrize("case", [*CASES, *MORE_CASES], ids=lambda case: case.name)
def test_replicas_give_one_devices_answer_or_say_that_they_do_not(case: Case) -> None:
    strategy = tmg.create_strategy(devices=["CPU:0", "CPU:1"])
    outcome = compare(case, strategy)
    assert outcome.said == case.outcome, outcome
    assert case.says in outcome.text
    if outcome.said == "told":
        assert outcome.apart > 1e-4 * outcome.moved, f"a false alarm: {outcome}"
