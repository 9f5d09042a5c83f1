"""Tries the mutations, and writes the page that shows what catches them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mutations import MUTATIONS, ROOT, Mutation

PAGE = ROOT / "docs" / "mutations.md"
UNCHANGED = "nothing"
# By what a test must fail: an assertion, a warning or error with which the library itself says that
# something is wrong, or what a test says of an error that did not come. A mutation that cannot be
# imported or run proves nothing.
BY = {"AssertionError", "Failed", "TfMultiGpuError"}
BY |= {"ReplicaDependenceWarning", "StrategyFallbackWarning"}

HEAD = """# What the tests catch

<!-- Written by `python tests/mutations/run.py --write`; a test holds it to the code. -->

A test that cannot fail proves nothing. So each clause of [the law](law.md), and each promise of the
README, is broken on purpose in a copy of the source, one at a time. The promises in the second
column must then fail, all of them, by an assertion about what came out. Without the change they
pass. `nox -s mutations` does it. All of them are in `tests/promises/`, the proof that
the README's command runs.

| what is done wrong | promises that catch it |
|---|---|
"""


def outcomes(mutations: Sequence[Mutation] = MUTATIONS) -> dict[str, dict[str, list[str]]]:
    """Returns how the tests of each mutation ended, and those of all of them without any."""
    with tempfile.TemporaryDirectory() as folder:
        every = sorted({test for mutation in mutations for test in mutation.tests})
        unchanged = _copy(Path(folder) / "unchanged")
        half = len(every) // 2  # One half for each core.
        halves = [part for part in (every[:half], every[half:]) if part]
        jobs = [(UNCHANGED, unchanged, part) for part in halves]
        for number, mutation in enumerate(mutations):
            copy = _copy(Path(folder) / str(number))
            mutation.apply(Path(copy) / "tfmultigpu")
            jobs.append((mutation.name, copy, list(mutation.tests)))
        return _run(jobs)


def _run(jobs: Sequence[tuple[str, str, list[str]]]) -> dict[str, dict[str, list[str]]]:
    """Runs tests on copies of the package, in forks; returns how each ended, by job."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "outcomes"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        forking = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("forking.py")), str(output)],
            input=json.dumps(jobs),
            cwd=ROOT,
            env={**environment, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
            capture_output=True,
            text=True,
            timeout=3600,
            check=False,
        )
        said = f"It ended with {forking.returncode}: {forking.stderr[-4000:]}"
        assert forking.returncode == 0, said
        return dict(json.loads(output.read_text()))


def survived(mutation: Mutation, found: dict[str, dict[str, list[str]]]) -> str:
    """Returns what went wrong, in words: a test that did not catch the mutation; or nothing."""
    wrong = [
        f"{test} does not pass on the source as it is: {outcome}"
        for test, outcome in found[UNCHANGED].items()
        if test in (*mutation.tests, "pytest") and outcome[0] != "passed"
    ]
    of_tests = found[mutation.name]
    for test in mutation.tests:
        outcome, kinds, line = of_tests.get(test, of_tests.get("pytest", ("did not run", "", "")))
        if outcome != "failed":
            wrong.append(f"{test} {outcome} although {mutation.name}")
        elif not BY & set(kinds.split()):
            wrong.append(f"{test} failed by {kinds.split()[:1]} and not by an assertion: {line}")
    return "\n".join(wrong)


def page(mutations: Sequence[Mutation] = MUTATIONS) -> str:
    """Returns the page that lists the mutations and the tests that catch them."""
    rows = []
    for mutation in mutations:
        tests = "<br>".join(f"`{_readable(test)}`" for test in mutation.tests)
        rows.append(f"| {mutation.name} (`{mutation.file}`) | {tests} |\n")
    return HEAD + "".join(rows)


def _readable(test: str) -> str:
    return test.replace("|", "\\|")


def _copy(folder: Path) -> str:
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "tfmultigpu", folder / "tfmultigpu", ignore=ignore)
    return str(folder)
