"""``profile_step``: the time of each part of a train step, and the first thing to change."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu.addons.tuning.timed_step import Times, Timing, timed
from tfmultigpu.arguments import check_count
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.errors import DataError
from tfmultigpu.steps.chain import ChainedStep
from tfmultigpu.steps.step import TrainStep
from tfmultigpu.strategies.topology import strategy_devices

__all__ = ["StepProfile", "profile_step"]

# A replica that takes longer than this many times the median is slow.
_SLOW_REPLICA = 1.2
# Another part than compute is worth a change from this fraction of a step on.
_LARGE_PART = 0.25


class Advice(NamedTuple):
    """The first thing to change.

    Attributes:
        code: A name that stays the same from version to version, such as ``"input-bound"``.
        what: The part of a step that takes too long, with its share.
        why: The consequence.
        change: The line to write.
    """

    code: str
    what: str
    why: str
    change: str

    def __str__(self) -> str:
        """Formats the advice as three lines."""
        return f"[{self.code}] {self.what}\n    why: {self.why}\n    change: {self.change}"


@dataclass(frozen=True)
class StepProfile:
    """The time of a step and its parts: medians over the steps, in seconds.

    Attributes:
        steps: Number of timed steps.
        rows: Examples in a global batch, the mean.
        seconds: A whole step with its input; the parts overlap.
        input: The wait for the next batch.
        compute: Forward and backward, until the last replica has its gradients.
        reduce: The all-reduce of the gradients, with dividing and clipping.
        update: The update of every variable on every replica.
        call: The rest of a timed step: calling it, and fetching the loss.
        replicas: Forward and backward of each replica of this process.
        devices: Their devices.
        replicas_in_all: Number of replicas of all workers.
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
        """The index of the slowest replica of this process."""
        return max(range(len(self.replicas)), key=self.replicas.__getitem__)

    @property
    def advice(self) -> Advice:
        """The first thing to change."""
        return advise(self)

    def __str__(self) -> str:
        """Formats a table and the first thing to change."""
        total = sum(self.parts.values())
        lines = [
            f"profile of {self.steps} steps of {self.rows:g} examples on "
            f"{self.replicas_in_all} replica(s): {1e3 * self.seconds:.2f} ms a step, "
            f"{self.rows / self.seconds:.0f} examples/s",
            f"parts, timed one after the other: {1e3 * total:.2f} ms",
        ]
        for name, part in self.parts.items():
            lines.append(f"  {name:<22} {1e3 * part:>9.2f} ms {part / total:>5.0%}")
            if name == "forward and backward" and len(self.replicas) > 1:
                for i, (one, device) in enumerate(zip(self.replicas, self.devices, strict=True)):
                    last = "  slowest" if i == self.slowest else ""
                    lines.append(f"    replica {i} ({device}){'':<4} {1e3 * one:>9.2f} ms{last}")
        return "\n".join([*lines, "change first:", str(self.advice)])


def profile_step(
    step: TrainStep | ChainedStep,
    data: Iterable[Any],
    steps: int = 20,
) -> StepProfile:
    """Measures the parts of a train step: input, forward and backward, all-reduce, update.

    Trains ``steps`` real steps and reads the clock between their parts, which then cannot overlap.
    Trains as many steps without the clock. One step of each kind before compiles them; the first
    step of each pass over the data is not timed. Under several workers all must call it, and each
    reports its replicas.

    Args:
        step: The result of ``make_train_step``, or of ``chain_steps``, whose parts add up.
        data: The training data: a distributed dataset, or batches. Starts again if it ends.
        steps: Number of timed steps, at least 1.

    Returns:
        The profile; ``print`` it.

    Raises:
        DataError: The data is empty.
        TypeError: ``step`` is not a train step, or ``data`` does not yield batches.
        ValueError: ``steps`` is not a whole number from 1 on.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> step = tmg.make_train_step(model, keras.optimizers.SGD(0.1), "mse")
        >>> profile = tmg.tuning.profile_step(step, [(np.ones((8, 3)), np.ones((8, 1)))], steps=2)
        >>> profile.rows
        8.0
    """
    if not isinstance(step, (TrainStep, ChainedStep)):
        raise TypeError(
            f"step must be a train step. Received: step={step!r}. Make it with "
            "step = tmg.make_train_step(model, optimizer, loss, strategy)."
        )
    check_count("steps", steps)
    if not isinstance(data, Iterable):
        raise TypeError(
            f"data must yield batches. Received: data={data!r}. Give tmg.distribute_dataset(...)."
        )
    batches = _Batches(data, step)
    first = batches.next()
    _train(step, first)
    timed_steps = [timed(one) for one in _in_turn(step)]
    for one, _ in timed_steps:
        _train(one, first)
    parts = [_time_parts(timed_steps, batches) for _ in range(steps)]
    whole = [_time_whole(step, batches) for _ in range(steps)]
    count = len(parts[0].replicas)
    devices = strategy_devices(step.strategy) or ("its device",) * count
    return StepProfile(
        steps=steps,
        rows=statistics.fmean(one.examples for one in parts),
        seconds=statistics.median(whole),
        input=statistics.median(one.input for one in parts),
        compute=statistics.median(one.compute for one in parts),
        reduce=statistics.median(one.reduce for one in parts),
        update=statistics.median(one.update for one in parts),
        call=statistics.median(one.call for one in parts),
        replicas=tuple(statistics.median(one.replicas[i] for one in parts) for i in range(count)),
        devices=devices,
        replicas_in_all=step.strategy.num_replicas_in_sync,
    )


def advise(profile: StepProfile) -> Advice:
    """Returns the first thing to change; pure."""
    total = sum(profile.parts.values())
    fractions = {name: seconds / total for name, seconds in profile.parts.items()}
    compute = fractions.pop("forward and backward")
    if profile.replicas_in_all == 1:
        del fractions["all-reduce"]
    median = statistics.median_low(profile.replicas)
    uneven = max(profile.replicas) > _SLOW_REPLICA * median
    if uneven:
        fractions["the slowest replica"] = (max(profile.replicas) - median) / total
    worst = max(fractions, key=fractions.__getitem__)
    if fractions[worst] < min(_LARGE_PART, compute) and not uneven:
        return Advice(
            "compute-bound",
            f"Forward and backward take {compute:.0%} of a step, as they should.",
            "The devices are busy; only faster computation or more devices help.",
            "jit_compile=True in make_train_step, or keras.mixed_precision.set_global_policy("
            '"mixed_float16") with loss_scale="dynamic" on GPUs',
        )
    if fractions[worst] < min(_LARGE_PART, compute):
        worst = "the slowest replica"
    return _advise_part(worst, fractions[worst], profile)


def _advise_part(worst: str, fraction: float, profile: StepProfile) -> Advice:
    """Returns the advice for the part of a step that takes too long."""
    if worst == "the slowest replica":
        slow = profile.slowest
        ratio = max(profile.replicas) / statistics.median_low(profile.replicas)
        return Advice(
            "slow-replica",
            f"Replica {slow} ({profile.devices[slow]}) takes {ratio:.1f} times as long as the "
            "others.",
            "Every step waits for it, so the others look idle.",
            "tmg.distribute_dataset(dataset, strategy, shares=tmg.plan_shares(batch_size, "
            "tmg.measured_capacities(step, batch)))",
        )
    code, what, why, change = _ADVICE[worst]
    if worst == "update" and profile.replicas_in_all > 1:
        change = f"shard_update=True; or {change}"
    return Advice(code, what.format(part=f"{fraction:.0%}"), why, change)


_ADVICE = {
    "input": (
        "input-bound",
        "The devices wait {part} of a step for the next batch.",
        "More devices would wait longer.",
        "dataset.map(f, num_parallel_calls=tf.data.AUTOTUNE), .cache() after the slow stage, "
        ".prefetch(tf.data.AUTOTUNE) at the end",
    ),
    "call": (
        "call-bound",
        "Calling the step takes {part} of the time: the step is short.",
        "Python and the start of a compiled function cost the same for every step.",
        "step.run(iterator, 20) runs twenty steps in one call; or larger batches",
    ),
    "all-reduce": (
        "reduce-bound",
        "The all-reduce of the gradients takes {part} of a step.",
        "It costs the same for every batch, however small.",
        "Larger global batches, with micro_batches=4 if memory is short; and check that the GPUs "
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
class _StepTimes:
    examples: int
    input: float
    call: float
    compute: float
    reduce: float
    update: float
    replicas: tuple[float, ...]


def _in_turn(step: TrainStep | ChainedStep) -> list[TrainStep]:
    """Returns the train steps that take a batch, in order."""
    if isinstance(step, TrainStep):
        return [step]
    pairs = zip(step.steps.values(), step.times, strict=True)
    return [one for one, times in pairs for _ in range(times)]


def _train(step: TrainStep | ChainedStep, batch: Any) -> None:
    logs = step(batch)
    float(next(iter(logs.values())))  # Waits for the step.


def _time_parts(steps: Sequence[tuple[TrainStep, Timing]], batches: _Batches) -> _StepTimes:
    batch, waited = batches.timed_next()
    begin = time.perf_counter()
    found = []
    for step, timing in steps:
        _train(step, batch)
        found.append(timing.times)
    call = time.perf_counter() - begin - sum(one.updated - one.begin for one in found)
    return _StepTimes(
        examples=_count_examples(batch),
        input=waited,
        call=max(0.0, call),
        compute=sum(max(one.replicas) - one.begin for one in found),
        reduce=sum(one.reduced - max(one.replicas) for one in found),
        update=sum(one.updated - one.reduced for one in found),
        replicas=tuple(sum(ends) for ends in zip(*map(_of_replicas, found), strict=True)),
    )


def _of_replicas(times: Times) -> list[float]:
    return [end - times.begin for end in times.replicas]


def _time_whole(step: TrainStep | ChainedStep, batches: _Batches) -> float:
    batch, waited = batches.timed_next()
    begin = time.perf_counter()
    _train(step, batch)
    return waited + time.perf_counter() - begin


class _Batches:
    """Batches of data that starts again if it ends."""

    def __init__(self, data: Iterable[Any], step: TrainStep | ChainedStep) -> None:
        self._data = data
        self._step = step
        self._iterator = iter(data)
        self._new_pass = False

    def next(self) -> Any:
        """Returns the next batch."""
        batch = next(self._iterator, None)
        self._new_pass = batch is None
        if batch is None:
            self._iterator = iter(self._data)
            batch = next(self._iterator, None)
        if batch is None:
            raise DataError(
                "There is no batch to profile. Received: data that is empty, or a one-shot "
                "iterator that has ended. Give a dataset: tmg.distribute_dataset(...)."
            )
        return batch

    def timed_next(self) -> tuple[Any, float]:
        """Returns the next batch and the seconds it took.

        Trains on the first batch of a pass without timing it, because it opens the data. If a pass
        has one batch only, there is no other to time.
        """
        begin = time.perf_counter()
        batch = self.next()
        if self._new_pass:
            _train(self._step, batch)
            begin = time.perf_counter()
            batch = self.next()
        return batch, time.perf_counter() - begin


def _count_examples(batch: Any) -> int:
    """Returns the number of examples in a global batch, sharded or not."""
    known = partition.marked_global_rows(batch)
    if known is None:
        values = tf.nest.map_structure(tf.convert_to_tensor, batch)
        known = count_rows(values)
    return int(known)
