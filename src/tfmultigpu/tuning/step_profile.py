"""``profile_step``: where the time of a training step goes, and what to change first."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.data import partition
from tfmultigpu.diagnostics.report import Finding
from tfmultigpu.errors import DataError
from tfmultigpu.steps.train import TrainStep
from tfmultigpu.strategies.topology import strategy_devices
from tfmultigpu.tuning.drawings import draw_timeline
from tfmultigpu.tuning.timed_step import ClockedStep, Times

__all__ = ["StepProfile", "profile_step"]

_UNEVEN = 1.2
_MUCH = 0.25


@dataclass(frozen=True)
class StepProfile:
    """Where the time of a step goes: medians over the steps, in seconds.

    Attributes:
        steps: How many were timed.
        rows: Of the global batches, on average.
        seconds: A whole step as it is, input included: the parts overlap where they can.
        input: Until the next batch is there.
        compute: Forward and backward, until the last replica has its gradients.
        reduce: Adding them over the replicas, dividing and clipping.
        update: Until every variable on every replica has its new value.
        call: The rest of a clocked step: calling it, and fetching the loss.
        replicas: For each replica of this process, until it has its gradients.
        devices: Their devices.
        replicas_in_all: How many there are, those of other workers included.
    """

    steps: int
    rows: float
    seconds: float
    input: float
    compute: float
    reduce: float
    update: float
    call: float
    replicas: tuple[float, ...]
    devices: tuple[str, ...]
    replicas_in_all: int

    @property
    def parts(self) -> dict[str, float]:
        """The parts by name, in order."""
        return {
            "input": self.input,
            "forward and backward": self.compute,
            "all-reduce": self.reduce,
            "update": self.update,
            "call": self.call,
        }

    @property
    def slowest(self) -> int:
        """The number of the replica that takes longest, among those of this process."""
        return max(range(len(self.replicas)), key=self.replicas.__getitem__)

    @property
    def finding(self) -> Finding:
        """What to change first."""
        return advise(self)

    def __str__(self) -> str:
        """A table, and what to change first."""
        total = sum(self.parts.values())
        lines = [
            f"profile of {self.steps} steps of {self.rows:g} rows on "
            f"{self.replicas_in_all} replica(s): {1e3 * self.seconds:.2f} ms a step, "
            f"{self.rows / self.seconds:.0f} rows/s",
            f"parts, timed one after the other: {1e3 * total:.2f} ms",
        ]
        for name, part in self.parts.items():
            lines.append(f"  {name:<22} {1e3 * part:>9.2f} ms {part / total:>5.0%}")
            if name == "forward and backward" and len(self.replicas) > 1:
                for i, (one, device) in enumerate(zip(self.replicas, self.devices, strict=True)):
                    last = "  slowest" if i == self.slowest else ""
                    lines.append(f"    replica {i} ({device}){'':<4} {1e3 * one:>9.2f} ms{last}")
        return "\n".join([*lines, "change first:", str(self.finding)])

    def as_svg(self) -> str:
        """Returns the timeline of one step as a picture, an SVG document."""
        begin = self.input
        rows = [("input", [(0.0, self.input, "input")])]
        names = [f"replica {i} ({device})" for i, device in enumerate(self.devices)]
        for name, end in zip(names, self.replicas, strict=True):
            rows.append((name, [(begin, begin + end, "forward and backward")]))
        reduced = begin + self.compute + self.reduce
        together = [
            (begin + self.compute, reduced, "all-reduce"),
            (reduced, reduced + self.update, "update"),
        ]
        end = reduced + self.update
        rows += [("all replicas", together), ("call", [(end, end + self.call, "call")])]
        return draw_timeline(f"one step of {self.rows:g} rows", rows)

    def save_svg(self, path: str | Path) -> None:
        """Writes the timeline to a file."""
        Path(path).write_text(self.as_svg(), encoding="utf-8")


def profile_step(
    step: TrainStep, data: Iterable[Any], steps: int = 20, *, trace_to: str | None = None
) -> StepProfile:
    """Time the parts of a train step: input, forward and backward, all-reduce, update.

    Trains: first ``steps`` real steps with the clock read between the parts, which keeps these from
    overlapping, then as many as they are; one of each before, to compile them; and one, not timed,
    where the data begins again. Under several workers all must call it, and each reports its own
    replicas.

    Args:
        step: What ``make_train_step`` returned.
        data: What it trains on: a distributed dataset, or batches. Begun again where it ends.
        steps: How many steps are timed, at least 1.
        trace_to: A folder for another ``steps`` steps in the format of TensorBoard's profiler,
            which shows every operation.

    Returns:
        The profile: ``print`` it, or ``save_svg`` its timeline.

    Raises:
        DataError: The data is empty.
        TypeError: ``step`` is no train step, ``data`` no batches, or ``steps`` not a whole number.
        ValueError: ``steps`` is less than 1.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> step = tmg.make_train_step(model, keras.optimizers.SGD(0.1), "mse")
        >>> profile = tmg.tuning.profile_step(step, [(np.ones((8, 3)), np.ones((8, 1)))], steps=2)
        >>> profile.rows
        8.0
    """
    if not isinstance(step, TrainStep):
        raise TypeError(
            f"What is profiled is a train step. Received: step={step!r}. Make it with "
            "step = tmg.make_train_step(model, optimizer, loss, strategy)."
        )
    check_steps(steps)
    if not isinstance(data, Iterable):
        raise TypeError(
            f"What is profiled on is data that yields batches. Received: data={data!r}. Give "
            "tmg.distribute_dataset(...)."
        )
    if trace_to is not None:
        gfile: Any = tf.io.gfile
        gfile.makedirs(trace_to)  # Where it cannot be written nothing is trained.
    passes = _Passes(data, step)
    first = passes.next()
    float(step(first)["loss"])
    clocked = ClockedStep(step)
    clocked.timed(first)
    timed = [_timed(clocked, passes) for _ in range(steps)]
    whole = [_whole(step, passes) for _ in range(steps)]
    if trace_to is not None:
        _trace(step, passes, steps, trace_to)
    times = [one.times for one in timed]
    count = len(times[0].replicas)
    devices = strategy_devices(step.strategy) or ("its device",) * count
    return StepProfile(
        steps=steps,
        rows=statistics.fmean(one.rows for one in timed),
        seconds=statistics.median(whole),
        input=statistics.median(one.input for one in timed),
        compute=statistics.median(max(one.replicas) - one.begin for one in times),
        reduce=statistics.median(one.reduced - max(one.replicas) for one in times),
        update=statistics.median(one.updated - one.reduced for one in times),
        call=statistics.median(one.call for one in timed),
        replicas=tuple(
            statistics.median(one.replicas[i] - one.begin for one in times) for i in range(count)
        ),
        devices=devices,
        replicas_in_all=step.strategy.num_replicas_in_sync,
    )


def check_steps(steps: Any) -> None:
    """Checks how many steps are to be timed.

    Raises:
        TypeError: It is not a whole number.
        ValueError: It is less than 1.
    """
    check_count("steps", steps)


def advise(profile: StepProfile) -> Finding:
    """Say what to change first, from where the time goes; pure."""
    total = sum(profile.parts.values())
    part = {name: seconds / total for name, seconds in profile.parts.items()}
    compute = part.pop("forward and backward")
    if profile.replicas_in_all == 1:
        del part["all-reduce"]
    others = statistics.median_low(profile.replicas)
    uneven = max(profile.replicas) > _UNEVEN * others
    if uneven:
        part["the slowest replica"] = (max(profile.replicas) - others) / total
    worst = max(part, key=part.__getitem__)
    if part[worst] < min(_MUCH, compute) and not uneven:
        return Finding(
            "note",
            "compute-bound",
            f"Forward and backward take {compute:.0%} of a step, as they should.",
            "The devices are busy; only faster computation, or more devices, makes it faster.",
            "jit_compile=True in make_train_step, or keras.mixed_precision.set_global_policy("
            '"mixed_float16") with loss_scale="dynamic" on GPUs',
        )
    if part[worst] < min(_MUCH, compute):
        worst = "the slowest replica"
    return _about(worst, part[worst], profile)


def _about(worst: str, part: float, profile: StepProfile) -> Finding:
    """What to do about the part of a step that is larger than it need be."""
    if worst == "the slowest replica":
        slow = profile.slowest
        ratio = max(profile.replicas) / statistics.median_low(profile.replicas)
        return Finding(
            "warning",
            "slow-replica",
            f"Replica {slow} ({profile.devices[slow]}) takes {ratio:.1f} times as long as the "
            "others.",
            "Every step waits for it, and the others look idle.",
            "tmg.distribute_dataset(dataset, strategy, shares=tmg.plan_shares(batch_size, "
            "tmg.measured_capacities(step, batch)))",
        )
    code, what, why, change = _ADVICE[worst]
    if worst == "update" and profile.replicas_in_all > 1:
        change = f"shard_update=True; or {change}"
    return Finding("warning", code, what.format(part=f"{part:.0%}"), why, change)


_ADVICE = {
    "input": (
        "input-bound",
        "The devices wait {part} of a step for the next batch.",
        "More devices would wait longer.",
        "dataset.map(f, num_parallel_calls=tf.data.AUTOTUNE), .cache() after what is slow, "
        ".prefetch(tf.data.AUTOTUNE) at the end",
    ),
    "call": (
        "call-bound",
        "Calling the step takes {part} of the time: it is short.",
        "Python and the start of a compiled function cost the same for every step.",
        "step.run(iterator, 20) runs twenty steps in one call; or larger batches",
    ),
    "all-reduce": (
        "reduce-bound",
        "Adding the gradients takes {part} of a step.",
        "It costs the same for every batch, however small.",
        "Larger global batches, with micro_batches=4 where memory is short; and see that the GPUs "
        'are linked (nvidia-smi topo -m) and communication is "nccl"',
    ),
    "update": (
        "update-bound",
        "The update of the variables takes {part} of a step.",
        "It costs the same for every batch, however small.",
        "larger batches, or an optimizer with less state",
    ),
}


@dataclass(frozen=True)
class _Timed:
    rows: int
    input: float
    call: float
    times: Times


def _timed(clocked: ClockedStep, passes: _Passes) -> _Timed:
    batch, waited = passes.timed()
    there = time.perf_counter()
    logs, times = clocked.timed(batch)
    float(logs["loss"])
    call = time.perf_counter() - there - (times.updated - times.begin)
    return _Timed(rows_of(batch), waited, max(0.0, call), times)


def _whole(step: TrainStep, passes: _Passes) -> float:
    batch, waited = passes.timed()
    begin = time.perf_counter()
    float(step(batch)["loss"])
    return waited + time.perf_counter() - begin


class _Passes:
    """Batches of data that is begun again where it ends."""

    def __init__(self, data: Iterable[Any], step: TrainStep) -> None:
        self._data = data
        self._step = step
        self._iterator = iter(data)
        self._just_begun = False

    def next(self) -> Any:
        """The next batch."""
        batch = next(self._iterator, None)
        self._just_begun = batch is None
        if batch is None:
            self._iterator = iter(self._data)
            batch = next(self._iterator, None)
        if batch is None:
            raise DataError(
                "There is no batch to profile. Received: data that is empty, or a one-shot "
                "iterator that has ended. Give a dataset: tmg.distribute_dataset(...)."
            )
        return batch

    def timed(self) -> tuple[Any, float]:
        """The next batch and how long it took; not the first of a pass, which opens the data.

        That one is trained on all the same. Where every pass is of one batch there is no other.
        """
        begin = time.perf_counter()
        batch = self.next()
        if self._just_begun:
            float(self._step(batch)["loss"])
            begin = time.perf_counter()
            batch = self.next()
        return batch, time.perf_counter() - begin


def rows_of(batch: Any) -> int:
    """Returns the rows of a global batch, cut or whole."""
    known = partition.marked_global_rows(batch)
    if known is None:
        values = tf.nest.map_structure(tf.convert_to_tensor, batch)
        known = partition.count_rows(values)
    return int(known)


def _trace(step: TrainStep, passes: _Passes, steps: int, folder: str) -> None:
    profiler: Any = tf.profiler
    profiler.experimental.start(folder)
    try:
        for number in range(steps):
            with profiler.experimental.Trace("train", step_num=number, _r=1):
                float(step(passes.next())["loss"])
    finally:
        profiler.experimental.stop()
