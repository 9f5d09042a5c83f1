"""The launcher: several workers of one program on this machine, restarted together.

Neither this module nor one that it imports imports TensorFlow, so the launcher starts at once.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfmultigpu.addons.workers.cluster import split_address
from tfmultigpu.addons.workers.processes import (
    Outcome,
    free_addresses,
    how_it_ended,
    run_together,
    worker_environment,
)
from tfmultigpu.arguments import check_count
from tfmultigpu.errors import ClusterError, DeviceNotFoundError

__all__ = ["add_arguments", "launch", "run"]

_GRACE = 30.0  # One may still write the checkpoint with which another one has ended.
_PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
_LINES = 5


def launch(
    script: str,
    arguments: Sequence[str] = (),
    *,
    workers: int = 2,
    devices_per_worker: int | None = None,
    restarts: int = 0,
    module: bool = False,
) -> int:
    """Runs a program as several workers on this machine.

    Each worker finds the others by ``TF_CONFIG``, on free ports. The launcher passes on the output
    of the workers with their number in front, and signals to all of them. When one fails, it names
    it, stops the rest, and starts all again up to ``restarts`` times.

    Args:
        script: The path of a Python script, or the name of a module.
        arguments: The command line of the script.
        workers: The number of workers.
        devices_per_worker: The number of GPUs of each worker, which no other worker sees; 0 for the
            CPU; None to divide all GPUs evenly, or to use the CPU if there are none.
        restarts: How often all workers are restarted after a failure. Each worker finds the number
            of the attempt, from 0, in the variable ``TFMULTIGPU_ATTEMPT``.
        module: Whether ``script`` is the name of a module.

    Returns:
        The exit code: 0; that of the first worker that failed in the last attempt, 128 plus the
        number of the signal that ended it; or 1 if all succeeded and never joined each other.

    Raises:
        ClusterError: The script does not exist.
        DeviceNotFoundError: There are fewer GPUs than asked for.
        TypeError: A count is not a whole number.
        ValueError: A count is too small.

    Example:
        >>> import pathlib, tempfile
        >>> script = pathlib.Path(tempfile.mkdtemp(), "train.py")
        >>> _ = script.write_text("import os; assert os.environ['TFMULTIGPU_ATTEMPT'] == '0'")
        >>> launch(str(script), workers=1, devices_per_worker=0)
        0
    """
    check_count("workers", workers, error=ClusterError)
    check_count("restarts", restarts, 0, error=ClusterError)
    if not module and not Path(script).is_file():
        raise ClusterError(
            f"There is no such script. Received: {script!r}, in {Path.cwd()}. Write the path of a "
            "Python script, or -m and the name of a module."
        )
    devices = _devices_of_workers(workers, devices_per_worker)
    command = [sys.executable, "-u", *(["-m"] if module else []), script, *arguments]
    code = 0
    with _signals_in_a_queue() as signals:
        for attempt in range(restarts + 1):
            addresses = free_addresses(workers)
            own = {
                "TFMULTIGPU_JOB_ID": f"launch {secrets.token_hex(4)}",
                "TFMULTIGPU_ATTEMPT": f"{attempt}",
            }
            environments = [
                {**worker_environment(addresses, i, os.environ), **devices[i], **own}
                for i in range(workers)
            ]
            output = _Output(workers, signals)
            meeting = _Meeting(addresses)
            outcome = run_together(
                [command] * workers,
                environments,
                output.pass_on,
                grace=_GRACE,
                signals=signals,
                on_poll=meeting.look,
            )
            code = _exit_code(outcome, output, meeting)
            if not outcome.failed or outcome.signal is not None:
                break
            if attempt < restarts:
                _say(f"Starting all workers again: restart {attempt + 1} of {restarts}.")
    return code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command line of ``python -m tfmultigpu launch``."""
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="how many; default: 2")
    text = "GPUs of each worker; 0: the CPU; default: all GPUs, evenly"
    parser.add_argument("--devices-per-worker", type=int, metavar="K", help=text)
    text = "how often all start again after a failure; default: 0"
    parser.add_argument("--restarts", type=int, default=0, metavar="R", help=text)
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT names a module")
    parser.add_argument("script", metavar="SCRIPT", help="a Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its command line")


def run(options: argparse.Namespace) -> int:
    """Launches the program of a command line; returns the exit code."""
    return launch(
        options.script,
        options.arguments,
        workers=options.workers,
        devices_per_worker=options.devices_per_worker,
        restarts=options.restarts,
        module=options.module,
    )


class _Output:
    """Passes on the output of the workers, and keeps the last lines of each."""

    def __init__(self, workers: int, signals: queue.SimpleQueue[int]) -> None:
        self.last = [collections.deque[str](maxlen=200) for _ in range(workers)]
        self._width = len(str(workers - 1))
        self._lock = threading.Lock()
        self._signals = signals
        self._lost = False

    def pass_on(self, worker: int, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\n")
        self.last[worker].append(text)
        with self._lock:
            if self._lost:  # The workers are read still: they would hang in `print`.
                return
            try:
                sys.stdout.write(f"[{worker:{self._width}}] {text}\n")
                sys.stdout.flush()
            except (OSError, ValueError) as error:
                self._lost = True
                _say(f"The output of the workers cannot be passed on ({error}): all must end.")
                self._signals.put(signal.SIGTERM)

    def end_of(self, worker: int) -> list[str]:
        """Returns the lines that say why a worker failed: its error, or its last lines."""
        lines = list(self.last[worker])
        starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent ")]
        after = range(starts[-1] + 1 if starts else len(lines), len(lines))
        begin = next((i for i in after if not lines[i].startswith((" ", "\t"))), -_LINES)
        return lines[begin:][:_LINES]


class _Meeting:
    """Notices whether a worker has ever listened for others, as all that join a cluster do."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.seen = len(addresses) == 1
        self._place = split_address(addresses[0])

    def look(self) -> None:
        if self.seen:
            return
        try:
            # From another address: the system could lend the caller the very port that it calls.
            socket.create_connection(self._place, 0.5, ("127.0.0.2", 0)).close()
        except (ConnectionError, TimeoutError):
            return
        except OSError:  # A system without that address: nobody can tell.
            pass
        self.seen = True


def _exit_code(outcome: Outcome, output: _Output, meeting: _Meeting) -> int:
    """Says how the workers ended; returns the exit code."""
    workers = len(outcome.codes)
    if outcome.signal is not None:
        name = signal.Signals(outcome.signal).name
        stopped = [str(i) for i, code in enumerate(outcome.codes) if code is None]
        more = f"; stopped 30 s later: worker {', '.join(stopped)}" if stopped else ""
        _say(f"Interrupted: {name} was passed on to all workers{more}.")
        return 128 + outcome.signal if stopped or outcome.failed else 0
    if outcome.failed:
        # One that names another as lost is not the first, whichever ended sooner.
        blamed = [i for i in outcome.failed if "WorkerLostError" not in "".join(output.last[i])]
        first = (blamed or outcome.failed)[0]
        code = outcome.codes[first] or 1
        _say(
            f"Worker {first} of {workers} {how_it_ended(code)}, the first to fail"
            f"{'; the others were stopped' if None in outcome.codes else ''}. Its output ends with:"
        )
        for line in output.end_of(first):
            _say(f"  {line}")
        return code if code > 0 else 128 - code
    if not meeting.seen:
        _say(
            f"The {workers} workers never joined each other: each ran the whole program, and "
            f"trained a model of its own if it trained. Write strategy = tmg.create_strategy() "
            "directly after the imports, and build the model in strategy.scope(). For a program "
            "that one process shall run: --workers 1."
        )
        return 1
    return 0


def _devices_of_workers(workers: int, each: int | None) -> list[dict[str, str]]:
    """Returns ``CUDA_VISIBLE_DEVICES`` of each worker: no two see the same GPU."""
    if each is not None:
        check_count("devices_per_worker", each, 0, error=ClusterError)
    gpus = [] if each == 0 else _gpus()
    share = len(gpus) // workers
    if (each is None and gpus and not share) or (each or 0) > share:
        raise DeviceNotFoundError(
            f"{workers} workers with {each or 1} GPUs each need {workers * (each or 1)}, and there "
            f"are {len(gpus)}. Write --devices-per-worker {share}; 0 uses the CPU."
        )
    if not gpus:
        # On a machine without GPUs the variable would only be blamed for that.
        hidden = {"CUDA_VISIBLE_DEVICES": "-1"} if shutil.which("nvidia-smi") else {}
        return [hidden] * workers
    count = share if each is None else each
    parts = [gpus[i * count : (i + 1) * count] for i in range(workers)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]


def _gpus() -> list[str]:
    """Returns the GPUs that CUDA would show, as ``CUDA_VISIBLE_DEVICES`` writes them."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        # CUDA stops at the first entry that is not a GPU.
        names = shown.split(",")
        wrong = [i for i, name in enumerate(names) if name in ("", "-1")]
        return names[: wrong[0]] if wrong else names
    ask = shutil.which("nvidia-smi")
    listed = (
        subprocess.run([ask, "-L"], capture_output=True, text=True, check=False) if ask else None
    )
    lines = [] if listed is None else listed.stdout.splitlines()
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in lines))]


@contextlib.contextmanager
def _signals_in_a_queue() -> Iterator[queue.SimpleQueue[int]]:
    """Collects signals to pass on, in the main thread only."""
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    names = _PASSED_ON if threading.current_thread() is threading.main_thread() else ()
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {n: signal.signal(n, lambda received, _: signals.put(received)) for n in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # Nobody reads standard error either.
        sys.stderr.write(f"[launch] {text}\n")
        sys.stderr.flush()
