"""The launcher: several workers of one program on this machine, restarted together.

Neither this module nor one that it imports imports TensorFlow, so the launcher starts at once.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfmultigpu.addons.workers.channels import connect
from tfmultigpu.addons.workers.ends import JOINED, has_lost_another
from tfmultigpu.addons.workers.processes import (
    Outcome,
    free_addresses,
    how_it_ended,
    run_together,
    worker_environment,
)
from tfmultigpu.arguments import check_count, check_positive
from tfmultigpu.errors import ClusterError, DeviceNotFoundError

_PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
_LINES = 5


def launch(
    script: str,
    arguments: Sequence[str] = (),
    *,
    workers: int | str = 2,
    restarts: int = 0,
    module: bool = False,
    grace: float = 30.0,
    signal_grace: float = 30.0,
    watch: float = 300.0,
) -> int:
    """Runs a program as several workers on this machine.

    ``workers`` is a number, or ``"1:4"`` or ``"1,2,4"``: the numbers that fit, of which the largest
    starts. The start after a failure, and only this one, leaves out the workers that were lost,
    with their GPUs: it takes the largest number that fits of the others.

    After the first failure the others have ``grace`` seconds: one may still write the checkpoint
    with which another one has ended. After a signal all have ``signal_grace`` seconds. Each is
    watched, see ``tmg.watch``, which reports what takes ``watch`` seconds; 0: none is.
    """
    numbers = _numbers_that_fit(workers)
    most = numbers[-1]
    restarts = check_count("restarts", restarts, 0, error=ClusterError)
    if not module and not Path(script).is_file():
        raise ClusterError(
            "There is no such script.",
            f"{script!r}, in {Path.cwd()}",
            "Write the path of a Python script, or -m and the name of a module.",
        )
    environ, gpus = dict(os.environ), _gpus_of_workers(most)
    if watch:  # ``create_strategy`` begins it.
        seconds = check_positive("watch", watch, "Write --watch 300, or --watch 0 for none.")
        environ["TFMULTIGPU_WATCH"] = f"{seconds:g}"
    command = [sys.executable, "-u", *(["-m"] if module else []), script, *arguments]
    code, slots = 0, list(range(most))  # A worker has the GPUs of its slot.
    with _signals_in_a_queue() as signals, tempfile.TemporaryDirectory() as folder:
        for attempt in range(restarts + 1):
            joined = Path(folder, f"{attempt}")  # ``create_strategy`` makes the file.
            environ["TFMULTIGPU_JOB_ID"] = environ[JOINED] = str(joined)
            environ["TFMULTIGPU_ATTEMPT"] = f"{attempt}"
            addresses = free_addresses(len(slots))
            run = _Run(addresses, signals)
            outcome = run_together(
                [command] * len(slots),
                [
                    {**worker_environment(addresses, worker, environ), **gpus[slot]}
                    for worker, slot in enumerate(slots)
                ],
                run.pass_on,
                grace=grace,
                signal_grace=signal_grace,
                signals=signals,
                on_poll=run.look_for_a_server,
            )
            code = run.exit_code(outcome, joined)
            if not outcome.failed or outcome.signal is not None:
                break
            if attempt < restarts:
                again = "Starting all workers again"
                if len(numbers) > 1:
                    lost = _lost_workers(outcome, joined)
                    slots = _slots_without({slots[worker] for worker in lost}, numbers)
                    again = f"Starting again with {len(slots)} of {most} workers"
                    if lost:
                        again = f"Lost: worker {', '.join(map(str, lost))}. {again}"
                _say(f"{again}: restart {attempt + 1} of {restarts}.")
    return code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command line of ``python -m tfmultigpu launch``."""
    add = parser.add_argument
    text = "how many; MIN:MAX or 1,2,4: after a loss the largest number that fits; default: 2"
    add("--workers", default="2", metavar="N", help=text)
    text = "how often all start again after a failure; default: 0"
    add("--restarts", type=int, default=0, metavar="R", help=text)
    text = "say what workers wait for, if nothing ends for so long; 0: never; default: 300"
    add("--watch", type=float, default=300.0, metavar="SECONDS", help=text)
    add("-m", dest="module", action="store_true", help="SCRIPT names a module")
    add("script", metavar="SCRIPT", help="a Python script")
    add("arguments", nargs=argparse.REMAINDER, help="its command line")


def run(options: argparse.Namespace) -> int:
    """Launches the program of a command line; returns the exit code."""
    return launch(**{name: value for name, value in vars(options).items() if name != "run"})


class _Run:
    """One attempt: the last lines of each worker, and whether a server of TensorFlow was seen."""

    def __init__(self, addresses: Sequence[str], signals: queue.SimpleQueue[int]) -> None:
        self._first, self._workers = addresses[0], len(addresses)
        self._last = [collections.deque[str](maxlen=_LINES) for _ in addresses]
        self._lock, self._signals = threading.Lock(), signals
        self._unread = False
        self._served = self._workers == 1

    def pass_on(self, worker: int, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\n")
        self._last[worker].append(text)
        with self._lock:
            if self._unread:  # The workers are read still: they would hang in `print`.
                return
            try:
                print(f"[{worker:{len(str(self._workers - 1))}}] {text}", flush=True)
            except (OSError, ValueError) as error:
                self._unread = True
                _say(f"The output of the workers cannot be passed on ({error}): all must end.")
                self._signals.put(signal.SIGTERM)

    def look_for_a_server(self) -> None:
        """Notes a program that joins by a strategy of TensorFlow: its server stays to the end."""
        if not self._served:
            with contextlib.suppress(OSError):
                connect(self._first).close()
                self._served = True

    def exit_code(self, outcome: Outcome, joined: Path) -> int:
        """Says how the workers ended; returns the exit code."""
        if outcome.signal is not None:
            name = signal.Signals(outcome.signal).name
            stopped = _workers_with(None, outcome)
            more = ""
            if stopped:
                more = f"; stopped by force: worker {', '.join(stopped)}"
            _say(f"Interrupted: {name} was passed on to all workers{more}.")
            if stopped or outcome.failed:
                return 128 + outcome.signal
            return 0
        if outcome.failed:
            # One that has lost another is not the first, whichever ended sooner.
            first = outcome.failed[0]
            for worker in outcome.failed:
                if not has_lost_another(joined, worker):
                    first = worker
                    break
            code = outcome.codes[first] or 1
            end = "".join(f"\n  {line}" for line in self._last[first])
            done = _workers_with(0, outcome)
            others = "all others were stopped"
            if done:
                others = f"worker {', '.join(done)} had nothing left to do and ended with code 0"
            how = f"{how_it_ended(code)}, the first to fail; {others}"
            _say(f"Worker {first} of {self._workers} {how}. Its output ends with:{end}")
            if code < 0:  # A signal, as a shell says it.
                return 128 - code
            return code
        is_joined = self._served or joined.exists()
        if not is_joined:
            _say(
                f"The {self._workers} workers never joined each other: each trained a model of its "
                "own, if it trained. Write strategy = tmg.create_strategy() directly after the "
                "imports, and build the model in strategy.scope(). A program for one process: "
                "--workers 1."
            )
        return int(not is_joined)


def _workers_with(code: int | None, outcome: Outcome) -> list[str]:
    """Returns the workers that ended with an exit code; with None those that were stopped."""
    return [str(worker) for worker, other in enumerate(outcome.codes) if other == code]


def _numbers_that_fit(workers: int | str) -> list[int]:
    """Returns the numbers of workers that may start, the largest last."""
    if not isinstance(workers, str):
        return [check_count("workers", workers, error=ClusterError)]
    numbers: list[int] = []
    if bounds := re.fullmatch(r"(\d+):(\d+)", workers):
        numbers += range(int(bounds[1]), int(bounds[2]) + 1)
    elif re.fullmatch(r"-?\d+(,\d+)*", workers):
        numbers += sorted(map(int, workers.split(",")))
    if not numbers:
        raise ClusterError(
            "Workers are a number, the smallest and the largest number, or all that fit.",
            f"--workers {workers}",
            "Write --workers 4, --workers 1:4, or --workers 1,2,4.",
        )
    numbers[0] = check_count("workers", numbers[0], error=ClusterError)
    return numbers


def _lost_workers(outcome: Outcome, joined: Path) -> list[int]:
    """Returns the workers that a signal ended, or if all that failed lost another, who stayed."""
    first = [worker for worker in outcome.failed if not has_lost_another(joined, worker)]
    if first:
        return sorted(worker for worker in first if (outcome.codes[worker] or 0) < 0)
    return [worker for worker, code in enumerate(outcome.codes) if code is None]


def _slots_without(lost: set[int], numbers: Sequence[int]) -> list[int]:
    """Returns the slots of the next start; fewer than the smallest number are filled up."""
    others = sorted(set(range(numbers[-1])) - lost)
    count = numbers[0]
    for number in numbers:
        if number <= len(others):
            count = number
    return sorted([*others, *sorted(lost)][:count])


def _gpus_of_workers(workers: int) -> list[dict[str, str]]:
    """Returns ``CUDA_VISIBLE_DEVICES`` of each worker: all GPUs, evenly, each of them once."""
    shown, ask = os.environ.get("CUDA_VISIBLE_DEVICES"), shutil.which("nvidia-smi")
    gpus: list[str] = []
    if shown is not None:  # CUDA stops at the first entry that is not a GPU.
        gpus += itertools.takewhile(lambda name: name not in ("", "-1"), shown.split(","))
    elif ask is not None:
        listing = subprocess.run([ask, "-L"], capture_output=True, text=True, check=False).stdout
        gpus += [str(i) for i in range(len(re.findall("^GPU ", listing, re.MULTILINE)))]
    share = len(gpus) // workers
    if gpus and not share:
        raise DeviceNotFoundError(
            f"{workers} workers need a GPU each, and there are {len(gpus)}.",
            "",
            f"Write --workers {len(gpus)}; or set CUDA_VISIBLE_DEVICES=-1, and all train on the "
            "CPU.",
        )
    environments = []
    for worker in range(workers):
        part = gpus[worker * share : (worker + 1) * share]
        environment = {}
        if part:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(part)
        environments.append(environment)
    return environments


@contextlib.contextmanager
def _signals_in_a_queue() -> Iterator[queue.SimpleQueue[int]]:
    """Collects signals to pass on, in the main thread only."""
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in _PASSED_ON:
            number = getattr(signal, name, None)
            if number is not None:
                before[number] = signal.signal(number, lambda received, _: signals.put(received))
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # Nobody reads standard error either.
        print(f"[launch] {text}", file=sys.stderr, flush=True)
