"""Data of the user as what the loop of Keras takes."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmultigpu.addons.loops.array_batches import shard_arrays
from tfmultigpu.addons.loops.cache import get_or_make
from tfmultigpu.addons.loops.feed import Feed
from tfmultigpu.addons.loops.loop import no_batches
from tfmultigpu.arguments import brief, check_count
from tfmultigpu.data.batch_format import count_rows, digest, unpack_batch
from tfmultigpu.data.partition import slice_rows
from tfmultigpu.data.positioned import Position, PositionedDataset, position_data
from tfmultigpu.data.sharded_dataset import ShardedDataset, distribute_dataset
from tfmultigpu.data.sources import is_arrays, tensors_of_arrays
from tfmultigpu.errors import DataError
from tfmultigpu.strategies.topology import describe
from tfmultigpu.types import FitStart, KerasModel, Scalar, Shard

_STEPS = {"training": "steps_per_epoch", "validation": "validation_steps"}

_BEGIN = FitStart(seed=0, first_epoch=0, epoch=0)


@dataclasses.dataclass(frozen=True)
class Source:
    """Data of a call.

    Attributes:
        data: As the user gave it.
        is_arrays: Whether it is arrays, of which batches are made; else it yields them.
    """

    data: Any
    is_arrays: bool


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a loop reads its data; see ``fit`` for the arguments of the user.

    Attributes:
        purpose: ``"training"``, ``"validation"``, ``"evaluation"`` or ``"prediction"``; the model
            keeps a pipeline of arrays for each.
        batch_size: Rows of a global batch of arrays, or None.
        steps: The batches of an epoch, or None.
        shuffle: Whether to shuffle arrays. Their order follows from the seed of ``start`` and the
            number of the pass.
        class_weight: The weights of classes, or None.
        shares: The shares of the replicas, or None.
        start: Where a training begins.
        resumes: Whether a callback saves and resumes it.
    """

    purpose: str
    batch_size: int | None = None
    steps: int | None = None
    shuffle: bool = False
    class_weight: Mapping[int, float] | None = None
    shares: Sequence[float] | None = None
    start: FitStart = _BEGIN
    resumes: bool = False

    @property
    def trains(self) -> bool:
        """Whether an epoch of some steps continues the pass of the one before."""
        return self.purpose == "training"


def check_steps(steps: object, name: str = "steps") -> int | None:
    """Returns a number of batches or None; the caller may not be inside a ``tf.function``."""
    if tf.inside_function():
        raise DataError(
            "fit, evaluate and predict read all data and return numbers, so they cannot run "
            "inside a tf.function.",
            "",
            "Call them outside. Inside, call a step of tmg.make_train_step, tmg.make_eval_step or "
            "tmg.make_predict_step.",
        )
    return None if steps is None else check_count(name, steps, other="None")


def source_of(
    function: str, data: Any, *, x: Any = None, y: Any = None, sample_weight: Any = None
) -> Source:
    """Returns the data of a call of a function, with Keras' arguments ``x``, ``y`` and weights."""
    if x is not None:
        if data is not None:
            raise TypeError(
                f"{function} takes its data once: x is Keras' name of it. Received: data and x. "
                f"Write tmg.{function}(model, data)."
            )
        data = x
    if data is None:
        raise TypeError(
            f"{function} needs data. Received: none. Write tmg.{function}(model, data)."
        )
    if y is not None and isinstance(data, tuple):
        raise DataError(
            "A tuple is (x, y), so it holds labels already.",
            f"a tuple of {len(data)}, and y",
            f"Write tmg.{function}(model, (x, y)); or, for several inputs, tmg.{function}(model, "
            "[first, second], y).",
        )
    source = Source(data, is_arrays(data))
    for name, beside in (("y", y), ("sample_weight", sample_weight)):
        if beside is None:
            continue
        data = source.data
        is_pair = isinstance(data, tuple) and len(data) == 2
        if not source.is_arrays or not (name == "y" or is_pair):
            raise DataError(
                f"{name} works only for arrays (x, y).",
                f"{name} with data of type {type(data).__name__}",
                "Let the dataset yield (x, y) or (x, y, sample_weight).",
            )
        pair = data if is_pair else (data,)
        source = Source((*pair, beside), is_arrays(beside))
    return source


def validation_source(data: Any) -> Source:
    """Returns the data of a validation; a list is ``(x, y)``, as in Keras."""
    if isinstance(data, list):
        data = tuple(data)
    return Source(data, is_arrays(data))


def split_off(source: Source, validation_split: float) -> tuple[Source, Source]:
    """Splits arrays into the training part and the last part, for validation."""
    data = source.data
    if not source.is_arrays:
        raise DataError(
            "validation_split works only for arrays.",
            f"data of type {type(data).__name__}",
            "Split a dataset with take() and skip(), and give validation_data.",
        )
    arrays = tensors_of_arrays(data)
    rows = int(count_rows(arrays))
    at = math.floor(rows * (1.0 - validation_split))
    if not 0 < at < rows:
        raise DataError(
            "validation_split is a fraction that leaves examples to train and to validate with.",
            f"validation_split={validation_split} of {rows} examples",
        )
    first, last = slice_rows(arrays, 0, at), slice_rows(arrays, at, rows)
    return dataclasses.replace(source, data=first), dataclasses.replace(source, data=last)


def feed_of(
    model: KerasModel, strategy: tf.distribute.Strategy, source: Source, reading: Reading
) -> Feed:
    """Returns the data of a loop."""
    # A limit for debugging: Keras counts by it, and the steps must not run ahead of it.
    if most := keras.config.max_steps_per_epoch():
        reading = dataclasses.replace(reading, steps=min(most, reading.steps or most))
    steps = reading.steps
    if reading.resumes and steps is not None:
        raise DataError(
            "The training could be resumed only if an epoch is one pass over the data; "
            "steps_per_epoch breaks that.",
            f"steps_per_epoch={steps} and a callback of tmg.Checkpoints",
            "Give tmg.Checkpoints data=lambda epoch: dataset.shuffle(n, "
            "seed=epoch).batch(size).take(steps), and fit its data.",
        )
    if source.is_arrays:
        return _feed_of_arrays(model, strategy, source.data, reading)
    return _feed_of_batches(strategy, source.data, reading)


def _feed_of_batches(strategy: tf.distribute.Strategy, data: Any, reading: Reading) -> Feed:
    """Returns the feed of data that yields global batches."""
    batches = _distributed(data, strategy, reading)
    per_pass = _length(data, batches, reading)
    position = None
    if reading.resumes and not isinstance(batches, PositionedDataset):
        # That of tmg.Checkpoints has a position.
        epoch = reading.start.epoch - reading.start.first_epoch
        position = Position(epoch, reading.start.step)
        batches = position_data(batches, strategy, position, is_compared=False)
        batches.pass_over(epoch)
    if reading.purpose == "prediction" and batches.reader is not None:
        batches.reader.owe_no_end()  # As in Keras, whose fit and evaluate begin with an end.
    return Feed(
        data,
        batches,
        per_pass,
        reading.steps,
        continues=reading.trains,
        position=position,
        weights="" if reading.class_weight is None else "class_weight",
    )


def _feed_of_arrays(
    model: KerasModel, strategy: tf.distribute.Strategy, data: Any, reading: Reading
) -> Feed:
    """Returns the feed of arrays, of which one iterator makes pass after pass: that is faster."""
    arrays = tensors_of_arrays(data)
    rows = int(count_rows(arrays))
    if not rows:
        raise no_batches(data)
    if reading.class_weight is not None:
        weigh = weighting(reading.class_weight)
        arrays = weigh(*arrays) if isinstance(arrays, tuple) else weigh(arrays)

    batch_size = reading.batch_size
    if batch_size is None:
        batch_size = 32  # As in Keras.
        if reading.trains and reading.steps:
            batch_size = math.ceil(rows / reading.steps)
    size = check_count("batch_size", batch_size, error=DataError)
    per_pass = math.ceil(rows / size)

    description: dict[str, Any] = {"rows": rows, "batch_size": size, "shuffle": reading.shuffle}
    start = reading.start
    if reading.resumes:
        description["digest"] = int(digest(arrays))
    batches = shard_arrays(
        arrays,
        size,
        strategy,
        functools.partial(get_or_make, model, reading.purpose),
        shuffle=reading.shuffle,
        seed=start.seed,
        first_batch=start.epoch * per_pass + start.step,
        shares=reading.shares,
    )
    return Feed(
        data,
        batches,
        per_pass,
        reading.steps,
        continues=reading.trains,
        repeats=True,
        description=description,
        weights=_weights_of(data, reading),
    )


def _weights_of(data: Any, reading: Reading) -> str:
    """Returns which argument gives arrays their sample weights."""
    if reading.class_weight is not None:
        return "class_weight"
    return "sample_weight" if isinstance(data, tuple) and len(data) == 3 else ""


def _distributed(data: Any, strategy: tf.distribute.Strategy, reading: Reading) -> ShardedDataset:
    """Returns batches as shards; of data that is distributed already no argument may change it."""
    # The batch size of fit is for its own arrays.
    batch_size = None if reading.purpose == "validation" else reading.batch_size
    shares, class_weight = reading.shares, reading.class_weight
    if not isinstance(data, ShardedDataset):
        batches = distribute_dataset(data, strategy, batch_size=batch_size, shares=shares)
        if class_weight is None:
            return batches
        weigh = weighting(class_weight)
        weighted = batches.batches.map(weigh, num_parallel_calls=tf.data.AUTOTUNE)
        return batches.with_batches(weighted)
    if data.strategy is not strategy:
        raise DataError(
            "The data was distributed for another strategy than the model's.",
            f"data for {describe(data.strategy)}; a model of {describe(strategy)}",
            "Give the dataset itself, tmg.fit(model, dataset). If a notebook cell has made the "
            "strategy anew, it is another one: create the model in its scope again.",
        )
    arguments = {"batch_size": batch_size, "class_weight": class_weight, "shares": shares}
    for name, value in arguments.items():
        if value is not None:
            raise DataError(
                f"The data is already distributed, so {name} cannot be applied.",
                f"{name}={brief(value)}",
                f"Give the dataset itself, or leave {name} out.",
            )
    if isinstance(data, PositionedDataset):  # Nothing continues its passes.
        return data
    return data.read_apart()


def _length(data: Any, batches: ShardedDataset, reading: Reading) -> int | None:
    """Returns the batches of a pass, None if unknown; a pass without end needs ``steps``."""
    name = _STEPS.get(reading.purpose, "steps")
    batches_of_pass = batches.cardinality()
    if batches_of_pass >= 0:
        return batches_of_pass
    if reading.steps is None and batches_of_pass == tf.data.INFINITE_CARDINALITY:
        raise DataError(
            "The data has no end, so a pass over it would never finish.",
            f"{type(data).__name__} and {name}=None",
            f"Write {name}=100, or leave out .repeat().",
        )
    return None


def weighting(class_weight: Mapping[int, float]) -> Callable[..., tuple[Shard, Shard, Scalar]]:
    """Returns a function that adds sample weights to a batch ``(x, y)``; other classes weigh 1."""
    try:
        weights = {operator.index(key): float(weight) for key, weight in class_weight.items()}
    except (AttributeError, TypeError, ValueError):
        raise DataError(
            "class_weight must be a dict from class number to weight.",
            f"class_weight={brief(class_weight)}",
            "Write class_weight={0: 1.0, 1: 5.0}.",
        ) from None
    classes = sorted({-1, *weights})  # Never empty.
    of_classes = [weights.get(number, 1.0) for number in classes]

    def weigh(*batch: Shard) -> tuple[Shard, Shard, Scalar]:
        x, y, sample_weight = unpack_batch(batch)
        if sample_weight is not None or y is None or tf.nest.is_nested(y):
            raise DataError(
                "Class weights and sample weights cannot be combined, and class weights are for "
                "one output.",
                f"class_weight={brief(weights)}, labels of shape {_shapes_of(y)}, sample weights "
                f"of shape {_shapes_of(sample_weight)}",
                "Give sample weights for each output: (x, y, sample_weight).",
            )
        labels = tf.cast(y, tf.int32) if y.dtype == tf.bool else y
        if y.shape.rank > 1 and y.shape[-1] > 1:
            labels = tf.argmax(labels, axis=-1, output_type=tf.int32)  # One-hot.
        elif y.shape.rank > 1:
            labels = tf.cast(tf.round(tf.squeeze(labels, -1)), tf.int32)
        else:
            labels = tf.cast(tf.round(labels), tf.int32)
        flat = tf.reshape(labels, [-1])
        places = tf.minimum(tf.searchsorted(classes, flat), len(classes) - 1)
        weight = tf.gather(tf.constant(of_classes, keras.config.floatx()), places)
        of_rows = tf.where(tf.gather(classes, places) == flat, weight, 1)
        return x, y, tf.reshape(of_rows, tf.shape(labels))

    return weigh


def _shapes_of(tensors: Shard) -> Shard:
    """Returns the shapes of tensors in their structure: an error shows no value of a row."""
    return tf.nest.map_structure(lambda leaf: getattr(leaf, "shape", leaf), tensors)
