"""Processes for tests: forks of one process that has imported TensorFlow, a start in a second.

The fork server of Python is that process, one for each process of pytest. A worker keeps running
until it is told to end, and calls functions that tests name; they are found by import.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

SECONDS = 120.0  # A limit for what hangs, far above what anything takes.
# TensorFlow switches oneDNN on by the kind of CPU, and errors differ with it.
_SETTINGS = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_ENABLE_ONEDNN_OPTS": "1",
}
_processes = multiprocessing.get_context("forkserver")
_lock = threading.Lock()  # Whether a process has ended is read from a pipe, and only once.


class WorkerRaised(Exception):
    """A function raised in a worker.

    Attributes:
        kinds: The names of the classes of the error, the most special one first.
        text: Its traceback.
    """

    def __init__(self, kinds: Sequence[str], text: str) -> None:
        super().__init__(text)
        self.kinds, self.text = tuple(kinds), text


class Worker:
    """A process that calls functions, one after the other.

    Attributes:
        log: What it prints goes there.
    """

    def __init__(self, log: Path, environment: dict[str, str]) -> None:
        self.log = log
        self._connection, theirs = _processes.Pipe()
        arguments: Any = (theirs, str(log), environment)
        self._process = _processes.Process(target=_be_worker, args=arguments)
        with _lock:
            self._process.start()
        theirs.close()

    @property
    def code(self) -> int | None:
        """The exit code, below zero for a signal; None while it runs."""
        with _lock:
            return self._process.exitcode

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Starts a call; ``result`` waits for it."""
        self._connection.send((function, arguments))

    def result(self, seconds: float = SECONDS) -> Any:
        """Returns what the call returned.

        Raises:
            AssertionError: It raised one.
            WorkerRaised: It raised something else, or the process ended.
        """
        end = time.monotonic() + seconds
        while not self._connection.poll(0.05):
            if self.code is not None and not self._connection.poll(0.0):
                raise WorkerRaised([f"exit code {self.code}"], self.printed())
            if time.monotonic() > end:  # A later call would get this one's result.
                self.send_signal(signal.SIGABRT)
                self.wait()
                raise AssertionError(f"no result in {seconds} s: {self.printed()}")
        try:
            kind, *values = self._connection.recv()
        except EOFError:
            raise WorkerRaised([f"exit code {self.wait()}"], self.printed()) from None
        if kind == "raised":
            kinds, text = values
            assert "AssertionError" not in kinds, text
            raise WorkerRaised(kinds, text)
        return values[0]

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function there and returns its result."""
        self.begin(function, *arguments)
        return self.result()

    def send_signal(self, number: int) -> None:
        if self.code is None:
            os.kill(int(self._process.pid or 0), number)

    def end(self) -> None:
        """Lets it end as a program does that has nothing left to do."""
        with contextlib.suppress(OSError):
            self._connection.send(None)

    def wait(self, seconds: float = SECONDS) -> int:
        """Waits for its end and returns the exit code."""
        end = time.monotonic() + seconds
        while self.code is None:
            assert time.monotonic() < end, f"still running after {seconds} s: {self.printed()}"
            time.sleep(0.01)
        return self.code

    def printed(self) -> str:
        return self.log.read_text(errors="replace")[-20_000:]


class Pool:
    """A process that has imported TensorFlow and makes forks of itself."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pool-"))
        self._workers: list[Worker] = []
        _processes.set_forkserver_preload(["numpy", "tensorflow", "keras"])
        with mock.patch.dict(os.environ, _SETTINGS):
            forkserver.ensure_running()
        atexit.register(self.close)

    def start(self, **environment: str) -> Worker:
        """Makes a process with these environment variables."""
        log = self._folder / f"{time.monotonic_ns()}.log"
        log.touch()
        self._workers.append(Worker(log, environment))
        return self._workers[-1]

    def cluster(self, workers: int = 2, **environment: str) -> list[Worker]:
        """Makes processes whose TF_CONFIG names one another; they have not joined yet."""
        addresses = unused_addresses(workers)
        return [
            self.start(TF_CONFIG=tf_config(addresses, index), **environment)
            for index in range(workers)
        ]

    def close(self) -> None:
        """Ends all of them."""
        for worker in self._workers:
            worker.send_signal(signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)


pool = functools.cache(Pool)


def call_all(
    workers: Sequence[Worker],
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float = SECONDS,
) -> list[Any]:
    """Calls a function on all workers at once; returns their results once all have answered."""
    for worker in workers:
        worker.begin(function, *arguments)
    results: list[Any] = []
    errors: list[Exception] = []
    for worker in workers:
        try:
            results.append(worker.result(seconds))
        except (AssertionError, WorkerRaised) as error:
            errors.append(error)
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"Another worker: {other}")
        raise errors[0]
    return results


def wait_until_printed(word: str, *workers: Worker) -> None:
    end = time.monotonic() + SECONDS
    while not all(word in worker.printed() for worker in workers):
        given_up = time.monotonic() > end or any(worker.code is not None for worker in workers)
        assert not given_up, [worker.printed() for worker in workers]
        time.sleep(0.05)


def run_program(file: Path, **environment: str) -> str:
    """Runs a program in its folder and a process of its own, in which no device has started.

    Returns:
        What it printed.

    Raises:
        AssertionError: It failed; the message is its traceback.
    """
    worker = pool().start(**environment)
    worker.begin(_run_file, file)
    try:
        worker.result(600.0)
    except WorkerRaised as error:
        raise AssertionError(error.text) from None
    worker.end()
    return worker.printed()


def _run_file(file: Path) -> None:
    os.chdir(file.parent)
    runpy.run_path(str(file), run_name="__main__")
    sys.stdout.flush()


def tf_config(addresses: Sequence[str], index: int) -> str:
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": task})


def unused_addresses(count: int) -> list[str]:
    """Returns addresses of this machine on ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def _be_worker(connection: Connection, log: str, environment: dict[str, str]) -> None:
    threading.Thread(target=_end_with_its_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for there in (1, 2):
        os.dup2(output, there)
    faulthandler.enable()  # SIGABRT prints the stacks of all threads.
    for name in ("TF_CONFIG", "PYTEST_XDIST_WORKER"):
        os.environ.pop(name, None)
    os.environ.update({"PYTHONPATH": os.pathsep.join(sys.path)} | environment)
    status = 1
    try:
        _answer(connection)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):  # Such as the goodbye of a worker.
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end_with_its_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _answer(connection: Connection) -> None:
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if request is None:
            return
        function, arguments = request
        try:
            answer: tuple[Any, ...] = "returned", function(*arguments)
        except (Exception, pytest.fail.Exception) as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            answer = "raised", kinds, traceback.format_exc()
            traceback.print_exc()
        connection.send(answer)
