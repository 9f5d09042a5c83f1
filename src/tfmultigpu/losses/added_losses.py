"""Losses that layers add: tells means over the rows of a batch from sums.

Keras only adds up what ``add_loss`` receives. A layer may add a mean over its rows, a sum over
them, or one value per row, which Keras sums. Over replicas a mean is weighted by the rows of each
replica, and a sum is just added. The value alone does not tell which it is. A trial does: if every
row of a batch occurs twice, a mean stays the same and a sum doubles.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._compat import dropout_drawn_by
from tfmultigpu.accumulation.loss_sum import LossTerm
from tfmultigpu.data.batch_format import any_rows, count_rows, take
from tfmultigpu.losses.trials import run_in_thread, synthetic_data

__all__ = ["AddedLosses", "mean_term"]

_log = logging.getLogger("tfmultigpu")

_ROWS = 4
_SEEDS = (0, 1)  # Of the synthetic batches.
_TOLERANCE = 0.02  # Allows for the rounding of float16 and bfloat16.
_CALLS = 16  # If random numbers differ from call to call.
_ZERO = 1e-30


class AddedLosses:
    """Losses that the layers of one model add, converted to terms of the step's loss.

    When the model is first traced, a trial on synthetic data finds the sums over rows. The result
    is the same on every replica and worker. A trial changes no variable, seed or metric. A loss
    that is neither a mean nor a sum over rows, or that cannot be tried, counts as a mean.
    """

    def __init__(self) -> None:
        """Creates the object before any trial."""
        self._sums: dict[Any, tuple[bool, ...]] = {}

    def terms(
        self,
        values: Sequence[Any],
        shard: Any,
        model: Any,
        training: bool,
        added: Callable[[Any, bool], Sequence[Any]],
    ) -> list[LossTerm]:
        """Returns the terms of the losses that the layers of a model added for one shard.

        Args:
            values: The losses.
            shard: The shard.
            model: The model.
            training: Whether the model was called to train.
            added: ``f(shard, training)``, which calls the model and returns the losses its layers
                add.
        """
        if not values:
            return []
        key = training, tuple([value.shape.rank for value in values])
        if key not in self._sums:
            self._sums[key] = _are_sums(values, shard, model, lambda batch: added(batch, training))
        rows = count_rows(shard)
        return [
            _sum_term(value) if is_sum else mean_term(value, rows)
            for value, is_sum in zip(values, self._sums[key], strict=True)
        ]


def mean_term(value: Any, rows: Any) -> LossTerm:
    """Returns the term of a loss that a layer computed as a mean over the shard."""
    value = _at_least_float32(value)
    rows = tf.cast(rows, value.dtype)
    return LossTerm(tf.reduce_sum(value) * rows, rows, per_row=1.0, added=True)


def _sum_term(value: Any) -> LossTerm:
    """Returns the term of a loss that a layer computed as a sum or as one value per row."""
    total = tf.reduce_sum(_at_least_float32(value))
    return LossTerm(total, tf.ones_like(total), fixed=True, added=True)


def _at_least_float32(value: Any) -> Any:
    return tf.cast(value, tf.float64 if value.dtype == tf.float64 else tf.float32)


def _are_sums(
    values: Sequence[Any], shard: Any, model: Any, added: Callable[[Any], Sequence[Any]]
) -> tuple[bool, ...]:
    try:
        found = run_in_thread(lambda: _Trial(shard, model, added).sums(len(values)))
    except Exception as error:  # User code may raise anything on synthetic data.
        _log.info("The losses that layers add could not be tried and count as means: %s", error)
        found = [None] * len(values)
    return tuple(
        [_has_rows(v) if one is None else one for v, one in zip(values, found, strict=True)]
    )


def _has_rows(value: Any) -> bool:
    """Returns whether the first axis of a value has an unknown length, as the axis of rows has."""
    return bool(value.shape.rank) and value.shape[0] is None


class _Trial:
    """Calls of a model on synthetic batches, with each row once and with each row twice."""

    def __init__(self, shard: Any, model: Any, added: Callable[[Any], Sequence[Any]]) -> None:
        """Stores the model, the type specs of a shard, and the function for added losses."""
        self._model = model
        self._added = added
        self._structure = tf.nest.map_structure(lambda _: None, shard)
        self._specs = [any_rows(leaf) for leaf in tf.nest.flatten(shard)]

    def sums(self, count: int) -> list[bool | None]:
        """Returns whether each of ``count`` values is a sum over rows; None if unknown."""
        found: list[bool | None] = [None] * count
        # A zero tells nothing; with other weights the value may differ from zero.
        for other_weights in (False, True):
            call = self._compiled(other_weights)
            for seed in _SEEDS:
                tried = _compare(call, self._batch(seed, 1), self._batch(seed, 2))
                found = [a if b is None else b for a, b in zip(tried, found, strict=True)]
                if None not in found:
                    return found
        return found

    def _compiled(self, other_weights: bool) -> Callable[[list[Any]], list[float]]:
        """Returns a function from the tensors of a batch to the values, without side effects."""
        signature = tf.nest.flatten([one for one in self._specs if one is not None], True)
        seeds = _fixed_seeds()

        def function(*tensors: Any) -> Any:
            given = iter(tensors)
            leaves = [None if spec is None else take(spec, given) for spec in self._specs]
            with _without_effects(_other_weights(self._model) if other_weights else [], seeds):
                values = self._added(tf.nest.pack_sequence_as(self._structure, leaves))
            return [tf.reduce_sum(tf.cast(value, tf.float64)) for value in values]

        wrapped = tf.compat.v1.wrap_function(function, signature)
        pruned = wrapped.prune(wrapped.inputs[: len(signature)], wrapped.outputs)
        return lambda tensors: [float(value) for value in pruned(*tensors)]

    def _batch(self, seed: int, times: int) -> list[Any]:
        made = [
            synthetic_data(spec, _ROWS, seed + i, times)
            for i, spec in enumerate(self._specs)
            if spec is not None
        ]
        return list(tf.nest.flatten(made, expand_composites=True))


def _compare(call: Callable[[list[Any]], list[float]], once: Any, twice: Any) -> list[bool | None]:
    """Returns whether each value doubles with the rows; None for a zero or a NaN."""
    first, second = call(once), call(twice)
    usable = [math.isfinite(a + b) and abs(a) > _ZERO for a, b in zip(first, second, strict=True)]
    ratios = [b / a if good else math.nan for a, b, good in zip(first, second, usable, strict=True)]
    near = all(abs(ratio - round(ratio)) < _TOLERANCE for ratio in ratios if not math.isnan(ratio))
    if not near and call(once) != first:
        # Some random numbers cannot be replaced: compare the means of many calls.
        sums = [
            [sum(values) for values in zip(*[call(batch) for _ in range(_CALLS)], strict=True)]
            for batch in (once, twice)
        ]
        ratios = [b / a if good else math.nan for a, b, good in zip(*sums, usable, strict=True)]
        return [None if math.isnan(ratio) else 1.5 < ratio < 2.5 for ratio in ratios]
    return [None if math.isnan(ratio) else abs(ratio - 2) < _TOLERANCE for ratio in ratios]


def _fixed_seeds() -> Any:
    """Returns a generator for unseeded draws; Keras would seed its own from Python's."""
    import keras

    return keras.random.SeedGenerator(0)


@contextlib.contextmanager
def _without_effects(values: Sequence[tuple[Any, Any]], seeds: Any) -> Iterator[None]:
    """Keeps variables unchanged in the context, and draws the same numbers for every row."""
    import keras

    draws: dict[str, Callable[..., Any]] = dict.fromkeys(_SHAPED, _same_for_every_row)
    draws |= {
        "stateless_dropout": dropout_drawn_by(_same_for_every_row),
        "global_seed_generator": lambda _: seeds,
    }
    with (
        keras.StatelessScope(state_mapping=values, initialize_variables=False),
        _compat.replacing_draws(draws),
    ):
        yield


def _other_weights(model: Any) -> list[tuple[Any, Any]]:
    """Returns the trained variables with other values."""
    return [
        (variable, variable.value + tf.cast(0.1 * (1 + index % 3), variable.dtype))
        for index, variable in enumerate(model.trainable_variables)
        if tf.as_dtype(variable.dtype).is_floating
    ]


_SHAPED = ("stateless_uniform", "stateless_normal", "stateless_truncated_normal")


def _same_for_every_row(original: Any, shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Draws for the first index of the first axis, and repeats that for every row."""
    shape = tf.convert_to_tensor(shape, tf.int32)
    one = tf.concat([tf.minimum(shape[:1], 1), shape[1:]], 0)
    return tf.broadcast_to(original(one, *args, **kwargs), shape)
