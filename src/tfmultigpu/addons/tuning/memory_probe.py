"""The peak of a step on a device that counts its memory, from two small batches."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.addons.tuning.one_device_trace import OneDeviceTrace
from tfmultigpu.addons.tuning.undone import undoing
from tfmultigpu.data.partition import slice_rows
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.steps import ChainedStep, TrainStep
from tfmultigpu.types import Shard

OFF = 0.05  # How far a peak may be from what is measured, as a part of it.


@dataclasses.dataclass(frozen=True)
class MemoryPeak:
    """The peak of a step: ``fixed + of_row * rows``, of the rows that a device computes at once.

    Attributes:
        fixed: Bytes that do not depend on the rows, variables included.
        of_row: Bytes of a row: as measured, or as the bound of the plan grows, which is larger.
        measured: The two batches: for each the rows at once, and the bytes of the fullest device.
        fits: Between which sizes the largest global batch is that fits: a row needs as much as
            measured or as the bound of the plan grows, and a peak is within 5 %; None if the memory
            is unknown, or one of these does not grow.
    """

    fixed: float
    of_row: float
    measured: tuple[tuple[int, int], tuple[int, int]]
    fits: tuple[int, int] | None = None

    def of(self, rows: int) -> int:
        """Returns the peak of so many rows at once."""
        return int(self.fixed + self.of_row * rows)


def probe_peak(
    step: TrainStep | ChainedStep,
    batch: Shard,
    devices: Sequence[str],
    *,
    at_once: int,
    cuts: int,
    memory: int | None,
    least_of: Callable[[int], int],
    traces: Sequence[OneDeviceTrace],
) -> MemoryPeak:
    """Trains on two small batches, and puts everything back.

    Args:
        step: The step.
        batch: A whole global batch.
        devices: The names of its devices.
        at_once: How many rows of it a device computes at once; the batches have 1/16 and 1/8.
        cuts: Into how many parts all devices together cut a batch.
        memory: The bytes of the smallest device; None if unknown.
        least_of: Returns what so many rows at once need at least.
        traces: What one device computes, of each train step.
    """
    few = max(at_once // 16, 1)
    many = max(at_once // 8, few + 1)
    check_counting(devices)
    measured: list[tuple[int, int]] = []
    with undoing(step, traces):
        for rows in (few, many):
            part = slice_rows(batch, 0, rows * cuts)
            step(part)  # Which compiles, and may be compared with one device.
            measured.append((rows, peak_of_step(step, part, devices)))
    slopes = [max(measured[1][1] - measured[0][1], 0) / (many - few)]
    if at_once > many:
        # Few rows may need less than the update does: only more of them show what a row needs.
        slopes.append((least_of(at_once) - least_of(many)) / (at_once - many))
    of_row = max(slopes)
    fixed = measured[1][1] - of_row * many
    fits = None
    if memory is not None and min(slopes) > 0:
        sizes: list[int] = []
        for slope, off in ((of_row, 1 - OFF), (min(slopes), 1 + OFF)):
            room = memory * off - measured[1][1]
            sizes.append(max(int(many + room / slope), 0) * cuts)
        fits = sizes[0], sizes[1]
    return MemoryPeak(fixed, of_row, (measured[0], measured[1]), fits)


def peak_of_step(step: TrainStep | ChainedStep, batch: Shard, devices: Sequence[str]) -> int:
    """Returns the most bytes that one of the devices has given out in one of three steps.

    Kernels that do not wait for each other run in any order, so one step may need a tenth less.
    """
    config: Any = tf.config.experimental
    for device in devices:
        config.reset_memory_stats(device)
    for _ in range(3):
        step(batch)
    # To read a number of a device waits for it.
    return max(int(config.get_memory_info(device)["peak"]) for device in devices)


def check_counting(devices: Sequence[str]) -> None:
    """Checks that devices count all memory: CPUs do with one of TensorFlow's allocators alone."""
    cpus = [device for device in devices if device.startswith("CPU")]
    if cpus and os.environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() not in ("1", "true"):
        raise TfMultiGpuError(
            "A probe needs devices that count their memory, such as GPUs.",
            ", ".join(devices),
            "Leave probe out: plan_memory(step, batch) counts what is exact on any device.",
        )
