"""Real worker processes on this machine, for tests of what runs on several workers."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

__all__ = ["WorkerFailedError", "WorkerResult", "run_workers"]

_TAIL = 4000
# What is left to the others once one worker has failed, in seconds: to say what they saw of it.
_GRACE = 5.0
_POLL = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ARE_PATHS = (str, os.PathLike)
# The parent's module search path goes along, so that a function is found where it was defined.
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
    """A worker process failed or did not end in time; the message has what it printed."""


@dataclasses.dataclass(frozen=True)
class WorkerResult:
    """What one worker left behind.

    Attributes:
        index: Its number.
        output: What it printed, standard output and standard error together.
        value: What the function returned; None for a script.
    """

    index: int
    output: str
    value: Any = None


def run_workers(
    target: Callable[..., Any] | str | os.PathLike[str],
    workers: int = 2,
    *,
    args: Sequence[Any] = (),
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> list[WorkerResult]:
    """Runs a function or a script in several worker processes that find each other.

    Each gets its own ``TF_CONFIG``, so that ``tmg.create_strategy()`` in it returns a strategy over
    all of them. They listen on the loopback address, on free ports, without a GPU.

    Args:
        target: A function of a module that can be imported, or the path of a Python script.
        workers: How many processes, at least 1; with 1 there is no cluster and no ``TF_CONFIG``.
        args: For a function its arguments, which must be picklable; for a script its command line.
        timeout: Seconds until all must have ended.
        environment: Further environment variables.

    Returns:
        One result for each worker, in order.

    Raises:
        WorkerFailedError: A worker failed, or did not end in time: an ``AssertionError`` that names
            the first to fail and has the end of what it printed. The others are stopped.
        ValueError: ``workers`` is less than 1, or the function cannot be found by its name.

    Example:
        >>> import os, tfmultigpu as tmg
        >>> results = tmg.testing.run_workers(os.getcwd, workers=1)
        >>> results[0].value == os.getcwd()
        True
    """
    if not isinstance(workers, int) or workers < 1:
        raise ValueError(f"There must be at least one worker. Received: workers={workers}.")
    with tempfile.TemporaryDirectory(prefix="tfmultigpu-workers-") as folder:
        return _run(target, workers, list(args), timeout, environment or {}, Path(folder))


def _run(
    target: Any,
    workers: int,
    args: list[Any],
    timeout: float,
    environment: Mapping[str, str],
    folder: Path,
) -> list[WorkerResult]:
    script = isinstance(target, _ARE_PATHS)
    if not script:
        _store_call(target, args, folder / "call")
    addresses = [f"127.0.0.1:{port}" for port in free_ports(workers)]
    outputs = [folder / f"output-{index}" for index in range(workers)]
    values = [folder / f"value-{index}" for index in range(workers)]
    with contextlib.ExitStack() as stack:
        processes = []
        for index in range(workers):
            if script:
                command = [sys.executable, os.fspath(target), *map(str, args)]
            else:
                command = [sys.executable, "-c", _CALL, str(folder / "call"), str(values[index])]
            own = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
            own.pop("TF_CONFIG", None)
            if workers > 1:
                task = {"type": "worker", "index": index}
                own["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
            output = stack.enter_context(outputs[index].open("wb"))
            processes.append(
                stack.enter_context(
                    _started(command, {**own, **environment}, stdout=output, stderr=output)
                )
            )
        failed, code = _wait(processes, timeout)
    texts = [output.read_text(errors="replace") for output in outputs]
    if failed is not None:
        what = _how(code, timeout)
        raise WorkerFailedError(
            f"Worker {failed} of {workers} {what}. The end of what it printed:\n"
            f"{texts[failed][-_TAIL:]}"
        )
    ended = [i for i, value in enumerate(values) if not script and not value.exists()]
    if ended:
        raise WorkerFailedError(
            f"Worker {ended[0]} of {workers} ended before its function returned. The end of what "
            f"it printed:\n{texts[ended[0]][-_TAIL:]}"
        )
    results = [None if script else pickle.loads(value.read_bytes()) for value in values]
    return [WorkerResult(i, texts[i], results[i]) for i in range(workers)]


@contextlib.contextmanager
def _started(
    command: list[str], environment: dict[str, str], **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, which is gone when the context ends."""
    process = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        **streams,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _die_with_parent() -> None:
    """Runs in the new process: no worker outlives a test that was killed itself."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _store_call(function: Any, args: list[Any], path: Path) -> None:
    module = getattr(function, "__module__", None)
    if module == "__main__" or "<" in getattr(function, "__qualname__", "<"):
        raise ValueError(
            "A worker is another process, which finds a function by the name of its module. "
            f"Received: {function!r}. Move it to the top level of a module that can be imported, "
            "or give run_workers the path of a script."
        )
    with path.open("wb") as file:
        pickle.dump(sys.path, file)
        file.write(pickled((function, args)))


def pickled(value: Any) -> bytes:
    """Returns what is sent to a worker.

    Raises:
        ValueError: A part of it cannot be sent to another process.
    """
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError, tf.errors.OpError) as error:
        raise ValueError(
            f"A worker is another process, and this cannot be sent to it: {error} Give functions "
            "from the top level of a module, and arrays or a function that makes the dataset."
        ) from error


def _wait(
    processes: list[subprocess.Popen[bytes]], timeout: float
) -> tuple[int | None, int | None]:
    """Waits for all; returns which failed first and its exit code, None where it never ended."""
    deadline = time.monotonic() + timeout
    failed: tuple[int, int] | None = None
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if failed is None and any(codes):
            failed = next((i, code) for i, code in enumerate(codes) if code)
            deadline = min(deadline, time.monotonic() + _GRACE)
        if None not in codes:
            break
        time.sleep(_POLL)
    else:
        if failed is None:
            return [process.poll() for process in processes].index(None), None
    return failed or (None, None)


def _how(code: int | None, timeout: float) -> str:
    if code is None:
        return f"did not end within {timeout:g} seconds and was stopped"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def free_ports(count: int) -> list[int]:
    """Returns ports nobody listens on, found by asking the system for them all at once."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
