"""Measures each case in a process of its own.

A case may abort its process, hang, or leave TensorFlow's collectives broken; the next one must not
notice.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

import tensorflow as tf
from catalogue import CASES
from guarantee import SIDES, Case, Outcome
from law.processes import WorkerRaised, pool

# With as few threads as cores, collectives of more replicas than that can wait for each other.
ENVIRONMENT = {"TF_NUM_INTEROP_THREADS": "16"}


def measured(cases: Iterable[Case], sides: Iterable[str] = SIDES) -> dict[tuple[str, str], Outcome]:
    """Returns the outcome of each case of the catalogue, by name and side."""
    return {(case.name, side): _outcome(case, side) for case in cases for side in sides}


def _outcome(case: Case, side: str) -> Outcome:
    # Ours is promised to answer, and a machine may be five times as slow.
    patience = case.patience * (1 if side == "plain" else 5)
    worker = pool().start(**ENVIRONMENT)
    worker.begin(_measure, case.name, side)
    try:
        return worker.result(patience)
    except AssertionError:  # No answer.
        return Outcome("hang", seconds=patience)
    except WorkerRaised:
        lines = [line for line in worker.log.read_text().splitlines() if "Check failed" in line]
        name = signal.Signals(-worker.wait()).name
        said = f"{name} {lines[-1].split('] ', 1)[-1]}" if lines else name
        return Outcome("abort", message=said)
    finally:
        worker.send_signal(signal.SIGKILL)


def _measure(name: str, side: str) -> Outcome:
    (cpu,) = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(8)]
    tf.config.set_logical_device_configuration(cpu, parts)
    return {case.name: case for case in CASES}[name].measure(side)
