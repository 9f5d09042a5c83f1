"""Batches of arrays as shards, from a pipeline that is traced once per model and type of arrays.

Tracing the functions of a pipeline takes longer than a short epoch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.addons.loops.cache import get_or_make
from tfmultigpu.addons.loops.class_weights import weighting
from tfmultigpu.data.batch_format import any_rows, count_rows, tensors_of
from tfmultigpu.data.element_layout import ShardLayout, structure_of
from tfmultigpu.data.partition import slice_rows, take_rows
from tfmultigpu.data.sharded_dataset import ShardedDataset, cutter
from tfmultigpu.data.shares import replica_shares
from tfmultigpu.data.sources import fill

__all__ = ["shard_arrays"]


def shard_arrays(
    model: Any,
    purpose: str,
    strategy: tf.distribute.Strategy,
    arrays: Any,
    batch_size: int,
    *,
    endless: bool = True,
    shuffle: bool = False,
    seed: int = 0,
    first_batch: int = 0,
    class_weight: Any = None,
    shares: Sequence[float] | None = None,
) -> ShardedDataset:
    """Returns the global batches of arrays with rows, as shards for the replicas.

    Args:
        model: The model, which keeps one traced pipeline for each ``purpose``.
        purpose: What the batches are for.
        strategy: The strategy of the model.
        arrays: Nested structure of tensors, or None, that agree in their rows.
        batch_size: Examples of a global batch.
        endless: Whether pass follows pass; otherwise there is one, in the order of the arrays.
        shuffle: Whether to reshuffle in each pass, by ``seed`` and the number of the pass.
        seed: Determines the order.
        first_batch: The number of the first batch, counted through all passes.
        class_weight: Weights of classes, or None.
        shares: Relative share of each global batch per replica, or None.
    """
    import keras

    whole_shares = replica_shares(shares, strategy.num_replicas_in_sync)
    present = tensors_of(arrays)
    specs = [any_rows(one) for one in present]
    structure = tf.nest.map_structure(lambda one: None if one is None else 0, arrays)
    weigh, weights = None, None
    if class_weight is not None:
        weigh = weighting(class_weight)
        weights = dict(class_weight), keras.config.floatx()

    def pipeline(tensors: Any, seed: Any, first_batch: Any) -> Any:
        whole = fill(structure, *tensors)

        def batches(finish: Callable[..., Any] | None) -> tf.data.Dataset[Any]:
            if endless:
                return _passes_over(whole, batch_size, shuffle, seed, first_batch, finish)
            return _in_order(whole, batch_size, finish)

        uncut = batches(weigh)
        layout = ShardLayout(strategy, uncut.element_spec, on_devices=False)
        if layout.whole:
            return uncut, uncut
        cut = cutter(layout, whole_shares)
        if weigh is None:
            return uncut, batches(cut)
        return uncut, batches(lambda *batch: cut(*weigh(*batch)))

    def trace() -> Any:
        scalar = tf.TensorSpec([], tf.int64)
        # Made once: TensorFlow would warn of a trace for each model.
        return tf.function(pipeline, autograph=False).get_concrete_function(specs, scalar, scalar)

    kind = structure_of(arrays), specs
    key = strategy, whole_shares, kind, batch_size, endless, shuffle, weights
    traced = get_or_make(model, purpose, key, trace)
    batches, cut = traced(present, *(tf.constant(one, tf.int64) for one in (seed, first_batch)))
    return ShardedDataset(batches, strategy, whole_shares, cut=cut)


def _passes_over(
    arrays: Any, batch_size: int, shuffle: bool, seed: Any, first_batch: Any, finish: Any
) -> tf.data.Dataset[Any]:
    """Returns pass after pass over arrays, in global batches, from the batch of a number on."""
    present = tuple(tensors_of(arrays))
    rows = tf.cast(count_rows(arrays), tf.int64)
    per_pass = -(-rows // batch_size)
    numbers = tf.data.Dataset.counter(first_batch)
    rows_from = functools.partial(_rows_from, arrays, batch_size)
    if not shuffle:
        return numbers.map(
            _finished(lambda number: rows_from(number % per_pass * batch_size), finish)
        )
    shuffled: Any = tf.random

    def choose(state: Any, number: Any) -> tuple[Any, Any]:
        drawn_for, order = state
        order = tf.cond(
            number // per_pass == drawn_for,
            lambda: order,
            lambda: shuffled.experimental.stateless_shuffle(
                tf.range(rows), seed=tf.stack([seed, number // per_pass])
            ),
        )
        start = number % per_pass * batch_size
        return (number // per_pass, order), order[start : start + batch_size]

    # No flat_map: TensorFlow optimizes a function inside a function twice for each iterator.
    chosen = numbers.scan((tf.constant(-1, tf.int64), tf.zeros([rows], tf.int64)), choose)
    return chosen.map(
        _finished(lambda chosen: fill(arrays, *[take_rows(o, chosen) for o in present]), finish),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )


def _in_order(arrays: Any, batch_size: int, finish: Any) -> tf.data.Dataset[Any]:
    starts = tf.data.Dataset.range(0, tf.cast(count_rows(arrays), tf.int64), batch_size)
    return starts.map(_finished(functools.partial(_rows_from, arrays, batch_size), finish))


def _rows_from(arrays: Any, rows: int, start: Any) -> Any:
    return slice_rows(arrays, start, start + rows)


def _finished(batch: Callable[..., Any], finish: Callable[..., Any] | None) -> Any:
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def element(*given: Any) -> Any:
        made = batch(*given)
        if finish is None:
            return made
        # As tf.data does: only a tuple is several arguments.
        return finish(*made) if type(made) is tuple else finish(made)

    return element
