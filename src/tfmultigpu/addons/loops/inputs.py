"""Data of the user as what the loop of Keras takes."""

from __future__ import annotations

import functools
import math
from typing import Any

import tensorflow as tf

from tfmultigpu.addons.loops.cache import get_or_make
from tfmultigpu.addons.loops.feed import Feed
from tfmultigpu.addons.loops.loop import no_batches
from tfmultigpu.arguments import check_count
from tfmultigpu.data.array_batches import shard_arrays
from tfmultigpu.data.batch_format import count_rows, digest
from tfmultigpu.data.class_weights import weighting
from tfmultigpu.data.partition import slice_rows
from tfmultigpu.data.positioned import Position, PositionedDataset, position_data
from tfmultigpu.data.sharded_dataset import ShardedDataset, distribute_dataset
from tfmultigpu.data.sources import is_arrays, tensors_of_arrays
from tfmultigpu.errors import DataError
from tfmultigpu.strategies.topology import describe
from tfmultigpu.types import KerasModel, Scalar

_STEPS = {"training": "steps_per_epoch", "validation": "validation_steps"}


def check_steps(steps: Any, name: str = "steps") -> None:
    """Checks a number of batches, and that the caller is not inside a ``tf.function``."""
    if tf.inside_function():
        raise DataError(
            "fit, evaluate and predict read all data and return numbers, so they cannot run "
            "inside a tf.function.",
            "",
            "Call them outside. Inside, call a step of tmg.make_train_step, tmg.make_eval_step or "
            "tmg.make_predict_step.",
        )
    if steps is not None:
        check_count(name, steps, other="None")


def labelled(data: Any, x: Any, y: Any, weight: Scalar, function: str) -> Any:
    """Returns the data of a call with Keras' arguments ``x``, ``y`` and ``sample_weight``."""
    if (data is None) == (x is None):
        raise TypeError(
            "fit, evaluate and predict take one data argument. Received: "
            f"{'none' if x is None else 'data beside x'}. Write tmg.{function}(model, data)."
        )
    data = x if data is None else data
    if y is not None and isinstance(data, tuple):
        raise DataError(
            "A tuple is (x, y), so it holds labels already.",
            f"a tuple of {len(data)} beside y",
            f"Write tmg.{function}(model, (x, y)); or, for several inputs, tmg.{function}(model, "
            "[first, second], y).",
        )
    for name, beside in (("y", y), ("sample_weight", weight)):
        if beside is None:
            continue
        is_pair = isinstance(data, tuple) and len(data) == 2
        if not is_arrays(data) or not (name == "y" or is_pair):
            raise DataError(
                f"{name} works only for arrays (x, y).",
                f"{name} with data of type {type(data).__name__}",
                "Let the dataset yield (x, y) or (x, y, sample_weight).",
            )
        data = (data, beside) if name == "y" else (*data, beside)
    return data


def split_off(data: Any, validation_split: float) -> tuple[Any, Any]:
    """Splits arrays into the training part and the last part, for validation."""
    if not is_arrays(data):
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
    return slice_rows(arrays, 0, at), slice_rows(arrays, at, rows)


def feed_of(
    model: KerasModel,
    purpose: str,
    data: Any,
    strategy: tf.distribute.Strategy,
    batch_size: int | None,
    steps: int | None,
    *,
    shuffle: bool = False,
    seed: int = 0,
    first_pass: int = 0,
    class_weight: Any = None,
    shares: Any = None,
    position: Position | None = None,
) -> Feed:
    """Returns the data of a loop; see ``fit`` for the arguments.

    ``purpose`` is ``"training"``, ``"validation"``, ``"evaluation"`` or ``"prediction"``; the model
    keeps a pipeline of arrays for each. ``seed`` and the number of the pass, from ``first_pass``
    on, decide about the order of arrays. ``position`` is where a training that can be resumed
    begins; None for any other.
    """
    trains, validates = purpose == "training", purpose == "validation"
    if position is not None and steps is not None:
        raise DataError(
            "The training could be resumed only if an epoch is one pass over the data; "
            "steps_per_epoch breaks that.",
            f"steps_per_epoch={steps} and a callback of tmg.Checkpoints",
            "Give tmg.Checkpoints data=lambda epoch: dataset.shuffle(n, "
            "seed=epoch).batch(size).take(steps), and fit its data.",
        )
    if validates and isinstance(data, list):
        data = tuple(data)  # (x, y), as in Keras.
    if not is_arrays(data):
        own_size = None if validates else batch_size  # That of fit is for its arrays.
        batches = _distributed(data, strategy, own_size, class_weight, shares)
        per_pass = _length(data, batches, steps, _STEPS.get(purpose, "steps"))
        if position is not None and not isinstance(batches, PositionedDataset):
            batches = position_data(batches, strategy, position, is_compared=False)
            batches.pass_over(position.epoch)
        if purpose == "prediction" and batches.reader is not None:
            batches.reader.owe_no_end()  # As in Keras, whose fit and evaluate begin with an end.
        return Feed(data, batches, per_pass, steps, continues=trains, position=position)
    arrays = tensors_of_arrays(data)
    rows = int(count_rows(arrays))
    if not rows:
        raise no_batches(data)
    if class_weight is not None:
        arrays = weighting(class_weight)(*(arrays if isinstance(arrays, tuple) else (arrays,)))
    if batch_size is None:
        batch_size = math.ceil(rows / steps) if trains and steps else 32  # As in Keras.
    size = check_count("batch_size", batch_size, error=DataError)
    per_pass = math.ceil(rows / size)
    description: dict[str, Any] = {"rows": rows, "batch_size": size, "shuffle": shuffle}
    first_batch = first_pass * per_pass
    if position is not None:
        first_batch += position.epoch * per_pass + position.step_in_epoch
        description["digest"] = int(digest(arrays))
    batches = shard_arrays(
        arrays, size, strategy, functools.partial(get_or_make, model, purpose), shuffle=shuffle,
        seed=seed, first_batch=first_batch, shares=shares,
    )  # fmt: skip
    # One iterator for all passes, which is faster.
    return Feed(
        data, batches, per_pass, steps, continues=trains, repeats=True, description=description
    )


def _distributed(
    data: Any, strategy: tf.distribute.Strategy, batch_size: Any, class_weight: Any, shares: Any
) -> ShardedDataset:
    """Returns batches as shards; of data that is distributed already no argument may change it."""
    if not isinstance(data, ShardedDataset):
        batches = distribute_dataset(data, strategy, batch_size=batch_size, shares=shares)
        if class_weight is not None:
            weigh = weighting(class_weight)
            weighted = batches.batches.map(weigh, num_parallel_calls=tf.data.AUTOTUNE)
            batches = batches.with_batches(weighted)
        return batches
    if data.strategy is not strategy:
        raise DataError(
            "The data was distributed for another strategy than the model's.",
            f"data for {describe(data.strategy)}; a model of {describe(strategy)}",
            "Give the dataset itself, or write tmg.distribute_dataset(dataset, strategy).",
        )
    arguments = {"batch_size": batch_size, "class_weight": class_weight, "shares": shares}
    for name, value in arguments.items():
        if value is not None:
            raise DataError(
                f"The data is already distributed, so {name} cannot be applied.",
                f"{name}={value!r}",
                f"Give the dataset itself, or leave {name} out.",
            )
    return data


def _length(data: Any, batches: ShardedDataset, steps: int | None, name: str) -> int | None:
    """Returns the batches of a pass, None if unknown; a pass without end needs ``steps``."""
    batches_of_pass = batches.cardinality()
    if batches_of_pass >= 0:
        return batches_of_pass
    if steps is None and batches_of_pass == tf.data.INFINITE_CARDINALITY:
        raise DataError(
            "The data has no end, so a pass over it would never finish.",
            f"{type(data).__name__} and {name}=None",
            f"Write {name}=100, or leave out .repeat().",
        )
    return None
