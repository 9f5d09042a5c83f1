"""The page says what was measured, about every case, and nobody has edited it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import isolated
import page
import pytest
from catalogue import CASES
from guarantee import Case, Difference, Outcome, telling_line
from held import RECORD, hold_plain, record, recorded_here

NAMES = [case.name for case in CASES]
BY_NAME = {case.name: case for case in CASES}


def test_the_page_is_what_the_record_says() -> None:
    written = RECORD.with_suffix(".md").read_text()
    assert written == page.render(record()), (
        "docs/guarantees.md is not what docs/guarantees.json says; it is never edited by hand: "
        "run `python tests/guarantees/measure.py`"
    )


def test_every_case_has_a_name_of_its_own() -> None:
    assert len(NAMES) == len(set(NAMES))


def test_every_case_is_in_the_record_in_this_order_and_nothing_else() -> None:
    assert list(record()["cases"]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_record_says_of_a_case_what_the_code_says(name: str) -> None:
    recorded = record()["cases"][name]
    described = {key: recorded[key] for key in ("section", "title", "links", "tolerance", "reason")}
    assert described == BY_NAME[name].described()


@pytest.mark.parametrize("name", NAMES)
def test_what_was_recorded_of_this_library_is_what_it_is_held_to(name: str) -> None:
    case = BY_NAME[name]
    ours = Outcome.from_json(record()["cases"][name]["ours"])
    assert ours.kind == case.ours_kind
    assert case.ours_says in ours.message
    if ours.kind == "same":
        assert ours.difference is not None
        assert ours.difference <= case.tolerance


def case(**changes: object) -> Case:
    nothing = dataclasses.replace(CASES[0], name="nothing", plain_says="", plain_kinds=())
    return dataclasses.replace(nothing, **changes)


def test_a_case_that_is_not_the_same_gives_its_reason() -> None:
    with pytest.raises(AssertionError, match="nothing: say why"):
        case(tolerance=1e-3)
    with pytest.raises(AssertionError, match="nothing: say why"):
        case(ours_kind="error")


@pytest.mark.parametrize(
    ("value", "kind"), [(1e-7, "same"), (2e-6, "different"), (float("nan"), "different")]
)
def test_what_is_the_same(value: float, kind: str) -> None:
    assert case(plain=lambda: Difference(value)).measure("plain").kind == kind


@pytest.mark.skipif(not recorded_here(), reason="needs the versions that plain code is held to")
@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_difference_of_another_size_is_noticed(factor: float) -> None:
    known = BY_NAME["loop-constant-batch-size"]
    then = Outcome.from_json(record()["cases"][known.name]["plain"])
    hold_plain(known, {(known.name, "plain"): then})
    assert then.difference is not None
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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.98e-8, "3e-8"),
        (0.0144, "0.01"),
        (0.42, "0.4"),
        (1.8, "2"),
        (93.2, "90"),
        (3.6e14, "4e14"),
        (float("inf"), "NaN"),
    ],
)
def test_numbers_have_one_digit(value: float, text: str) -> None:
    assert page.number(value) == text


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
