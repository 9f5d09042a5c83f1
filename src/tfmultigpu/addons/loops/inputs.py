"""Data of the user as what the loop of Keras takes."""

from __future__ import annotations

import functools
import math
from typing import Any

import tensorflow as tf

from tfmultigpu.addons.loops.cache import get_or_make
from tfmultigpu.addons.loops.feed import Feed, PredictFeed
from tfmultigpu.addons.loops.loop import no_batches
from tfmultigpu.arguments import check_count
from tfmultigpu.data.array_batches import shard_arrays
from tfmultigpu.data.batch_format import count_rows, digest
from tfmultigpu.data.class_weights import weighting
from tfmultigpu.data.partition import slice_rows
from tfmultigpu.data.positioned import Position, PositionedDataset, position_data
from tfmultigpu.data.sharded_dataset import ShardedDataset, distribute_dataset
from tfmultigpu.data.sources import tensors_of_arrays, to_dataset
from tfmultigpu.errors import DataError
from tfmultigpu.strategies.topology import describe


def check_steps(steps: Any, name: str = "steps") -> None:
    """Checks a number of batches, and that the caller is not inside a ``tf.function``."""
    if tf.inside_function():
        raise DataError(
            "fit, evaluate and predict read all data and return numbers, so they cannot run inside "
            "a tf.function. Call them outside. Inside, call a step of tmg.make_train_step, "
            "tmg.make_eval_step or tmg.make_predict_step."
        )
    if steps is not None:
        check_count(name, steps, other="None")


def labelled(data: Any, x: Any, y: Any, weight: Any, function: str) -> Any:
    """Returns the data of a call with Keras' arguments ``x``, ``y`` and ``sample_weight``."""
    if (data is None) == (x is None):
        raise TypeError(
            "fit, evaluate and predict take one data argument. Received: "
            f"{'none' if x is None else 'data beside x'}. Write tmg.{function}(model, data)."
        )
    data = x if data is None else data
    if y is not None and isinstance(data, tuple):
        raise DataError(
            "A tuple is (x, y), so it holds labels already. Received: a tuple of "
            f"{len(data)} beside y. Write tmg.{function}(model, (x, y)); or, for several inputs, "
            f"tmg.{function}(model, [first, second], y)."
        )
    for name, beside in (("y", y), ("sample_weight", weight)):
        if beside is None:
            continue
        is_pair = isinstance(data, tuple) and len(data) == 2
        if not _is_arrays(data) or not (name == "y" or is_pair):
            raise DataError(
                f"{name} works only for arrays (x, y). Received: {name} with data of type "
                f"{type(data).__name__}. Let the dataset yield (x, y) or (x, y, sample_weight)."
            )
        data = (data, beside) if name == "y" else (*data, beside)
    return data


def split_off(data: Any, validation_split: float) -> tuple[Any, Any]:
    """Splits arrays into the training part and the last part, for validation."""
    if not _is_arrays(data):
        raise DataError(
            "validation_split works only for arrays. Received: data of type "
            f"{type(data).__name__}. Split a dataset with take() and skip(), and give "
            "validation_data."
        )
    arrays = tensors_of_arrays(data)
    rows = int(count_rows(arrays))
    at = math.floor(rows * (1.0 - validation_split))
    if not 0 < at < rows:
        raise DataError(
            "validation_split is a fraction that leaves examples to train and to validate with. "
            f"Received: validation_split={validation_split} of {rows} examples."
        )
    return slice_rows(arrays, 0, at), slice_rows(arrays, at, rows)


def pass_feed(
    model: Any, purpose: str, data: Any, strategy: tf.distribute.Strategy,
    batch_size: int | None, steps: int | None,
) -> Feed:  # fmt: skip
    """Returns data for one pass after the other, each from its beginning.

    ``purpose`` is ``"validation"``, ``"evaluation"`` or ``"prediction"``; the model keeps a
    pipeline of arrays for each.
    """
    kind = PredictFeed if purpose == "prediction" else Feed
    if purpose == "validation" and isinstance(data, list):
        data = tuple(data)  # (x, y), as in Keras.
    if _is_arrays(data):
        arrays, size = tensors_of_arrays(data), _checked_size(batch_size)
        rows = int(count_rows(arrays))
        if not rows:
            raise no_batches(data)
        keep = functools.partial(get_or_make, model, purpose)
        repeats = purpose == "validation"  # One iterator for all passes, which is faster.
        batches = shard_arrays(arrays, size, strategy, keep, endless=repeats)
        return kind(data, batches, -(-rows // size), steps, repeats=repeats)
    own_size = None if purpose == "validation" else batch_size
    if isinstance(data, ShardedDataset):
        batches = _checked_shards(data, strategy, batch_size=own_size)
    else:
        batches = distribute_dataset(data, strategy, batch_size=own_size)
    name = "validation_steps" if purpose == "validation" else "steps"
    return kind(data, batches, _length(data, batches, steps, name), steps)


def training_feed(
    model: Any,
    data: Any,
    strategy: tf.distribute.Strategy,
    *,
    batch_size: int | None,
    steps: int | None,
    shuffle: bool,
    seed: int,
    first_pass: int,
    class_weight: Any,
    shares: Any,
    position: Position | None,
) -> Feed:
    """Returns the data of a training; see ``fit`` for its arguments.

    ``seed`` and the number of the pass, from ``first_pass`` on, decide about the order of arrays.
    ``position`` is where a training that can be resumed begins; None for any other.
    """
    if position is not None and steps is not None:
        raise DataError(
            "The training could be resumed only if an epoch is one pass over the data; "
            f"steps_per_epoch breaks that. Received: steps_per_epoch={steps} and a callback of "
            "tmg.Checkpoints. Give tmg.Checkpoints data=lambda epoch: dataset.shuffle(n, "
            "seed=epoch).batch(size).take(steps), and fit its data."
        )
    if not _is_arrays(data):
        if isinstance(data, ShardedDataset):
            arguments = {"batch_size": batch_size, "class_weight": class_weight, "shares": shares}
            batches = _checked_shards(data, strategy, **arguments)
        else:
            source = to_dataset(data, batch_size)
            if class_weight is not None:
                weigh = weighting(class_weight)
                source = source.map(weigh, num_parallel_calls=tf.data.AUTOTUNE)
            batches = distribute_dataset(source, strategy, shares=shares)
        per_pass = _length(data, batches, steps, "steps_per_epoch")
        if position is not None and not isinstance(batches, PositionedDataset):
            batches = position_data(batches, strategy, position, is_compared=False)
            batches.pass_over(position.epoch)
        return Feed(data, batches, per_pass, steps, continues=True, position=position)
    arrays = tensors_of_arrays(data)
    rows = int(count_rows(arrays))
    if not rows:
        raise no_batches(data)
    size = math.ceil(rows / steps) if batch_size is None and steps else _checked_size(batch_size)
    per_pass = math.ceil(rows / size)
    description: dict[str, Any] = {"rows": rows, "batch_size": size, "shuffle": shuffle}
    first_batch = first_pass * per_pass
    if position is not None:
        first_batch += position.epoch * per_pass + position.step
        description["digest"] = int(digest(arrays))
    batches = shard_arrays(
        arrays, size, strategy, functools.partial(get_or_make, model, "training on arrays"),
        shuffle=shuffle, seed=seed, first_batch=first_batch, class_weight=class_weight,
        shares=shares,
    )  # fmt: skip
    return Feed(
        data, batches, per_pass, steps, continues=True, repeats=True, description=description
    )


def _checked_shards(
    data: ShardedDataset, strategy: tf.distribute.Strategy, **arguments: Any
) -> ShardedDataset:
    """Checks data that is already distributed, and that no argument would change it."""
    if data.strategy is not strategy:
        raise DataError(
            "The data was distributed for another strategy than that of the model. Received: data "
            f"for {describe(data.strategy)}; a model of {describe(strategy)}. Give the dataset "
            "itself, or write tmg.distribute_dataset(dataset, strategy)."
        )
    for name, value in arguments.items():
        if value is not None:
            raise DataError(
                f"The data is already distributed, so {name} cannot be applied. Received: "
                f"{name}={value!r}. Give the dataset itself, or leave {name} out."
            )
    return data


def _checked_size(batch_size: Any) -> int:
    """Returns the examples of a global batch of arrays; None means 32, as in Keras."""
    return 32 if batch_size is None else check_count("batch_size", batch_size, error=DataError)


def _length(data: Any, batches: ShardedDataset, steps: int | None, name: str) -> int | None:
    """Returns the batches of a pass, None if unknown; a pass without end needs ``steps``."""
    batches_of_pass = batches.cardinality()
    if batches_of_pass >= 0:
        return batches_of_pass
    # A PyDataset knows its length, and that it has no end; the generator made of it does not.
    own = getattr(data, "num_batches", 0)
    if steps is None and (own is None or batches_of_pass == tf.data.INFINITE_CARDINALITY):
        raise DataError(
            "The data has no end, so a pass over it would never finish. Received: "
            f"{type(data).__name__} and {name}=None. Write {name}=100, or leave out .repeat()."
        )
    return int(own) if own else None


def _is_arrays(data: Any) -> bool:
    """Returns whether data consists of arrays, which need a batch size."""
    if isinstance(data, (tf.data.Dataset, tf.data.Iterator, tf.distribute.DistributedDataset)):
        return False
    kinds = (bool, int, float, str, tf.RaggedTensor, tf.SparseTensor)
    return all(
        leaf is None or hasattr(leaf, "__array__") or isinstance(leaf, kinds)
        for leaf in tf.nest.flatten(data)
    )
