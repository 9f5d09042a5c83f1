"""Checks of a dataset: its batches, its stages, and the time a model waits for it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import tensorflow as tf

from tfmultigpu.addons.diagnostics.report import Finding
from tfmultigpu.data.batch_format import count_rows, unpack_batch
from tfmultigpu.data.sharded_dataset import ShardedDataset, check_batched, distribute_dataset
from tfmultigpu.errors import DataError

__all__ = ["Input", "input_findings", "inspect_input", "measure_input"]

_T = TypeVar("_T")

_LARGE = 64 * 1024**2  # Bytes. The graph of a dataset holds its arrays, so larger ones stay unread.
_BATCHES = 20
_LONG_WAIT = 1 / 3
_MEASURABLE = 2e-3  # Seconds; shorter times are noise.


@dataclass(frozen=True)
class Input:
    """Facts about a dataset.

    Attributes:
        kind: Its type.
        dataset: The dataset, if it is a ``tf.data.Dataset``.
        strategy: The strategy that this library distributed it for.
        distributed: It is a distributed dataset.
        spec: The type specs of a batch.
        problem: The reason why it was not read.
        problem_code: The code of the finding for this reason.
        examples: Number of examples in the first batch.
        batch: The first batch.
        batches: Number of batches; None if unknown, infinity if it never ends.
        stages: The names of its stages; None if they were not read.
        seconds: Measured seconds to make one batch.
        compute: Measured seconds of a forward and backward pass on it.
    """

    kind: str
    dataset: Any = None
    strategy: Any = None
    distributed: bool = False
    spec: Any = None
    problem: str | None = None
    problem_code: str = ""
    examples: int | None = None
    batch: Any = None
    batches: float | None = None
    stages: tuple[str, ...] | None = None
    seconds: float | None = None
    compute: float | None = None

    @property
    def prefetches(self) -> bool | None:
        """True if the last stage prefetches; None if the stages are unknown."""
        return None if self.stages is None else self.stages[-1:] == ("Prefetch",)

    @property
    def wait_fraction(self) -> float | None:
        """Fraction of the time that devices wait for data; None if unknown."""
        if self.seconds is None or self.compute is None or self.seconds < _MEASURABLE:
            return None
        if self.prefetches is False:
            return self.seconds / (self.seconds + self.compute)
        return max(0.0, 1.0 - self.compute / self.seconds)


def inspect_input(dataset: Any, patience: float) -> Input:
    """Reads the first batch of a dataset and its stages.

    Args:
        dataset: The dataset.
        patience: Seconds to wait for the batch.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, ShardedDataset):
        spec = dataset.element_spec
        return Input(kind, strategy=dataset.strategy, distributed=True, spec=spec)
    if isinstance(dataset, tf.distribute.DistributedDataset):
        return Input(kind, distributed=True)
    if not isinstance(dataset, tf.data.Dataset):
        return Input(kind, problem=f"explain does not read a {kind}.", problem_code="data-not-read")
    spec = dataset.element_spec
    kind = "tf.data.Dataset"
    count = int(dataset.cardinality())
    batches = {-1: math.inf, -2: None}.get(count, float(count))
    try:
        check_batched(spec)
        first = _within(patience, lambda: next(iter(dataset.take(1)), None))
        examples = None if first is None else int(count_rows(first))
    except DataError as error:
        return Input(kind, dataset, spec=spec, problem=str(error), problem_code="unbatched")
    except tf.errors.OpError as error:
        return _failing(Input(kind, dataset, spec=spec), error)
    except TimeoutError:
        return _silent(Input(kind, dataset, spec=spec, batches=batches), "first", patience)
    return Input(
        kind,
        dataset,
        spec=spec,
        examples=examples,
        batch=first,
        batches=batches,
        stages=_stages(dataset, first, batches),
    )


def _failing(seen: Input, error: Exception) -> Input:
    # The text of the error may hold paths, so the report leaves it out.
    problem = f"Reading the dataset fails with {type(error).__name__}."
    return replace(seen, problem=problem, problem_code="data-fails")


def _silent(seen: Input, which: str, patience: float) -> Input:
    problem = f"The dataset has not yielded its {which} batch in {patience:g} seconds."
    return replace(seen, problem=problem, problem_code="data-silent")


def _within(seconds: float, function: Callable[[], _T]) -> _T:
    """Calls a function with a time limit; a call that exceeds it stays in its thread.

    Raises:
        TimeoutError: The call takes longer.
    """
    results: list[_T] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            results.append(function())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def _stages(dataset: Any, first: Any, batches: float | None) -> tuple[str, ...] | None:
    """Reads the stages from the graph of a dataset, such as TensorSlice, Shuffle, Batch."""
    size = sum(leaf.dtype.size * math.prod(leaf.shape) for leaf in _dense(first))
    if batches is not None and math.isfinite(batches) and size * batches > _LARGE:
        return None
    raw: Any = tf.raw_ops
    (variant,) = tf.nest.flatten(dataset, expand_composites=True)
    try:
        graph = raw.DatasetToGraphV2(input_dataset=variant, external_state_policy=1)
    except tf.errors.OpError:
        return None  # TensorFlow cannot serialize one of its stages.
    nodes: Any = tf.compat.v1.GraphDef.FromString(graph.numpy())
    names = [str(node.op) for node in nodes.node]
    return tuple(name.split("Dataset")[0] for name in names if "Dataset" in name)


def _dense(batch: Any) -> list[Any]:
    leaves = tf.nest.flatten(batch, expand_composites=True)
    return [one for one in leaves if tf.is_tensor(one) and one.shape.is_fully_defined()]


def measure_input(
    seen: Input, model: Any, strategy: tf.distribute.Strategy, seconds: float, patience: float
) -> Input:
    """Measures the seconds to make a batch and to compute on it; trains nothing.

    Args:
        seen: The facts about the dataset.
        model: The model.
        strategy: Its strategy.
        seconds: Time limit of the measurement.
        patience: Further seconds to wait for a batch.

    Returns:
        The facts with both times, or with the problem that came up.
    """
    if seen.dataset is None or seen.batch is None:
        return seen
    compute = _time_compute(model, strategy, seen.batch, seconds / 2)
    if compute is None:
        return seen

    def read() -> float | None:
        iterator = iter(seen.dataset)
        next(iterator)  # Opens files and fills buffers.
        count, begin = 0, time.perf_counter()
        while count < _BATCHES and time.perf_counter() - begin < seconds / 2:
            if next(iterator, None) is None:
                break
            count += 1
        return (time.perf_counter() - begin) / count if count else None

    try:
        return replace(seen, seconds=_within(seconds + patience, read), compute=compute)
    except tf.errors.OpError as error:
        return _failing(seen, error)
    except TimeoutError:
        return _silent(seen, "next", seconds + patience)


def _time_compute(
    model: Any, strategy: tf.distribute.Strategy, batch: Any, seconds: float
) -> float | None:
    """Measures a forward and backward pass on all replicas, without any assignment."""
    inputs = unpack_batch(batch)[0]
    data = distribute_dataset(tf.data.Dataset.from_tensors(inputs), strategy)
    shard = next(iter(data))

    def replica(x: Any) -> Any:
        values = [variable.value for variable in model.trainable_variables]
        with tf.GradientTape() as tape:
            # In inference no layer assigns to a variable or draws a number.
            outputs = tf.nest.flatten(model(x, training=False))
            parts = [tf.reduce_mean(tf.cast(one, tf.float32)) for one in outputs]
            total = tf.add_n(parts)
        gradients = [one for one in tape.gradient(total, values) if one is not None]
        return total + tf.add_n([tf.reduce_sum(tf.cast(one, tf.float32)) for one in gradients])

    step = tf.function(lambda x: strategy.run(replica, args=(x,)), autograph=False)

    def run() -> float:
        begin = time.perf_counter()
        for value in strategy.experimental_local_results(step(shard)):
            float(value)
        return time.perf_counter() - begin

    try:
        run()
    except (TypeError, ValueError, tf.errors.OpError):
        return None  # The model does not take the features of the batch.
    end = time.perf_counter() + seconds
    times = [run()]
    while len(times) < _BATCHES and time.perf_counter() < end:
        times.append(run())
    return min(times)


def input_findings(seen: Input, strategy: tf.distribute.Strategy) -> Iterator[Finding]:
    """Reports problems of a dataset, for a strategy."""
    replicas = strategy.num_replicas_in_sync
    if seen.problem is not None:
        yield _unread(seen.problem, seen.problem_code)
        return
    yield from _distributed(seen, strategy)
    if seen.dataset is None:
        return
    yield from _batch_size(seen, replicas)
    if seen.examples:
        yield from _pipeline(seen, strategy)


def _unread(problem: str, code: str) -> Finding:
    """Reports a dataset that was not read."""
    if code == "data-fails":
        return Finding(
            "error",
            code,
            problem,
            "Training on it fails too, at that batch.",
            "for batch in dataset: pass, which shows the whole message",
        )
    if code == "data-silent":
        return Finding(
            "error",
            code,
            problem,
            "Training waits as long, without a message. A generator blocks, a filter drops every "
            "example, or making a batch takes longer.",
            "next(iter(dataset)) in a separate program; explain(..., patience=600) if it is slow",
        )
    if code == "data-not-read":
        return Finding(
            "note",
            code,
            problem,
            "The size of its batches and the time to make them are unknown.",
            "explain(model, dataset=tf.data.Dataset.from_tensor_slices((x, y)).batch("
            "global_batch_size))",
        )
    return Finding(
        "error",
        code,
        f"The dataset does not yield batches: {problem.split(' Received:')[0]}",
        "TensorFlow divides the first axis of an element over the replicas, and that is not the "
        "axis of the examples.",
        "dataset.batch(global_batch_size)",
    )


def _distributed(seen: Input, strategy: tf.distribute.Strategy) -> Iterator[Finding]:
    if seen.strategy is not None and seen.strategy is not strategy:
        yield Finding(
            "error",
            "data-other-strategy",
            f"The dataset was distributed for another {type(seen.strategy).__name__}, of "
            f"{seen.strategy.num_replicas_in_sync} replica(s).",
            "Its shards are on the devices of that strategy.",
            "tmg.distribute_dataset(dataset, strategy), with the strategy of the model",
        )
    elif seen.distributed and seen.strategy is None:
        yield Finding(
            "note",
            "data-distributed",
            "TensorFlow has distributed the dataset already.",
            "TensorFlow may leave a replica without examples at the end of the data. Layers then "
            "crash or give NaN.",
            "tmg.distribute_dataset(dataset, strategy) in place of "
            "strategy.experimental_distribute_dataset",
        )


def _batch_size(seen: Input, replicas: int) -> Iterator[Finding]:
    if seen.examples is None or seen.examples == 0:
        yield Finding(
            "error",
            "no-data",
            "The dataset is empty: it has no batch, or its first batch has no examples.",
            "There is nothing to train on.",
            "Check that the files are found, and that drop_remainder does not drop the only batch",
        )
    elif seen.examples < replicas:
        yield Finding(
            "error",
            "small-batch",
            f"A batch has {seen.examples} example(s) for {replicas} replicas.",
            f"At most {seen.examples} of them compute. In Keras' fit a replica without examples "
            "crashes or gives NaN.",
            f"dataset.batch({32 * replicas}), the global batch: the batch size times the replicas",
        )
    elif seen.examples % replicas:
        yield Finding(
            "warning",
            "uneven-batch",
            f"A batch has {seen.examples} examples, not divisible by {replicas} replicas.",
            "Keras' fit weighs small shards as much as large ones, or fails at the first batch. "
            "The steps of this library weigh every example alike.",
            f"dataset.batch({max(1, seen.examples // replicas) * replicas}), or "
            "tmg.make_train_step(...) with tmg.distribute_dataset(dataset, strategy)",
        )


def _pipeline(seen: Input, strategy: tf.distribute.Strategy) -> Iterator[Finding]:
    stages = seen.stages or ()
    if "Shard" in stages and strategy.num_replicas_in_sync > 1:
        yield Finding(
            "warning",
            "data-sharded",
            "dataset.shard(...) has divided the dataset, and a strategy divides it again.",
            "Replicas then share one part of the data and never see the rest.",
            "Remove .shard(...): tmg.distribute_dataset(dataset, strategy) takes global batches",
        )
    if seen.batches == math.inf:
        yield Finding(
            "note",
            "endless",
            "The dataset never ends (.repeat()).",
            "Without steps_per_epoch an epoch never ends.",
            "Give steps_per_epoch, or step.run(iterator, steps); or remove .repeat()",
        )
    if seen.wait_fraction is not None and seen.wait_fraction > _LONG_WAIT:
        yield _input_bound(seen)
    elif seen.prefetches is False and not seen.distributed:
        yield Finding(
            "note",
            "no-prefetch",
            "The dataset does not prefetch: its last stage is "
            f"{stages[-1] if stages else 'not known'}.",
            "The devices wait while a batch is made.",
            "dataset.prefetch(tf.data.AUTOTUNE), as the last stage",
        )


def _input_bound(seen: Input) -> Finding:
    stages = seen.stages or ()
    fixes = []
    if "Map" in stages:
        fixes.append("dataset.map(f, num_parallel_calls=tf.data.AUTOTUNE)")
    if seen.prefetches is False:
        fixes.append("dataset.prefetch(tf.data.AUTOTUNE) at the end")
    if "Cache" not in stages:
        fixes.append("dataset.cache() after the slow stage, if the data fits into memory")
    seconds, compute = 1e3 * (seen.seconds or 0.0), 1e3 * (seen.compute or 0.0)
    return Finding(
        "warning",
        "input-bound",
        f"The devices wait for data {seen.wait_fraction or 0.0:.0%} of the time: making a batch "
        f"takes {seconds:.1f} ms, a forward and backward pass on it {compute:.1f} ms.",
        "More devices compute faster, wait longer and look idle.",
        "; ".join(fixes) or "Do less work per example, or give it more cores",
    )
