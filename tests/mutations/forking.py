"""Runs tests against several copies of the package, TensorFlow being imported only once.

Each copy is tried in a fork of this process, made before TensorFlow starts its devices. Jobs come
as JSON on standard input, ``[[name, folder of the package, [tests]], ...]``; outcomes go to the
file named in the first argument, ``{name: {test: [outcome, type of the error, its first line]}}``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FORKS = 2
LIMIT = 400.0  # Seconds for one job.


class Outcomes:
    """A pytest plugin that keeps how each test ended, and by which error."""

    def __init__(self) -> None:
        self.by_test: dict[str, list[str]] = {}

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        name = item.nodeid.removeprefix("tests/")
        if call.excinfo is not None:
            kinds = kinds_of(call.excinfo.value)
            lines = str(call.excinfo.value).strip().splitlines() or [""]
            self.by_test[name] = ["failed", " ".join(kinds), lines[0]]
        elif call.when == "call":
            self.by_test.setdefault(name, ["passed", "", ""])


def kinds_of(error: BaseException) -> list[str]:
    """Returns the names of the classes of an error, and of the errors that it groups."""
    names = [kind.__name__ for kind in type(error).__mro__]
    return names + [name for one in getattr(error, "exceptions", ()) for name in kinds_of(one)]


def run(package: str, tests: list[str], output: str) -> None:
    """Runs tests against one copy; in a fork."""
    import pytest

    sys.path.insert(0, package)
    os.environ["PYTHONPATH"] = package  # For the processes that tests start.
    import tfmultigpu

    assert tfmultigpu.__file__.startswith(package), tfmultigpu.__file__
    outcomes = Outcomes()
    names = [f"tests/{test}" for test in tests]
    code = pytest.main(["-q", "-p", "no:cacheprovider", *names], plugins=[outcomes])
    if code not in (0, 1):
        outcomes.by_test["pytest"] = ["failed", "", f"pytest ended with {code}"]
    Path(output).write_text(json.dumps(outcomes.by_test))


def fork(job: tuple[str, str, list[str]], output: str) -> int:
    """Starts a job and returns its process; what it prints goes beside its output."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with open(f"{output}.log", "wb") as log:  # noqa: PTH123
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        run(job[1], job[2], output)
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def main() -> None:
    """Runs all jobs, a few at a time."""
    import keras  # noqa: F401
    import pytest  # noqa: F401
    import tensorflow  # noqa: F401

    waiting = json.load(sys.stdin)
    found: dict[str, Any] = {}
    running: dict[int, tuple[str, str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < FORKS:
                job = waiting.pop(0)
                output = str(Path(folder) / str(len(waiting)))
                running[fork(job, output)] = job[0], output, time.monotonic() + LIMIT
            ended, _ = os.waitpid(-1, os.WNOHANG)
            for process, (name, output, until) in list(running.items()):
                if process == ended:
                    del running[process]
                    result = Path(output)
                    log = Path(f"{output}.log").read_text(errors="replace")[-2000:]
                    crash = {"pytest": ["failed", "", f"the process ended: {log}"]}
                    ends = json.loads(result.read_text()) if result.exists() else crash
                    found.setdefault(name, {}).update(ends)
                elif time.monotonic() > until:
                    os.kill(process, 9)
            if not ended:
                time.sleep(0.02)
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
