"""The mutations fit the source and the tests. ``nox -s mutations`` tries them, in minutes."""

from __future__ import annotations

import ast
import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutating import PAGE, page, survived
from mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_text_that_a_mutation_changes_is_there(mutation: Mutation, tmp_path: Path) -> None:
    copy = shutil.copy(ROOT / "src" / "tfmultigpu" / mutation.file, tmp_path)
    before = Path(copy).read_text()
    dataclasses.replace(mutation, file=Path(copy).name).apply(tmp_path)
    ast.parse(Path(copy).read_text())
    assert Path(copy).read_text() != before
    for test in mutation.tests:
        file, name = re.match(r"([^:]+)::(\w+)", test).groups()
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{test} is gone"


def test_the_cases_that_are_to_notice_are_there() -> None:
    """By their ids, which change with what a test is parametrized by."""
    cases = sorted({str(ROOT / "tests" / test) for one in MUTATIONS for test in one.tests})
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *cases],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_page_lists_what_is_tried() -> None:
    assert PAGE.read_text() == page(), "run python tests/mutations/run.py --write"


def test_mutations_have_names_of_their_own() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_a_text_that_went_is_named(tmp_path) -> None:
    (tmp_path / "steps.py").write_text("old = 1\nold = 1\n")
    mutation = Mutation("nothing is broken", "steps.py", (("old = 1\n", ""),), ())
    with pytest.raises(AssertionError, match=r"stands 2 times in steps\.py, not once"):
        mutation.apply(tmp_path)


def test_a_mutation_that_does_not_run_is_not_caught() -> None:
    mutation = Mutation("broken code", "steps.py", (), ("test_a.py::test_b",))
    passed = {"nothing": {"test_a.py::test_b": ["passed", "", ""]}}
    crashed = {"test_a.py::test_b": ["failed", "NameError Exception", "name 'x' is not defined"]}
    right = {"test_a.py::test_b": ["failed", "ReplicaInvarianceError AssertionError", "0.1"]}
    none = {"pytest": ["failed", "", "the process ended: Aborted"]}
    assert "not by an assertion" in survived(mutation, {**passed, "broken code": crashed})
    assert "not by an assertion" in survived(mutation, {**passed, "broken code": none})
    assert not survived(mutation, {**passed, "broken code": right})
    assert "passed although" in survived(mutation, {**passed, "broken code": passed["nothing"]})
