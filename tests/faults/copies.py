"""Runs programs in copies of a process that has imported TensorFlow: a start takes a second.

A copy is made before TensorFlow starts its devices. It runs a function of programs.py at the top of
a main module, so that it ends as a program of a user does.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Copy:
    """A process that runs a program.

    Attributes:
        pid: Its number.
        log: What it prints goes there.
    """

    def __init__(self, copies: Copies, pid: int, log: Path) -> None:
        """Takes the server that made it."""
        self.pid, self.log = pid, log
        self._copies = copies
        self._read = 0
        self._rest = b""

    @property
    def code(self) -> int | None:
        """The exit code, below zero for a signal; None while it runs."""
        return self._copies.code(self.pid)

    def lines(self) -> list[str]:
        """Returns the lines that were printed since the last call."""
        with self.log.open("rb") as file:
            file.seek(self._read)
            found = file.read()
        self._read += len(found)
        *whole, self._rest = (self._rest + found).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def send(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        if self.code is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Waits for its end, or until something is true; returns whether either came in time."""
        end = time.monotonic() + seconds
        while self.code is None and not until():
            if time.monotonic() > end:
                return False
            time.sleep(0.003)
        return True


class Copies:
    """A process that makes copies of itself; use it as a context."""

    def __init__(self) -> None:
        """Starts it."""
        self._codes: dict[int, int] = {}
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._rest = b""

    def __enter__(self) -> Copies:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it, and with it the copies."""
        self._server.kill()
        self._server.wait()

    def start(self, program: str, arguments: list[Any], log: Path, **more: str) -> Copy:
        """Starts a program; ``more`` are environment variables."""
        log.touch()
        command = {"program": program, "arguments": arguments, "log": str(log), "more": more}
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(command).encode() + b"\n")
        while True:
            for message in self._messages(None):
                if "started" in message:
                    return Copy(self, message["started"], log)

    def code(self, pid: int) -> int | None:
        """Returns how a copy ended; None while it runs."""
        self._messages(0.0)
        return self._codes.get(pid)

    def _messages(self, seconds: float | None) -> list[Mapping[str, int]]:
        found: list[Mapping[str, int]] = []
        assert self._server.stdout is not None
        while select.select([self._server.stdout], [], [], seconds)[0]:
            read = self._server.stdout.read(1 << 16)
            if not read:
                raise RuntimeError("The process that makes copies has ended.")
            *whole, self._rest = (self._rest + read).split(b"\n")
            found += [json.loads(line) for line in whole]
            seconds = 0.0
        for message in found:
            if "ended" in message:
                self._codes[message["ended"]] = message["code"]
        return found


def _serve() -> Callable[[], None]:
    """Makes copies until its input ends; returns in each copy, with what it shall run."""
    running: dict[int, int] = {}
    while True:
        ready = select.select([0, *running], [], [])[0]
        for pidfd in [one for one in ready if one]:
            pid = running.pop(pidfd)
            os.close(pidfd)
            _tell(ended=pid, code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if 0 in ready:
            line = sys.stdin.buffer.readline()
            if not line:
                sys.exit()
            command = json.loads(line)
            pid = os.fork()
            if not pid:
                for pidfd in running:
                    os.close(pidfd)
                return _prepare(command)
            running[os.pidfd_open(pid)] = pid
            _tell(started=pid)


def _prepare(command: Mapping[str, Any]) -> Callable[[], None]:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    null = os.open(os.devnull, os.O_RDONLY)
    for here, there in ((null, 0), (log, 1), (log, 2)):
        os.dup2(here, there)
    os.environ.update(command["more"])
    program = getattr(programs, command["program"], collectives)
    return lambda: program(*command["arguments"])


def _tell(**message: int) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    import programs
    from collectives import collectives

    _serve()()
