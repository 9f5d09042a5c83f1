"""The mutations fit the source and the tests. ``nox -s mutations`` tries them, in minutes."""

from __future__ import annotations

import ast
import re

import pytest
from mutating import PAGE, page, survived
from mutation import changed, sources
from mutations import MUTATIONS, ROOT, Mutation


def test_the_code_that_mutations_change_is_there() -> None:
    for mutation in MUTATIONS:
        for file, text in mutation.changed().items():
            ast.parse(text)
            assert text != sources()[file], mutation.name


def test_each_mutation_is_caught_by_a_promise() -> None:
    wrong = []
    for mutation in MUTATIONS:
        for test in mutation.tests:
            match = re.match(r"(promises/test_\w+\.py)::(\w+)", test)
            file = ROOT / "tests" / match[1] if match else ROOT
            if not file.is_file() or f"def {match[2]}(" not in file.read_text():
                wrong.append((mutation.name, test))
    assert not wrong
    assert all(mutation.tests for mutation in MUTATIONS)


def test_the_page_lists_what_is_tried() -> None:
    assert PAGE.read_text() == page(), "run python tests/mutations/run.py --write"


def test_mutations_have_names_of_their_own() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


TEXT = """class Sum:
    def é(self):  # é has two bytes, and columns count bytes.
        return "é", f(a,
                      b)  # Not on a line of its own.

    def add(self):
        return f(a, b), f(b, a)
"""


def test_code_is_found_in_its_function_however_it_is_written() -> None:
    assert 'return "é", (b)  # Not' in changed(TEXT, "sum.py:Sum.é", "f(a, b) => b")
    assert "return (b - (f(a, b))), f(b" in changed(TEXT, "sum.py:Sum.add", "f(a, b) => b - ...")
    statements = """
        return f(a, b), f(b, a)
        =>
        if a:
            b += 1
        ...
    """
    lines = "        if a:\n            b += 1\n        return f(a, b), f(b, a)\n"
    assert TEXT.replace("        return f(a, b), f(b, a)\n", lines) == changed(
        TEXT, "sum.py", statements
    )


@pytest.mark.parametrize(
    ("place", "code", "said"),
    [
        ("sum.py:Sum.add", "f(a, a) => b", r"'f\(a, a\)' 0 times, not once: in lines \[\]"),
        ("sum.py", "f(a, b) => b", r"'f\(a, b\)' 2 times, not once: in lines \[3, 7\]"),
        ("sum.py:Sum.added", "f(a, b) => b", "no 'added' in sum.py:Sum.added"),
    ],
)
def test_code_that_went_is_named(place: str, code: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        changed(TEXT, place, code)


def test_a_mutation_that_does_not_run_is_not_caught() -> None:
    mutation = Mutation("broken code", (), ("test_a.py::test_b",))
    passed = {"nothing": {"test_a.py::test_b": ["passed", "", ""]}}
    crashed = {"test_a.py::test_b": ["failed", "NameError Exception", "name 'x' is not defined"]}
    right = {"test_a.py::test_b": ["failed", "ReplicaInvarianceError AssertionError", "0.1"]}
    none = {"pytest": ["failed", "", "the process ended: Aborted"]}
    assert "not by an assertion" in survived(mutation, {**passed, "broken code": crashed})
    assert "not by an assertion" in survived(mutation, {**passed, "broken code": none})
    assert not survived(mutation, {**passed, "broken code": right})
    assert "passed although" in survived(mutation, {**passed, "broken code": passed["nothing"]})
