"""Real worker processes on this machine, for tests of programs with several workers."""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfmultigpu.addons.workers.processes import (
    free_addresses,
    how_it_ended,
    run_together,
    worker_environment,
)
from tfmultigpu.arguments import brief, check_count
from tfmultigpu.types import Function

_TAIL = 4000
# Sets the parent's module search path, so that the worker can import the function.
_CALL = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    sys.path[:] = pickle.load(file)
    function, args = pickle.load(file)
value = function(*args)
with open(sys.argv[2], "wb") as file:
    pickle.dump(value, file)
"""


class WorkerFailedError(AssertionError):
    """A worker process failed or did not end in time; the message holds its last output."""


@dataclasses.dataclass(frozen=True)
class WorkerResult:
    """The result of one worker.

    Attributes:
        index: The index of the worker.
        output: Its standard output and standard error.
        value: The value that the function returned; None for a script.
    """

    index: int
    output: str
    value: Any = None


def run_workers(
    target: Function | str | os.PathLike[str],
    workers: int = 2,
    *,
    args: Sequence[object] = (),
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> list[WorkerResult]:
    """Runs a function or a script in several worker processes that form a cluster.

    Sets ``TF_CONFIG`` in each, so that ``tmg.create_strategy()`` returns a strategy over all. They
    see no GPU.

    Args:
        target: A function that can be imported, or the path of a Python script.
        workers: Number of processes, at least 1; a single one has no ``TF_CONFIG``.
        args: The arguments of a function, which must be picklable, or the command line of a script.
        timeout: Seconds until all must have ended.
        environment: Further environment variables.

    Returns:
        The result of each worker, in their order.

    Raises:
        WorkerFailedError: A worker failed or did not end in time; the others are stopped.
        ValueError: ``workers`` is below 1, or a worker cannot import the function.

    Example:
        >>> import os, tfmultigpu as tmg
        >>> results = tmg.testing.run_workers(os.getcwd, workers=1)
        >>> results[0].value == os.getcwd()
        True
    """
    workers = check_count("workers", workers)
    with tempfile.TemporaryDirectory(prefix="tfmultigpu-workers-") as folder:
        return _run(target, workers, list(args), timeout, environment or {}, Path(folder))


def _run(
    target: Function | str | os.PathLike[str],
    workers: int,
    args: list[object],
    timeout: float,
    environment: Mapping[str, str],
    folder: Path,
) -> list[WorkerResult]:
    values = [folder / f"value-{index}" for index in range(workers)]
    is_script = isinstance(target, (str, os.PathLike))
    if isinstance(target, (str, os.PathLike)):
        commands = [[sys.executable, os.fspath(target), *map(str, args)]] * workers
    else:
        _store_call(target, args, folder / "call")
        call = [sys.executable, "-c", _CALL, str(folder / "call")]
        commands = [[*call, str(value)] for value in values]
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    addresses = free_addresses(workers)
    environments: list[dict[str, str]] = []
    lines: list[list[bytes]] = []
    for index in range(workers):
        environments.append({**worker_environment(addresses, index, quiet), **environment})
        lines.append([])
    outcome = run_together(
        commands, environments, lambda i, line: lines[i].append(line), timeout=timeout
    )

    texts = [b"".join(printed).decode(errors="replace") for printed in lines]
    unended = [i for i, code in enumerate(outcome.codes) if code is None]
    early: list[int] = []
    if not is_script:
        early = [i for i, value in enumerate(values) if not value.exists()]
    for failed in [*outcome.failed, *unended, *early]:
        code = outcome.codes[failed]
        if code is None:
            end = f"did not end within {timeout:g} seconds and was stopped"
        elif code == 0:
            end = "ended before its function returned"
        else:
            end = how_it_ended(code)
        raise WorkerFailedError(
            f"Worker {failed} of {workers} {end}. Its last output:\n{texts[failed][-_TAIL:]}"
        )
    results = []
    for index, value in enumerate(values):
        returned = None if is_script else pickle.loads(value.read_bytes())
        results.append(WorkerResult(index, texts[index], returned))
    return results


def _store_call(function: Function, args: list[object], path: Path) -> None:
    try:
        if function.__module__ == "__main__":
            raise AttributeError("The worker has another __main__.")
        path.write_bytes(pickle.dumps(sys.path) + pickle.dumps((function, args)))
    except (pickle.PicklingError, AttributeError, TypeError, tf.errors.OpError) as error:
        raise ValueError(
            f"A worker process cannot be sent this. {error} Received: {brief(function)} and "
            f"{len(args)} arguments. Give a function from the top level of a module, not a script, "
            "and arrays or a function that makes the dataset; or the path of a script."
        ) from error
