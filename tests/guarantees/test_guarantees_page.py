"""The page says what was measured, about every case, and nobody has edited it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import isolated
import page
import pytest
from catalogue import CASES
from guarantee import Case, Difference, Outcome, telling_line
from held import RECORD, fault, hold_plain, record, recorded_here

NAMES = [case.name for case in CASES]
BY_NAME = {case.name: case for case in CASES}


def test_the_page_is_what_the_record_says() -> None:
    written = RECORD.with_suffix(".md").read_text()
    assert written == page.render(record()), (
        "docs/guarantees.md is not what docs/guarantees.json says; it is never edited by hand: "
        "run `python tests/guarantees/measure.py`"
    )


def test_every_case_is_in_the_record_in_this_order_and_nothing_else() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert list(record()["cases"]) == NAMES


def test_the_record_says_of_the_cases_what_the_code_says() -> None:
    keys = ("section", "title", "links", "tolerance", "reason")
    recorded = {name: {k: one[k] for k in keys} for name, one in record()["cases"].items()}
    assert {n for n in NAMES if recorded[n] != BY_NAME[n].described()} == set()


def test_what_was_recorded_of_this_library_is_what_it_is_held_to() -> None:
    wrong = {
        name: told
        for name, one in record()["cases"].items()
        if (told := fault(BY_NAME[name], Outcome.from_json(one["ours"])))
    }
    assert wrong == {}


def case(**changes: object) -> Case:
    nothing = dataclasses.replace(CASES[0], name="nothing", plain_says="", plain_kinds=())
    return dataclasses.replace(nothing, **changes)


def test_a_case_that_is_not_the_same_gives_its_reason() -> None:
    with pytest.raises(AssertionError, match="nothing: say why"):
        case(tolerance=1e-3)
    with pytest.raises(AssertionError, match="nothing: say why"):
        case(ours_kind="error")


def test_what_is_the_same() -> None:
    for value, kind in ((1e-7, "same"), (2e-6, "different"), (float("nan"), "different")):
        difference = Difference(value)
        outcome = case(plain=lambda found=difference: found).measure("plain")
        assert outcome.kind == kind, value
        assert bool(fault(case(), outcome)) is (kind != "same"), value


@pytest.mark.skipif(not recorded_here(), reason="needs the versions that plain code is held to")
def test_a_difference_of_another_size_is_noticed() -> None:
    known = BY_NAME["loop-constant-batch-size"]
    then = Outcome.from_json(record()["cases"][known.name]["plain"])
    hold_plain(known, {(known.name, "plain"): then})
    assert then.difference is not None
    for factor in (0.2, 5.0):
        now = dataclasses.replace(then, difference=then.difference * factor)
        with pytest.raises(AssertionError, match=r"run `python tests/guarantees/measure.py` again"):
            hold_plain(known, {(known.name, "plain"): now})
    with pytest.raises(AssertionError, match="and rejoice"):
        hold_plain(known, {(known.name, "plain"): Outcome("same", 1e-8, "weights")})


def test_the_telling_line_of_an_error() -> None:
    graph = ValueError(
        "Graph execution error:\n\nDetected at node x\n(0) INTERNAL:  Missing 1-th output from "
        "{{node a/b/Conv}}\n\t [[a/b]]\n0 successful operations."
    )
    assert telling_line(graph) == "ValueError: Missing 1-th output from Conv"
    assert telling_line(RuntimeError("first\nat 0x7f12 second"), "second") == (
        "RuntimeError: at 0x... second"
    )
    assert telling_line(AssertionError()) == "AssertionError: (no text)"


def test_numbers_have_one_digit() -> None:
    numbers = {
        2.98e-8: "3e-8",
        0.0144: "0.01",
        0.42: "0.4",
        1.8: "2",
        93.2: "90",
        3.6e14: "4e14",
        float("inf"): "NaN",
    }
    assert {value: page.number(value) for value in numbers} == numbers


def test_text_in_the_table_cannot_break_it() -> None:
    assert page.code("a `b` | c") == "`` a `b` \\| c ``"
    assert page.code("word " * 100).endswith("word ...`")
    assert len(page.code("word " * 100)) < 170


TROUBLE = """
import os, signal, time
import tensorflow
from guarantee import Case, Difference

def case(name, plain, **more):
    return Case(name, "section", name, plain, plain, virtual_cpus=0, **more)

CASES = [
    case("dies", lambda: os.kill(os.getpid(), signal.SIGABRT)),
    case("waits", lambda: time.sleep(60), patience=1.0),
    case("right", lambda: Difference(0.0)),
]
"""


def test_a_case_that_dies_or_hangs_leaves_the_others_alone(tmp_path: Path) -> None:
    (tmp_path / "catalogue.py").write_text(TROUBLE)
    names = ("dies", "waits", "right")
    jobs = isolated.jobs_for([case(name=name, virtual_cpus=0) for name in names], ("plain",))
    assert [job["names"] for job in jobs] == [[*names]]
    measured = isolated.run(jobs, first_path=(str(tmp_path),))
    found = {name: outcome for name, _, outcome, _ in measured}
    assert found["dies"] == Outcome("abort", message="SIGABRT")
    assert found["waits"] == Outcome("hang", seconds=1.0)
    assert found["right"].kind == "same"
