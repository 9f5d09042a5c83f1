"""``profile_step``: the few numbers of a train step that say what to change first."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.errors import DataError
from tfmultigpu.steps import ChainedStep, TrainStep
from tfmultigpu.strategies.collectives import sum_over_replicas
from tfmultigpu.types import Function, Shard

_LARGE = 0.25  # A part is worth a change from this fraction of a step on.
_CALL = 5  # Steps of one call of ``step.run``.
_ADVICE = {
    "input": "[input-bound] Devices wait for the next batch. Write dataset.map(f, "
    "num_parallel_calls=tf.data.AUTOTUNE), .cache() after the slow stage, and "
    ".prefetch(tf.data.AUTOTUNE) at the end.",
    "host": "[host-bound] The step is short beside Python and the start of a compiled function. "
    "Write step.run(iterator, 20), or in fit steps_per_call=20; or use larger batches.",
    "all_reduce": "[reduce-bound] Adding gradients costs the same for every batch. Use larger "
    "global batches, and check that the GPUs are linked: nvidia-smi topo -m.",
    "": "[compute-bound] The devices are busy. Try jit_compile=True in make_train_step, or on GPUs "
    'keras.mixed_precision.set_global_policy("mixed_float16") with loss_scale="dynamic". If the '
    "devices differ, divide by speed: tmg.tuning.measured_capacities(step, batch).",
}


@dataclass(frozen=True)
class StepProfile:
    """The time of a train step; medians over the steps, in seconds.

    Attributes:
        steps: Number of timed steps.
        replicas: Number of replicas, of all workers.
        examples: Examples in a global batch, the mean.
        first: The first step; if the step is new, it includes building, tracing and compiling.
        input: The wait for the next batch.
        call: A call of the step, until its loss is known on the host.
        host: The part of input and call that ``step.run`` saves, with several steps in a call.
        all_reduce: The addition of tensors like the gradients over the replicas, by itself. In a
            step it may overlap with the backward pass. 0 for one replica.
    """

    steps: int
    replicas: int
    examples: float
    first: float
    input: float
    call: float
    host: float
    all_reduce: float

    @property
    def seconds(self) -> float:
        """A whole step with its input."""
        return self.input + self.call

    @property
    def throughput(self) -> float:
        """Examples per second."""
        return self.examples / self.seconds

    @property
    def advice(self) -> str:
        """The first thing to change, beginning with its code, such as ``[input-bound]``."""
        parts = {name: getattr(self, name) for name in _ADVICE if name}
        worst = max(parts, key=parts.__getitem__)
        return _ADVICE[worst if parts[worst] >= _LARGE * self.seconds else ""]

    def __str__(self) -> str:
        """Formats a table and the first thing to change."""
        title = (
            f"{self.steps} steps of {self.examples:g} examples on {self.replicas} replica(s): "
            f"{1e3 * self.seconds:.2f} ms a step, {self.throughput:.0f} examples/s"
        )
        names = ("first", "input", "call", "host", "all_reduce")
        lines = [title]
        for name in names:
            lines.append(f"  {name:<10} {1e3 * getattr(self, name):>10.2f} ms")
        return "\n".join([*lines, self.advice])

    __repr__ = __str__  # A notebook shows the table.


def profile_step(
    step: TrainStep | ChainedStep, data: Iterable[Shard], steps: int = 20
) -> StepProfile:
    """Measures a train step: its input, its call, its all-reduce, its first call.

    Trains real steps: first one in each call, then as many with several in a call. All workers
    must call it.

    Args:
        step: The result of ``make_train_step`` or ``chain_steps``.
        data: The training data: the result of ``distribute_dataset``. Starts again if it ends.
        steps: Number of timed steps, at least 1.

    Returns:
        The profile; ``print`` it.

    Raises:
        DataError: ``data`` is empty, or not a dataset.
        ValueError: ``steps`` is not a whole number from 1 on.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> step = tmg.make_train_step(model, keras.optimizers.SGD(0.1), "mse")
        >>> data = tmg.distribute_dataset((np.ones((24, 3)), np.ones((24, 1))), batch_size=8)
        >>> tmg.tuning.profile_step(step, data, steps=2).examples
        8.0
    """
    steps = check_count("steps", steps, error=ValueError)
    iterator = iter(data)
    if iterator is data:
        raise DataError(
            "profile_step reads the data again where it ends, which an iterator cannot.",
            type(data).__name__,
            "Give the dataset itself: profile_step(step, tmg.distribute_dataset(dataset, "
            "strategy)).",
        )
    batch = next(iterator, None)
    if batch is None:
        raise DataError("There is no batch to profile.", "data that is empty")
    first = _seconds(step, batch)
    batches = itertools.chain.from_iterable(itertools.repeat(data))
    waits, calls, examples = [], [], []
    for _ in range(steps):
        begin = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - begin)
        calls.append(_seconds(step, batch))
        examples.append(_count_examples(batch, step.strategy))
    wait, call = statistics.median(waits), statistics.median(calls)
    return StepProfile(
        steps=steps,
        replicas=step.strategy.num_replicas_in_sync,
        examples=statistics.fmean(examples),
        first=first,
        input=wait,
        call=call,
        host=min(call, max(0.0, wait + call - _time_run(step, data, steps))),
        all_reduce=_time_all_reduce(step, steps),
    )


def _seconds(function: Function, *args: Shard) -> float:
    """Returns the seconds until the first number of a result is known on the host."""
    begin = time.perf_counter()
    float(next(iter(function(*args).values())))
    return time.perf_counter() - begin


def _time_run(step: TrainStep | ChainedStep, data: Iterable[Shard], steps: int) -> float:
    """Returns the seconds of a step with its input, where one call runs several."""
    iterator, times, ran = iter(data), [], 0
    step.run(iterator, _CALL)  # Compiles it.
    while ran < steps:
        begin = time.perf_counter()
        count = int(step.run(iterator, _CALL)["steps"])
        if count:
            times.append((time.perf_counter() - begin) / count)
            ran += count
        if count < _CALL:
            iterator = iter(data)
    return statistics.median(times)


def _time_all_reduce(step: TrainStep | ChainedStep, repeats: int) -> float:
    """Returns the seconds of adding tensors like the gradients over the replicas."""
    strategy = step.strategy
    added = []
    for part in step.train_steps:
        added += [target.copies for target in part.trained if not target.is_sharded]
    if strategy.num_replicas_in_sync == 1 or not added:
        return 0.0

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def add() -> dict[str, tf.Tensor]:
        of_replicas = []
        for own in zip(*added, strict=True):
            of_replicas.append([*map(tf.identity, own), tf.ones([])])
        sums, *_ = sum_over_replicas(strategy, of_replicas)
        firsts = [tf.cast(tf.reshape(total, [-1])[0], tf.float32) for total in sums]
        return {"sum": tf.add_n(firsts)}

    add()  # Compiles it.
    return statistics.median(_seconds(add) for _ in range(repeats))


def _count_examples(batch: Shard, strategy: tf.distribute.Strategy) -> int:
    """Returns the number of examples in a global batch, of all workers."""
    local = strategy.experimental_local_results(tf.nest.flatten(batch)[0])
    processes = max(1, strategy.num_replicas_in_sync // len(local))
    return int(processes * sum(shard.shape[0] for shard in local))
