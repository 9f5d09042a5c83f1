"""Losses that layers add: which are means over the rows of a batch, and which are sums.

Keras adds up whatever ``add_loss`` is given and asks nothing else of it, so a layer may add a mean
over its rows, a sum over them, or one value per row, which Keras sums. Over replicas a mean is
weighted by the rows of each, and a sum is just added. The value alone does not tell them apart.
A trial does: for a batch in which every row is there twice, a mean stays and a sum doubles.
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
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import any_rows, take
from tfmultigpu.losses.loss_sum import LossTerm
from tfmultigpu.losses.trials import beside, made_up

__all__ = ["AddedLosses", "mean_term"]

_log = logging.getLogger("tfmultigpu")

_ROWS = 4
_SEEDS = (0, 1)  # Of the made-up batches.
_NEAR = 0.02  # Allows for what float16 and bfloat16 round.
_DRAWS = 16  # Calls that are averaged where numbers are drawn that a trial cannot hold still.
_NOTHING = 1e-30


class AddedLosses:
    """Turns what the layers of one model add into terms of the loss.

    What is a sum over rows is found out once, when the model is first traced, from made-up data:
    the same on every replica and worker. A trial changes no variable, seed or metric. What is
    neither a mean nor a sum over rows, or cannot be tried, counts as a mean.
    """

    def __init__(self) -> None:
        """Knows nothing yet."""
        self._sums: dict[Any, tuple[bool, ...]] = {}

    def terms(
        self,
        values: Sequence[Any],
        shard: Any,
        model: Any,
        training: bool,
        added: Callable[[Any, bool], Sequence[Any]],
    ) -> list[LossTerm]:
        """Returns the terms for what the layers of a model added for one shard.

        Args:
            values: What they added.
            shard: The shard.
            model: The model.
            training: Whether it was called to train.
            added: Calls the model on a shard, training or not, and returns what its layers add.
        """
        if not values:
            return []
        key = training, tuple([value.shape.rank for value in values])
        if key not in self._sums:
            self._sums[key] = _are_sums(values, shard, model, lambda batch: added(batch, training))
        rows = partition.count_rows(shard)
        return [
            _sum_term(value) if is_sum else mean_term(value, rows)
            for value, is_sum in zip(values, self._sums[key], strict=True)
        ]


def mean_term(value: Any, rows: Any) -> LossTerm:
    """Returns the term for a loss that a layer computed as a mean over the shard."""
    value = _at_least_float32(value)
    rows = tf.cast(rows, value.dtype)
    return LossTerm(tf.reduce_sum(value) * rows, rows, per_row=1.0, added=True)


def _sum_term(value: Any) -> LossTerm:
    """Returns the term for a loss that a layer computed as a sum, or has one of for each row."""
    total = tf.reduce_sum(_at_least_float32(value))
    return LossTerm(total, tf.ones_like(total), fixed=True, added=True)


def _at_least_float32(value: Any) -> Any:
    return tf.cast(value, tf.float64 if value.dtype == tf.float64 else tf.float32)


def _are_sums(
    values: Sequence[Any], shard: Any, model: Any, added: Callable[[Any], Sequence[Any]]
) -> tuple[bool, ...]:
    try:
        found = beside(lambda: _Trial(shard, model, added).sums(len(values)))
    except Exception as error:  # Code of the user's own may raise anything on made-up data.
        _log.info("The losses that layers add could not be tried, and count as means: %s", error)
        found = [None] * len(values)
    return tuple(
        [_has_rows(v) if one is None else one for v, one in zip(values, found, strict=True)]
    )


def _has_rows(value: Any) -> bool:
    """Whether a value has an axis whose length is open while a step is traced, as rows have."""
    return bool(value.shape.rank) and value.shape[0] is None


class _Trial:
    """Calls of a model on made-up batches, with each row once and with each row twice."""

    def __init__(self, shard: Any, model: Any, added: Callable[[Any], Sequence[Any]]) -> None:
        """Takes a shard for its kind, the model, and what returns the losses its layers add."""
        self._model = model
        self._added = added
        self._structure = tf.nest.map_structure(lambda _: None, shard)
        self._specs = [any_rows(leaf) for leaf in tf.nest.flatten(shard)]

    def sums(self, count: int) -> list[bool | None]:
        """Returns whether each of ``count`` values is a sum over rows; None where that is open."""
        found: list[bool | None] = [None] * count
        # A value that is zero says nothing; it may not be with other weights.
        for shaken in (False, True):
            call = self._compiled(shaken)
            for seed in _SEEDS:
                tried = _compare(call, self._batch(seed, 1), self._batch(seed, 2))
                found = [a if b is None else b for a, b in zip(tried, found, strict=True)]
                if None not in found:
                    return found
        return found

    def _compiled(self, shaken: bool) -> Callable[[list[Any]], list[float]]:
        """The values as a function of the tensors of a batch, and nothing that only has effects."""
        signature = tf.nest.flatten([one for one in self._specs if one is not None], True)
        seeds = _fixed_seeds()

        def function(*tensors: Any) -> Any:
            given = iter(tensors)
            leaves = [None if spec is None else take(spec, given) for spec in self._specs]
            with _without_effects(_shaken(self._model) if shaken else [], seeds):
                values = self._added(tf.nest.pack_sequence_as(self._structure, leaves))
            return [tf.reduce_sum(tf.cast(value, tf.float64)) for value in values]

        wrapped = tf.compat.v1.wrap_function(function, signature)
        pruned = wrapped.prune(wrapped.inputs[: len(signature)], wrapped.outputs)
        return lambda tensors: [float(value) for value in pruned(*tensors)]

    def _batch(self, seed: int, times: int) -> list[Any]:
        made = [
            made_up(spec, _ROWS, seed + i, times)
            for i, spec in enumerate(self._specs)
            if spec is not None
        ]
        return list(tf.nest.flatten(made, expand_composites=True))


def _compare(call: Callable[[list[Any]], list[float]], once: Any, twice: Any) -> list[bool | None]:
    """Whether values double with the rows; None where they are nothing, or no numbers."""
    first, second = call(once), call(twice)
    usable = [
        math.isfinite(a + b) and abs(a) > _NOTHING for a, b in zip(first, second, strict=True)
    ]
    ratios = [b / a if good else math.nan for a, b, good in zip(first, second, usable, strict=True)]
    near = all(abs(ratio - round(ratio)) < _NEAR for ratio in ratios if not math.isnan(ratio))
    if not near and call(once) != first:
        # Numbers are drawn, by something that does not look up how: so the means of many calls.
        sums = [
            [sum(values) for values in zip(*[call(batch) for _ in range(_DRAWS)], strict=True)]
            for batch in (once, twice)
        ]
        ratios = [b / a if good else math.nan for a, b, good in zip(*sums, usable, strict=True)]
        return [None if math.isnan(ratio) else 1.5 < ratio < 2.5 for ratio in ratios]
    return [None if math.isnan(ratio) else abs(ratio - 2) < _NEAR for ratio in ratios]


def _fixed_seeds() -> Any:
    """What draws without a seed draw from in a trial; Keras would take a number from Python's."""
    import keras

    return keras.random.SeedGenerator(0)


@contextlib.contextmanager
def _without_effects(values: Sequence[tuple[Any, Any]], seeds: Any) -> Iterator[None]:
    """Keeps variables as they are while the context lasts, and draws the same for every row."""
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


def _shaken(model: Any) -> list[tuple[Any, Any]]:
    """The trained variables with other values, none of them zero."""
    return [
        (variable, variable.value + tf.cast(0.1 * (1 + index % 3), variable.dtype))
        for index, variable in enumerate(model.trainable_variables)
        if tf.as_dtype(variable.dtype).is_floating
    ]


_SHAPED = ("stateless_uniform", "stateless_normal", "stateless_truncated_normal")


def _same_for_every_row(original: Any, shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Draws for one row, or what stands on the first axis, and repeats that."""
    shape = tf.convert_to_tensor(shape, tf.int32)
    one = tf.concat([tf.minimum(shape[:1], 1), shape[1:]], 0)
    return tf.broadcast_to(original(one, *args, **kwargs), shape)
