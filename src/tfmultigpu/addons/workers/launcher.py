"""The launcher: several workers of one program on this machine, restarted together.

Neither this module nor one that it imports imports TensorFlow, so the launcher starts at once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfmultigpu.addons.workers.jobs import new_job
from tfmultigpu.addons.workers.output import WorkerOutput, cause
from tfmultigpu.addons.workers.processes import (
    Outcome,
    free_addresses,
    how_it_ended,
    run_together,
    worker_environment,
)
from tfmultigpu.arguments import check_count
from tfmultigpu.errors import ClusterError, DeviceNotFoundError

__all__ = ["ATTEMPT", "add_arguments", "launch", "run"]

ATTEMPT = "TFMULTIGPU_ATTEMPT"
_GRACE = 5.0
# A worker that ends so has saved a checkpoint on SIGTERM; another one may still write it.
_TERMINATED = 128 + signal.SIGTERM
_SIGNAL_GRACE = 30.0
_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia"), Path("/dev/dxg"))
_PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


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

    Each worker finds the others by ``TF_CONFIG``, on free ports of the loopback address. The
    launcher passes on the output of the workers with their number in front. When one fails, the
    launcher names it with its error, stops the rest, and starts all again up to
    ``restarts`` times. It passes signals on to all workers. No worker outlives this process, on
    Linux not even if it is ended with ``kill -9``.

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
        The exit code: 0, or that of the first worker that failed in the last attempt; 128 plus the
        number of the signal that ended it.

    Raises:
        ClusterError: The script does not exist.
        DeviceNotFoundError: There are fewer GPUs than asked for.
        TypeError: A count is not a whole number.
        ValueError: A count is too small.

    Example:
        >>> import pathlib, tempfile
        >>> script = pathlib.Path(tempfile.mkdtemp(), "train.py")
        >>> _ = script.write_text("import os; assert 'TF_CONFIG' in os.environ")
        >>> launch(str(script), workers=2, devices_per_worker=0)
        0
    """
    _check(script, workers, devices_per_worker, restarts, module)
    program = [sys.executable, "-u", *(["-m"] if module else []), script, *arguments]
    devices = _devices_of_workers(workers, devices_per_worker)
    output = _Output(workers)
    with _signals_in_a_queue() as next_signal:
        for attempt in range(restarts + 1):
            addresses, job = free_addresses(workers), new_job("launch")
            environments = [
                {
                    **worker_environment(addresses, i, os.environ),
                    **devices[i],
                    **job,
                    ATTEMPT: f"{attempt}",
                }
                for i in range(workers)
            ]
            outcome = run_together(
                [program] * workers,
                environments,
                output.pass_on,
                grace=_GRACE,
                patience={_TERMINATED: _SIGNAL_GRACE},
                next_signal=lambda: output.signal_to_pass_on(next_signal()),
                signal_grace=_SIGNAL_GRACE,
            )
            output.say_how(outcome, attempt, restarts)
            if outcome.first is None or outcome.signal is not None:
                break
    return _exit_code(outcome)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command line of ``python -m tfmultigpu launch``."""
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="how many; default: 2")
    parser.add_argument(
        "--devices-per-worker",
        type=int,
        metavar="K",
        help="GPUs of each worker; 0: the CPU; default: all GPUs, evenly",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="R",
        help="how often all start again after a failure; default: 0",
    )
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


class _Output(WorkerOutput):
    """The output of the workers, and what the launcher says about their ends."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._count = workers
        self._told = False

    def signal_to_pass_on(self, received: int | None) -> int | None:
        """Returns a signal for all workers: one that came, or SIGTERM if nobody reads."""
        if received is None and self.lost is not None and not self._told:
            self.say(f"The output of the workers cannot be passed on ({self.lost}): all must end.")
            received = signal.SIGTERM
        if received is not None:
            self._told = True  # A second signal would end them before they have saved.
            self.hurry()
        return received

    def say_how(self, outcome: Outcome, attempt: int, restarts: int) -> None:
        if outcome.first is None and outcome.signal is None:
            return
        if outcome.signal is not None:
            name = signal.Signals(outcome.signal).name
            left = [str(i) for i, code in enumerate(outcome.codes) if code is None]
            killed = (
                f"; stopped after {_SIGNAL_GRACE:g} s: worker {', '.join(left)}" if left else ""
            )
            self.say(f"Interrupted: {name} was passed on to all workers{killed}.")
        if outcome.first is not None and not _ended_as_asked(outcome):
            code = outcome.codes[outcome.first]
            assert code is not None
            more = "; the others were stopped" if self._count > 1 else ""
            self.say(
                f"Worker {outcome.first} of {self._count} {how_it_ended(code)}, the first to "
                f"fail{more}. Its output ends with:"
            )
            for line in cause(self.last(outcome.first)):
                self.say("  " + line)
            if outcome.signal is None and attempt < restarts:
                self.say(f"Starting all workers again: restart {attempt + 1} of {restarts}.")
        self.forget()


def _ended_as_asked(outcome: Outcome) -> bool:
    """Returns whether the first that failed ended by the signal that all received.

    After Ctrl-C others may fail because their peers have ended, before they hear of it themselves.
    """
    assert outcome.first is not None
    sent = outcome.signal
    if sent is None:
        return False
    if sent == signal.SIGINT and outcome.failed_after_signal:
        return True
    return outcome.codes[outcome.first] in (-sent, 128 + sent)


def _check(script: str, workers: int, each: int | None, restarts: int, module: bool) -> None:
    check_count("workers", workers, error=ClusterError)
    check_count("restarts", restarts, 0, error=ClusterError)
    if each is not None:
        check_count("devices_per_worker", each, 0, error=ClusterError)
    if not module and not Path(script).is_file():
        raise ClusterError(
            f"There is no such script. Received: {script!r}, in {Path.cwd()}. Write the path of a "
            "Python script, or -m and the name of a module."
        )


def _devices_of_workers(workers: int, each: int | None) -> list[Mapping[str, str]]:
    """Returns ``CUDA_VISIBLE_DEVICES`` of each worker: no two see the same GPU."""
    gpus = [] if each == 0 else _gpus()
    share = len(gpus) // workers
    if each is None and gpus and not share:
        raise DeviceNotFoundError(
            f"{workers} workers need a GPU each, and there are {len(gpus)}. Start fewer, "
            f"--workers {len(gpus)}, or let all run on the CPU: --devices-per-worker 0."
        )
    if each is not None and len(gpus) < workers * each:
        raise DeviceNotFoundError(
            f"{workers} workers with {each} GPUs each need {workers * each}, and there are "
            f"{len(gpus)}. Write --devices-per-worker {share}."
        )
    if not gpus:
        # Without a GPU the variable would only be blamed for that.
        hidden = {"CUDA_VISIBLE_DEVICES": "-1"} if _may_have_gpus() else {}
        return [hidden] * workers
    count = share if each is None else each
    own = [gpus[i * count : (i + 1) * count] for i in range(workers)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(some)} for some in own]


def _gpus() -> list[str]:
    """Returns the GPUs that CUDA would show, as ``CUDA_VISIBLE_DEVICES`` writes them."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        # CUDA stops at the first entry that is not a GPU.
        return list(itertools.takewhile(lambda one: one not in ("", "-1"), shown.split(",")))
    ask = shutil.which("nvidia-smi")
    if ask is None:
        return []
    listed = subprocess.run([ask, "-L"], capture_output=True, text=True, check=False)
    lines = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return [str(number) for number in range(len(lines))]


def _may_have_gpus() -> bool:
    """Returns whether this machine may have NVIDIA GPUs, listed by ``nvidia-smi`` or not."""
    return shutil.which("nvidia-smi") is not None or any(one.exists() for one in _DRIVER_FILES)


@contextlib.contextmanager
def _signals_in_a_queue() -> Iterator[Any]:
    """Collects signals to pass on in a queue, in the main thread only."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()

    def next_signal() -> int | None:
        try:
            return waiting.get_nowait()
        except queue.Empty:
            return None

    if threading.current_thread() is not threading.main_thread():
        yield next_signal
        return
    numbers = [getattr(signal, name) for name in _PASSED_ON if hasattr(signal, name)]
    before = {
        number: signal.signal(number, lambda received, _: waiting.put(received))
        for number in numbers
    }
    try:
        yield next_signal
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_code(outcome: Outcome) -> int:
    if outcome.first is None:
        return 0 if None not in outcome.codes else 128 + (outcome.signal or signal.SIGKILL)
    code = outcome.codes[outcome.first]
    assert code is not None
    if outcome.signal is not None and _ended_as_asked(outcome):
        return 128 + outcome.signal
    return code if code > 0 else 128 - code
