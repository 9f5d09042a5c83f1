"""Worker processes on this machine: started together, ended together, none left behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tfmultigpu.addons.workers.sources import without_cluster

_POLL_SECONDS = 0.05
_READ_SECONDS = 2.0
_LONGEST_LINE = 1 << 16
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Outcome:
    """The way in which worker processes ended."""

    codes: tuple[int | None, ...]  # Negative for a signal; None if the process was stopped.
    failed: tuple[int, ...]  # The processes that failed, the first to fail first.
    signal: int | None  # The one that was passed on to all.


def run_together(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    on_line: Callable[[int, bytes], None],
    *,
    timeout: float = float("inf"),
    grace: float = 5.0,
    signal_grace: float = 30.0,
    signals: queue.SimpleQueue[int] | None = None,
    on_poll: Callable[[], None] = lambda: None,
) -> Outcome:
    """Runs one process for each command, and returns when all have ended.

    Each has its own process group, which is killed at the end; on Linux a process is killed also
    when this one dies.
    """
    signals, passed_on = signals or queue.SimpleQueue(), None
    failed: list[int] = []
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(_started(command, environments[index], partial(on_line, index)))
            for index, command in enumerate(commands)
        ]
        while True:
            codes = tuple(process.poll() for process in processes)
            now = time.monotonic()
            new = [i for i, code in enumerate(codes) if code and i not in failed]
            if new and not failed and passed_on is None:
                deadline = min(deadline, now + grace)
            failed += sorted(new, key=lambda i: codes[i] or 0)  # First those that were killed.
            if None not in codes or now >= deadline:
                return Outcome(codes, tuple(failed), passed_on)
            with contextlib.suppress(queue.Empty):
                received = signals.get_nowait()
                deadline = now if passed_on is not None else now + signal_grace
                passed_on = received
                for process in processes:
                    process.send_signal(received)
            on_poll()
            time.sleep(_POLL_SECONDS)


def worker_environment(
    addresses: Sequence[str], index: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables of a worker: the variables of ``environ``, and ``TF_CONFIG``."""
    variables = without_cluster(environ)
    if len(addresses) > 1:
        cluster, task = {"worker": [*addresses]}, {"type": "worker", "index": index}
        variables["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    return variables


def free_addresses(count: int) -> list[str]:
    """Returns loopback addresses on which nobody listens."""
    # All at once: the system could give a port twice that was closed in between.
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [f"127.0.0.1:{free.getsockname()[1]}" for free in sockets]


def how_it_ended(code: int) -> str:
    """Returns an exit code in words."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # A number without a name.
        return f"was ended by signal {-code}"


@contextlib.contextmanager
def _started(
    command: Sequence[str], environment: Mapping[str, str], on_line: Callable[[bytes], None]
) -> Iterator[subprocess.Popen[bytes]]:
    parent = os.getpid()

    def die_with_parent() -> None:  # Called in the new process.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    process = subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent if sys.platform == "linux" else None,
    )
    stream = process.stdout
    assert stream is not None

    def read() -> None:
        for line in iter(lambda: stream.readline(_LONGEST_LINE), b""):
            on_line(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(_READ_SECONDS)
        if not reader.is_alive():
            stream.close()
