"""Memory that TensorFlow keeps of each collective of each call of a function; nothing of ours."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

_CALLS = 100
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Info(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


def allocated() -> int:
    """Returns the bytes that glibc has given out; freed memory that it keeps is not counted."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Info
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def collectives(folder: str) -> None:
    """Prints how many bytes stay allocated after calls with one, two and four all-reduces."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        total = tf.Variable(
            tf.ones([4]),
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    for reductions in (1, 2, 4):

        def replica(reductions: int = reductions) -> Any:
            value = total + 0.0
            for _ in range(reductions):
                context = tf.distribute.get_replica_context()
                value = context.all_reduce("SUM", value + tf.random.uniform([4])) / 2.0
            return total.assign(value)

        @tf.function
        def call(steps: Any, replica: Callable[[], Any] = replica) -> Any:
            for _ in tf.range(steps):
                strategy.run(replica)
            return total + 0.0

        for steps in (1, 20):
            for round_ in range(3):
                gc.collect()
                before = allocated()
                for _ in range(_CALLS):
                    call(tf.constant(steps))
                gc.collect()
                if round_ and strategy.cluster_resolver.task_id == 0:
                    grown = (allocated() - before) / _CALLS
                    print(
                        f"{reductions} all-reduces in a step, {steps} steps in a call: "
                        f"{grown:.0f} bytes a call, {grown / steps:.0f} a step",
                        flush=True,
                    )
    Path(folder, "done").touch()
