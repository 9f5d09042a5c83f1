"""Bytes of sharded variables on each device, by which the device of the next one is chosen."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmultigpu.addons.sharding import _private
from tfmultigpu.data.spread import AT_LEAST
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.errors import ClusterError, DataError
from tfmultigpu.strategies.worker_exchange import WorkerExchange


class Limits(NamedTuple):
    """Arguments of ``sharded_variables``: bytes of a variable, and of each device if known."""

    at_least: int = AT_LEAST
    memory: tuple[float, ...] | None = None


class _Given(threading.local):
    """The limits that this thread has entered ``sharded_variables`` with."""

    def __init__(self) -> None:
        self.limits: list[Limits] = []  # What was given last, if anything was.
        self.entered: list[Limits] = []  # Those that have not ended, the innermost last.


class Loads:
    """Bytes of sharded variables on each device of a strategy."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        self.given = _Given()
        self.last = Limits()  # What any thread has entered ``sharded_variables`` with last.
        self.lock = threading.RLock()
        self.alive = [0] * len(devices)
        # The bytes by which devices are chosen, the same on all workers. Those of variables that
        # nobody uses count until the workers agree again: each forgets them in its own time.
        self.bytes = self.alive

    def give(self, limits: Limits) -> None:
        """Uses the limits that this thread has entered ``sharded_variables`` with."""
        self.given.limits[:], self.last = [limits], limits

    def limits(self) -> Limits:
        """Returns those that this thread has given last, or else any thread."""
        return (self.given.limits or [self.last])[-1]

    def agree(self, strategy: tf.distribute.Strategy, limits: Limits) -> Limits:
        """Has all workers choose the same devices; returns the limits that hold on all of them."""
        if (exchange := WorkerExchange(strategy)).workers == 1:
            return limits
        room = limits.memory or (math.inf,) * len(self.devices)
        with tf.init_scope():
            told = exchange.floats("the sizes of shards", [limits.at_least, *self.alive, *room])
        counts, alive, memory = np.split(told, [1, 1 + len(self.devices)], axis=1)
        if (counts != counts[0]).any():
            raise ClusterError(
                "The workers would shard different variables.",
                f"at_least={[int(size) for size in counts[:, 0]]}, by worker",
                "Give all workers the same at_least.",
            )
        self.bytes = [int(size) for size in alive.max(axis=0)]
        least = tuple(float(size) for size in memory.min(axis=0))
        return Limits(limits.at_least, None if math.inf in least else least)

    def check(
        self,
        device: int,
        name: str,
        size: int,
        memory: tuple[float, ...] | None,
        *,
        part: str = "",
    ) -> None:
        """Checks that a device holds one variable more, or the ``part`` of one, in words."""
        if memory is not None and self.bytes[device] + size > memory[device]:
            table = "; ".join(
                f"{parse_device_name(each)}: {used:,} of {int(most):,} bytes"
                for each, used, most in zip(self.devices, self.bytes, memory, strict=True)
            )
            what = part or repr(_private.path_of(name))
            # More devices, or other variables elsewhere, do not help.
            if size > max(memory) and not part:
                raise DataError(
                    "One variable is larger than every device, and only the table of a "
                    "keras.layers.Embedding is divided.",
                    f"{what} of {size:,} bytes; {table}",
                    "Make it of several layers, each with a part of the units or classes, and "
                    "join their outputs: keras.ops.concatenate(parts, axis=-1). Or halve it: "
                    "dtype='bfloat16'.",
                )
            raise DataError(
                "The variables do not fit on the devices.",
                f"{what} of {size:,} bytes, after {table}",
                "Take more devices, or `del` other models, which count too.",
            )

    def add(self, device: int, size: int) -> None:
        """Counts a variable."""
        self.alive[device] += size
        if self.bytes is not self.alive:
            self.bytes[device] += size

    def forget(self, device: int, size: int) -> None:
        """Counts a variable no more, which nobody uses."""
        with self.lock:
            self.alive[device] -= size
