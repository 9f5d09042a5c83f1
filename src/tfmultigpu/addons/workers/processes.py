"""Worker processes on this machine: started together, ended together, none left behind.

The parent knows which worker failed first. The others fail after it, and blame each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from tfmultigpu.addons.workers.sources import SOURCES

__all__ = ["Outcome", "free_addresses", "how_it_ended", "run_together", "worker_environment"]

_POLL = 0.02
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_READ_SECONDS = 2.0
# The bytes of a line without an end that are passed on at a time.
_LONGEST_LINE = 1 << 16
# Outside these workers they would describe another cluster than the one started here.
_VARIABLES = frozenset(name for source in SOURCES for name in source.variables)


@dataclass(frozen=True)
class Outcome:
    """The way in which worker processes ended.

    Attributes:
        codes: The exit code of each, negative for a signal; None if the process was stopped.
        first: The first process that failed; None if none did.
        signal: The signal that was passed on to all; None if there was none.
        timed_out: Whether the timeout came before all had ended or one had failed.
        failed_after_signal: Whether the first failed after the signal was passed on.
    """

    codes: tuple[int | None, ...]
    first: int | None
    signal: int | None = None
    timed_out: bool = False
    failed_after_signal: bool = False


def run_together(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    on_line: Callable[[int, bytes], None],
    *,
    timeout: float = float("inf"),
    grace: float = 5.0,
    patience: Mapping[int, float] | None = None,
    next_signal: Callable[[], int | None] = lambda: None,
    signal_grace: float = 30.0,
) -> Outcome:
    r"""Runs one process for each command, and returns when all have ended.

    Each process has its own process group. The group is killed at the end, and on Linux also when
    this process dies.

    Args:
        commands: The program and the arguments of each process.
        environments: All environment variables of each process.
        on_line: Called in threads with the number of a process and a line that it printed, or a
            piece of a line that is longer than 64 KiB.
        timeout: Seconds until all must have ended.
        grace: Seconds for the others after one has failed, in which they print their errors.
        patience: Another grace for some exit codes.
        next_signal: Returns a signal to pass on to all; None if there is none.
        signal_grace: Seconds to end after a signal; a second signal ends them at once.

    Returns:
        How they ended.

    Example:
        >>> import os, sys
        >>> lines = []
        >>> command = [sys.executable, "-c", "print(6 * 7)"]
        >>> run_together([command], [os.environ], lambda worker, line: lines.append(line)).codes
        (0,)
        >>> lines
        [b'42\n']
    """
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(_started(index, command, environment, on_line))
            for index, (command, environment) in enumerate(zip(commands, environments, strict=True))
        ]
        deadline = time.monotonic() + timeout
        first: int | None = None
        passed_on: int | None = None
        after_signal = False
        while True:
            codes = tuple(process.poll() for process in processes)
            now = time.monotonic()
            if first is None and any(codes):
                # A signal comes first: a process with an error may have failed because of it.
                first = min((code, i) for i, code in enumerate(codes) if code)[1]
                after_signal = passed_on is not None
                if not after_signal:
                    wait = (patience or {}).get(codes[first] or 0, grace)
                    deadline = min(deadline, now + wait)
            if None not in codes or now >= deadline:
                timed_out = None in codes and first is None and passed_on is None
                return Outcome(codes, first, passed_on, timed_out, after_signal)
            received = next_signal()
            if received is not None:
                deadline = now if passed_on is not None else now + signal_grace
                passed_on = received
                for process in processes:
                    process.send_signal(received)
            time.sleep(_POLL)


def worker_environment(
    addresses: Sequence[str], index: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables of a worker: those given, with ``TF_CONFIG`` for this cluster.

    Example:
        >>> worker_environment(["127.0.0.1:1"], 0, {"TF_CONFIG": "old", "HOME": "/root"})
        {'HOME': '/root'}
    """
    own = {name: value for name, value in environ.items() if name not in _VARIABLES}
    if len(addresses) > 1:
        task = {"type": "worker", "index": index}
        own["TF_CONFIG"] = json.dumps({"cluster": {"worker": list(addresses)}, "task": task})
    return own


def free_addresses(count: int) -> list[str]:
    """Returns loopback addresses on which nobody listens.

    Example:
        >>> len(set(free_addresses(3)))
        3
    """
    # All at once: the system could give a port twice that was closed in between.
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


def how_it_ended(code: int) -> str:
    """Returns an exit code in words.

    Example:
        >>> how_it_ended(-9), how_it_ended(3)
        ('was ended by SIGKILL', 'ended with code 3')
    """
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # A real-time signal has no name.
        return f"was ended by signal {-code}"


@contextlib.contextmanager
def _started(
    index: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    on_line: Callable[[int, bytes], None],
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a process in its own process group, and kills the group when the context ends."""
    parent = os.getpid()
    process = subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=(lambda: _die_with(parent)) if sys.platform == "linux" else None,
    )
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, index, on_line), daemon=True)
    reader.start()
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(_READ_SECONDS)
        if not reader.is_alive():
            process.stdout.close()


def _read(stream: IO[bytes], index: int, on_line: Callable[[int, bytes], None]) -> None:
    for line in iter(lambda: stream.readline(_LONGEST_LINE), b""):
        on_line(index, line)


def _die_with(parent: int) -> None:
    """Lets the new process, which calls this, end with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
