"""Tries the mutations, and writes the page that shows what catches them."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import forking
from law.processes import WorkerRaised, pool
from mutations import MUTATIONS, ROOT, Mutation

PAGE = ROOT / "docs" / "contributing" / "mutations.md"
UNCHANGED = "nothing"
LIMIT = 400.0  # Seconds for the tests of one mutation.
# By what a test must fail: an assertion, a warning or error with which the library itself says that
# something is wrong, or what a test says of an error that did not come. A mutation that cannot be
# imported or run proves nothing.
BY = {"AssertionError", "Failed", "TfMultiGpuError"}
BY |= {"ReplicaDependenceWarning", "StrategyFallbackWarning"}

HEAD = """# What the tests catch

<!-- Written by `python tests/mutations/run.py --write`; a test holds it to the code. -->

A test that cannot fail proves nothing. So each clause of [the law](../law.md), and each promise of
the README, is broken on purpose in a copy of the source, one at a time, in the function that the
first column names. The promises in the second column must then fail, all of them, by an assertion
about what came out. Without the change they pass. `nox -s mutations` does it. All of them are in
`tests/promises/`. The README's command runs them, and `nox -s full` runs them at further sizes.

| what is done wrong | promises that catch it |
|---|---|
"""


def outcomes(mutations: Sequence[Mutation] = MUTATIONS) -> dict[str, forking.Ends]:
    """Returns how the tests of each mutation ended, and those of all of them without any."""
    with tempfile.TemporaryDirectory() as folder:
        # In the order of their files: a test may train what those before it have looked at.
        every = sorted({test for mutation in mutations for test in mutation.tests}, key=_place)
        unchanged = _copy(Path(folder) / "unchanged")
        half = len(every) // 2  # One half for each core.
        jobs = [(UNCHANGED, unchanged, part) for part in (every[:half], every[half:]) if part]
        for number, mutation in enumerate(mutations):
            copy = _copy(Path(folder) / str(number))
            mutation.apply(Path(copy) / "tfmultigpu")
            jobs.append((mutation.name, copy, list(mutation.tests)))
        with ThreadPoolExecutor(2) as threads:
            ends = list(threads.map(lambda job: _run(*job[1:]), jobs))
    found: dict[str, forking.Ends] = {}
    for (name, *_), ended in zip(jobs, ends, strict=True):
        found.setdefault(name, {}).update(ended)
    return found


def _place(test: str) -> tuple[str, int]:
    file, _, name = test.partition("::")
    text = (ROOT / "tests" / file).read_text()
    return file, text.index(f"def {name.partition('[')[0]}(")


def _run(package: str, tests: list[str]) -> forking.Ends:
    """Returns how tests of a copy end; of ``pytest`` itself if its process does not."""
    worker = pool().start()
    worker.begin(forking.run, package, tests)
    try:
        return worker.result(LIMIT)
    except (AssertionError, WorkerRaised) as error:
        return {"pytest": ["failed", "", f"the process ended: {str(error)[-2000:]}"]}
    finally:
        worker.send_signal(signal.SIGKILL)


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
        tests = "<br>".join(f"`{test}`" for test in mutation.tests).replace("|", "\\|")
        places = ", ".join(f"`{place}`" for place, _ in mutation.changes)
        rows.append(f"| {mutation.name} ({places}) | {tests} |\n")
    return HEAD + "".join(rows)


def _copy(folder: Path) -> str:
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "tfmultigpu", folder / "tfmultigpu", ignore=ignore)
    return str(folder)
