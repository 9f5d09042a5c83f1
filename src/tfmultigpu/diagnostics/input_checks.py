"""What a dataset yields, how it is made, and whether a model waits for it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import tensorflow as tf

from tfmultigpu.data.batch_format import count_rows, unpack_batch
from tfmultigpu.data.sharded_dataset import ShardedDataset, check_batched, distribute_dataset
from tfmultigpu.diagnostics.report import Finding
from tfmultigpu.errors import DataError

__all__ = ["Input", "input_findings", "look_at_input", "measure_input"]

_T = TypeVar("_T")

_LARGE = 64 * 1024**2  # Bytes. The stages are read from a graph that holds arrays given in memory.
_BATCHES = 20
_WAITS = 1 / 3
_WORTH_A_WORD = 2e-3  # Seconds; what takes less is lost in the noise.


@dataclass(frozen=True)
class Input:
    """What is known of a dataset.

    Attributes:
        kind: Its type.
        dataset: Itself, where it is a ``tf.data.Dataset``.
        strategy: The strategy it was distributed for, if it was by this library.
        distributed: Whether it is distributed already.
        spec: Types of a batch.
        problem: Why it is not known what it yields.
        trouble: The code of the finding about that.
        rows: Of the first batch.
        batch: The first batch.
        batches: How many there are; None where it is not known, infinity where it never ends.
        stages: The names of its stages; None where they were not read.
        seconds: To make one batch, measured.
        compute: Seconds of a forward and backward pass on it, measured.
    """

    kind: str
    dataset: Any = None
    strategy: Any = None
    distributed: bool = False
    spec: Any = None
    problem: str | None = None
    trouble: str = ""
    rows: int | None = None
    batch: Any = None
    batches: float | None = None
    stages: tuple[str, ...] | None = None
    seconds: float | None = None
    compute: float | None = None

    @property
    def prefetches(self) -> bool | None:
        """Whether the last stage prefetches; None where the stages are not known."""
        return None if self.stages is None else self.stages[-1:] == ("Prefetch",)

    @property
    def waits(self) -> float | None:
        """The part of the time that devices wait for data; None where it is not known."""
        if self.seconds is None or self.compute is None or self.seconds < _WORTH_A_WORD:
            return None
        if self.prefetches is False:
            return self.seconds / (self.seconds + self.compute)
        return max(0.0, 1.0 - self.compute / self.seconds)


def look_at_input(dataset: Any, patience: float) -> Input:
    """Looks at a dataset; reads its first batch, for which it waits so many seconds."""
    kind = type(dataset).__name__
    if isinstance(dataset, ShardedDataset):
        spec = dataset.element_spec
        return Input(kind, strategy=dataset.strategy, distributed=True, spec=spec)
    if isinstance(dataset, tf.distribute.DistributedDataset):
        return Input(kind, distributed=True)
    if not isinstance(dataset, tf.data.Dataset):
        return Input(kind, problem=f"A {kind} is not looked into.", trouble="data-not-read")
    spec = dataset.element_spec
    kind = "tf.data.Dataset"
    count = int(dataset.cardinality())
    batches = {-1: math.inf, -2: None}.get(count, float(count))
    try:
        check_batched(spec)
        first = _within(patience, lambda: next(iter(dataset.take(1)), None))
        rows = None if first is None else int(count_rows(first))
    except DataError as error:
        return Input(kind, dataset, spec=spec, problem=str(error), trouble="unbatched")
    except tf.errors.OpError as error:
        return _failing(Input(kind, dataset, spec=spec), error)
    except TimeoutError:
        return _silent(Input(kind, dataset, spec=spec, batches=batches), "first", patience)
    stages = _stages(dataset, first, batches)
    return Input(kind, dataset, spec=spec, rows=rows, batch=first, batches=batches, stages=stages)


def _failing(seen: Input, error: Exception) -> Input:
    # Its text may hold paths, which are nobody else's business.
    said = f"Reading the dataset fails with {type(error).__name__}."
    return replace(seen, problem=said, trouble="data-fails")


def _silent(seen: Input, which: str, patience: float) -> Input:
    said = f"The dataset has not yielded its {which} batch in {patience:g} seconds."
    return replace(seen, problem=said, trouble="data-silent")


def _within(seconds: float, function: Callable[[], _T]) -> _T:
    """Returns what a function returns; of one that takes too long, the thread is left behind.

    Raises:
        TimeoutError: It takes longer.
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
    """The stages from first to last, such as TensorSlice, Shuffle, Batch.

    They are read from the graph of the dataset, which for arrays holds all their values.
    """
    size = sum(leaf.dtype.size * math.prod(leaf.shape) for leaf in _dense(first))
    if batches is not None and math.isfinite(batches) and size * batches > _LARGE:
        return None
    raw: Any = tf.raw_ops
    (variant,) = tf.nest.flatten(dataset, expand_composites=True)
    try:
        graph = raw.DatasetToGraphV2(input_dataset=variant, external_state_policy=1)
    except tf.errors.OpError:
        return None  # Something in it cannot be written down.
    nodes: Any = tf.compat.v1.GraphDef.FromString(graph.numpy())
    names = [str(node.op) for node in nodes.node]
    return tuple(name.split("Dataset")[0] for name in names if "Dataset" in name)


def _dense(batch: Any) -> list[Any]:
    leaves = tf.nest.flatten(batch, expand_composites=True)
    return [one for one in leaves if tf.is_tensor(one) and one.shape.is_fully_defined()]


def measure_input(
    seen: Input, model: Any, strategy: tf.distribute.Strategy, seconds: float, patience: float
) -> Input:
    """Times the making of batches, and a forward and backward pass on one; trains nothing."""
    if seen.dataset is None or seen.batch is None:
        return seen
    compute = _compute(model, strategy, seen.batch, seconds / 2)
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


def _compute(
    model: Any, strategy: tf.distribute.Strategy, batch: Any, seconds: float
) -> float | None:
    """Seconds of a forward and backward pass on all replicas, without any assignment."""
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
        return None  # A model that takes something else than the first part of a batch.
    end = time.perf_counter() + seconds
    times = [run()]
    while len(times) < _BATCHES and time.perf_counter() < end:
        times.append(run())
    return min(times)


def input_findings(seen: Input, strategy: tf.distribute.Strategy) -> Iterator[Finding]:
    """What is wrong with a dataset, for a strategy."""
    replicas = strategy.num_replicas_in_sync
    if seen.problem is not None:
        yield _unknown(seen.problem, seen.trouble)
        return
    yield from _distributed(seen, strategy)
    if seen.dataset is None:
        return
    yield from _rows(seen, replicas)
    if seen.rows:
        yield from _pipeline(seen, strategy)


def _unknown(problem: str, trouble: str) -> Finding:
    """Why it is not known what a dataset yields."""
    if trouble == "data-fails":
        return Finding(
            "error",
            trouble,
            problem,
            "Training on it fails too, at that batch.",
            "for batch in dataset: pass, which shows the whole message",
        )
    if trouble == "data-silent":
        return Finding(
            "error",
            trouble,
            problem,
            "Training waits as long, without a message: a generator is blocked, a filter lets "
            "nothing through, or making a batch takes longer than that.",
            "next(iter(dataset)) in a program of its own; explain(..., patience=600) if it is slow",
        )
    if trouble == "data-not-read":
        return Finding(
            "note",
            trouble,
            problem,
            "Whether its batches are large enough, and come soon enough, is not known.",
            "explain(model, dataset=tf.data.Dataset.from_tensor_slices((x, y)).batch("
            "global_batch_size))",
        )
    return Finding(
        "error",
        trouble,
        f"The dataset does not yield batches: {problem.split(' Received:')[0]}",
        "TensorFlow divides the first axis of an element over the replicas, which then is not the "
        "rows.",
        "dataset.batch(global_batch_size)",
    )


def _distributed(seen: Input, strategy: tf.distribute.Strategy) -> Iterator[Finding]:
    if seen.strategy is not None and seen.strategy is not strategy:
        yield Finding(
            "error",
            "data-other-strategy",
            f"The dataset was distributed for another {type(seen.strategy).__name__}, of "
            f"{seen.strategy.num_replicas_in_sync} replica(s).",
            "Its shards are on the devices of that strategy, and as many as it has replicas.",
            "tmg.distribute_dataset(dataset, strategy), with the strategy of the model",
        )
    elif seen.distributed and seen.strategy is None:
        yield Finding(
            "note",
            "data-distributed",
            "The dataset was distributed by TensorFlow already.",
            "TensorFlow's division may leave a replica without rows at the end of the data, where "
            "layers crash or give NaN.",
            "tmg.distribute_dataset(dataset, strategy) in place of "
            "strategy.experimental_distribute_dataset",
        )


def _rows(seen: Input, replicas: int) -> Iterator[Finding]:
    if seen.rows is None or seen.rows == 0:
        yield Finding(
            "error",
            "no-data",
            "The dataset is empty: it has no batch, or its first has no rows.",
            "Nothing is trained.",
            "See that the files are found, and that drop_remainder does not drop the only batch",
        )
    elif seen.rows < replicas:
        yield Finding(
            "error",
            "small-batch",
            f"A batch has {seen.rows} row(s) for {replicas} replicas.",
            f"At most {seen.rows} of them have something to do, and in Keras' fit a replica "
            "without rows crashes or gives NaN.",
            f"dataset.batch({32 * replicas}), the global batch: the batch size times the replicas",
        )
    elif seen.rows % replicas:
        yield Finding(
            "warning",
            "uneven-batch",
            f"A batch has {seen.rows} rows, which {replicas} replicas cannot divide evenly.",
            "Keras' fit weighs the smaller shards as much as the larger ones, or fails at the "
            "first batch; the steps of this library weigh every row alike.",
            f"dataset.batch({max(1, seen.rows // replicas) * replicas}), or "
            "tmg.make_train_step(...) with tmg.distribute_dataset(dataset, strategy)",
        )


def _pipeline(seen: Input, strategy: tf.distribute.Strategy) -> Iterator[Finding]:
    stages = seen.stages or ()
    if "Shard" in stages and strategy.num_replicas_in_sync > 1:
        yield Finding(
            "warning",
            "data-sharded",
            "The dataset was divided by dataset.shard(...), and a strategy divides it again.",
            "Replicas then share a part of the data, and the rest is never used.",
            "Remove .shard(...): tmg.distribute_dataset(dataset, strategy) takes global batches",
        )
    if seen.batches == math.inf:
        yield Finding(
            "note",
            "endless",
            "The dataset never ends (.repeat()).",
            "An epoch without steps_per_epoch never ends either, without a message.",
            "Give steps_per_epoch, or step.run(iterator, steps); or remove .repeat()",
        )
    if seen.waits is not None and seen.waits > _WAITS:
        yield _waiting(seen)
    elif seen.prefetches is False and not seen.distributed:
        yield Finding(
            "note",
            "no-prefetch",
            "The dataset does not prefetch: its last stage is "
            f"{stages[-1] if stages else 'not known'}.",
            "Batches are made while the devices wait, not while they compute.",
            "dataset.prefetch(tf.data.AUTOTUNE), as the last stage",
        )


def _waiting(seen: Input) -> Finding:
    stages = seen.stages or ()
    cures = []
    if "Map" in stages:
        cures.append("dataset.map(f, num_parallel_calls=tf.data.AUTOTUNE)")
    if seen.prefetches is False:
        cures.append("dataset.prefetch(tf.data.AUTOTUNE) at the end")
    if "Cache" not in stages:
        cures.append("dataset.cache() after what is slow, where it fits into memory")
    seconds, compute = 1e3 * (seen.seconds or 0.0), 1e3 * (seen.compute or 0.0)
    return Finding(
        "warning",
        "input-bound",
        f"The devices wait for data {seen.waits or 0.0:.0%} of the time: making a batch takes "
        f"{seconds:.1f} ms, a forward and backward pass on it {compute:.1f} ms.",
        "More devices compute faster and wait longer: they look idle.",
        "; ".join(cures) or "Do less for each row, or have more cores do it",
    )
