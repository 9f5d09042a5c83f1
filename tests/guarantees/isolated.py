"""Measures each case in a process of its own.

A case may abort its process, hang, or leave TensorFlow's collectives broken; the next one must not
notice. The processes are copies of one that has imported TensorFlow and started nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

from guarantee import SIDES, Case, Outcome

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # TensorFlow switches oneDNN on by the kind of CPU, and errors differ with it.
    "TF_ENABLE_ONEDNN_OPTS": "1",
    # With as few threads as cores, collectives of more replicas than that can wait for each other.
    "TF_NUM_INTEROP_THREADS": "16",
}
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["catalogue"])


def measured(cases: Iterable[Case], sides: Iterable[str] = SIDES) -> dict[tuple[str, str], Outcome]:
    """Returns the outcome of each case of the catalogue, by name and side."""
    jobs = [(case, side) for case in cases for side in sides]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}  # The server imports before it is told.
    with mock.patch.dict(os.environ, ENVIRONMENT | path), ThreadPoolExecutor(2) as pool:
        os.environ.pop("TF_CONFIG", None)
        outcomes = pool.map(lambda job: _outcome(*job), jobs)
        return {(case.name, side): o for (case, side), o in zip(jobs, outcomes, strict=True)}


def _outcome(case: Case, side: str) -> Outcome:
    # Ours is promised to answer, and a machine may be five times as slow.
    patience = case.patience * (1 if side == "plain" else 5)
    receive, send = _processes.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r", errors="replace") as log:
        work: Any = (case.name, side, send, log.name)
        process = _processes.Process(target=_work, args=work)
        process.start()
        send.close()
        try:
            if not receive.poll(patience):
                return Outcome("hang", seconds=patience)
            return receive.recv()
        except EOFError:
            process.join()
            return Outcome("abort", message=_last_words(log.read(), process.exitcode))
        finally:
            process.kill()
            process.join()


def _work(name: str, side: str, send: Any, log: str) -> None:
    output = os.open(log, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(8)]
    tf.config.set_logical_device_configuration(cpu, parts)
    from catalogue import CASES

    cases = {case.name: case for case in CASES}
    send.send(cases[name].measure(side))


def _last_words(log: str, status: int) -> str:
    name = signal.Signals(-status).name if status < 0 else f"exit {status}"
    lines = [line for line in log.splitlines() if "Check failed" in line]
    return f"{name} {lines[-1].split('] ', 1)[-1]}" if lines else name
