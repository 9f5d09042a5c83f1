"""Random draws of layers: each replica draws its rows of what one device draws for the batch.

All replicas hold the same seeds, so left alone they would draw the same numbers: one dropout mask,
repeated for each shard. A generator of TensorFlow counts: number ``i`` of a draw depends on the
seed and ``i`` alone. The rows of a replica in the draw for the global batch can therefore be drawn
by themselves, at the cost of any other numbers, by starting to count further on.

A draw is taken to be *by row* where the length of its first axis is open while the step is traced,
as that of every batch is. A draw of known shape, such as one factor for all rows, stays as it is:
the same on every replica, which is what one device draws. Rows that a model joins or tiles are not
told from several places of one row, so their draws are not those of one device; the first step says
so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._compat import dropout_drawn_by
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.steps.batch_function import Shards
from tfmultigpu.steps.batch_norm import moments_of_replicas
from tfmultigpu.steps.draw_places import Places, as_shape, is_by_row
from tfmultigpu.steps.seeds import GlobalSeeds

__all__ = [
    "ReplicaRows",
    "drawing_rows",
]

_AUTOMATIC = (None, 3, "auto_select")  # Philox on a CPU or GPU, compiled by XLA or not.


@dataclasses.dataclass(frozen=True)
class ReplicaRows:
    """The rows of a global batch that a replica computes.

    Functions, so that a model that draws nothing gets no operations for it.

    Attributes:
        first: Returns the number of the first row, an int64 scalar.
        count: Returns how many rows, an int64 scalar.
        total: Returns the rows of the global batch, an int64 scalar.
        seeds: What draws without a seed draw from.
        are_all: Whether these are all rows.
        counts_on: Whether the generator of the device can start to count further on; else a draw is
            made for all rows and cut, which costs as many times more as there are replicas.
        by_xla: Whether XLA compiles the draws, which makes normal ones pair numbers by the shape of
            the whole draw: they are made for all rows too.
    """

    first: Callable[[], Any]
    count: Callable[[], Any]
    total: Callable[[], Any]
    seeds: GlobalSeeds
    are_all: bool = False
    counts_on: bool = True
    by_xla: bool = False

    @classmethod
    def of(
        cls, shards: Shards, shard: Any, seeds: GlobalSeeds, *, by_xla: bool = False
    ) -> ReplicaRows:
        """Returns the rows of the replica it is called on.

        Args:
            shards: The global batch.
            shard: The part of it on this replica.
            seeds: What draws without a seed draw from.
            by_xla: Whether XLA compiles the draws.
        """
        context = tf.distribute.get_replica_context()
        alone = context.strategy.num_replicas_in_sync == 1
        replica = 0 if alone else context.replica_id_in_sync_group
        devices = () if alone else context.strategy.extended.worker_devices
        return cls(
            first=lambda: shards.first_row(replica),
            count=lambda: count_rows(shard),
            total=lambda: shards.global_rows,
            seeds=seeds,
            are_all=alone,
            counts_on=not any("TPU" in name for name in devices),
            by_xla=by_xla,
        )

    def part(self, batch: Any, parts: int, part: Any) -> ReplicaRows:
        """Returns the rows of one of ``parts`` micro-batches of these.

        Args:
            batch: The shard.
            parts: Into how many parts it is cut.
            part: Which one, an integer scalar.
        """

        def bounds() -> tuple[Any, Any]:
            return partition.part_bounds(count_rows(batch), parts, part)

        return dataclasses.replace(
            self,
            first=lambda: self.first() + bounds()[0],
            count=lambda: bounds()[1] - bounds()[0],
            are_all=False,
        )

    def are_copies(self, replicas: int) -> Any:
        """Returns whether each replica holds all rows, because they are too few: a bool scalar."""
        return self.total() < replicas


def drawing_rows(held: ReplicaRows) -> AbstractContextManager[None]:
    """Makes layers called on this thread draw their rows of the draws for the global batch.

    Synchronized batch normalization behind masks, which Keras does not synchronize, is it as well.
    Where the first axis of a draw is not a multiple of the rows when it runs, it is no draw by row
    after all, and is made as it is.

    Args:
        held: The rows this replica computes.
    """
    if held.are_all:
        return nullcontext()
    replacements: dict[str, Callable[..., Any]] = {
        "stateless_uniform": _uniform,
        "stateless_random_uniform": _uniform,
        "stateless_normal": _normal,
        "stateless_truncated_normal": _truncated_normal,
        "stateless_categorical": _categorical,
        "stateless_gamma": _gamma,
        "stateless_binomial": _binomial,
        "stateless_poisson": _poisson,
        "stateless_parameterized_truncated_normal": _parameterized_truncated_normal,
    }
    by_row: dict[str, Callable[..., Any]] = {
        name: functools.partial(draw, held) for name, draw in replacements.items()
    }
    by_row["stateless_dropout"] = dropout_drawn_by(by_row["stateless_uniform"])
    others: dict[str, Callable[..., Any]] = {
        "global_seed_generator": held.seeds.on_replica,
        "next": held.seeds.next_of,
        "_moments": moments_of_replicas,
    }
    return _compat.replacing_draws({**by_row, **others})


# Numbers that are drawn by counting on -----------------------------------------------------------


def _uniform(
    held: ReplicaRows,
    original: Any,
    shape: Any,
    seed: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = tf.float32,
    name: Any = None,
    alg: Any = "auto_select",
) -> Any:
    dtype = tf.as_dtype(dtype)
    shape = as_shape(shape)
    wrong = dtype.is_integer and (minval is None) != (maxval is None)
    if wrong or not is_by_row(shape):
        return original(shape, seed, minval, maxval, dtype, name, alg)
    if not dtype.is_integer:
        maxval = 1 if maxval is None else maxval
        low, high = tf.convert_to_tensor(minval, dtype), tf.convert_to_tensor(maxval, dtype)
        sample = functools.partial(tf.raw_ops.StatelessRandomUniformV2, dtype=dtype)
        whole = functools.partial(original, dtype=dtype, alg=alg)
        return _draw(held, sample, whole, shape, seed, dtype, alg) * (high - low) + low
    whole = functools.partial(original, minval=minval, maxval=maxval, dtype=dtype, alg=alg)
    if minval is None:
        sample = functools.partial(tf.raw_ops.StatelessRandomUniformFullIntV2, dtype=dtype)
    else:
        low, high = tf.convert_to_tensor(minval, dtype), tf.convert_to_tensor(maxval, dtype)
        sample = functools.partial(tf.raw_ops.StatelessRandomUniformIntV2, minval=low, maxval=high)
    return _draw(held, sample, whole, shape, seed, dtype, alg)


def _normal(
    held: ReplicaRows,
    original: Any,
    shape: Any,
    seed: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = tf.float32,
    name: Any = None,
    alg: Any = "auto_select",
) -> Any:
    dtype = tf.as_dtype(dtype)
    shape = as_shape(shape)
    if not is_by_row(shape):
        return original(shape, seed, mean, stddev, dtype, name, alg)
    held = dataclasses.replace(held, counts_on=held.counts_on and not held.by_xla)
    sample = functools.partial(tf.raw_ops.StatelessRandomNormalV2, dtype=dtype)
    whole = functools.partial(original, dtype=dtype, alg=alg)
    drawn = _draw(held, sample, whole, shape, seed, dtype, alg)
    return drawn * tf.convert_to_tensor(stddev, dtype) + tf.convert_to_tensor(mean, dtype)


def _draw(
    held: ReplicaRows, sample: Any, whole: Any, shape: Any, seed: Any, dtype: tf.DType, alg: Any
) -> Any:
    """Draws rows of unit numbers: by counting on where that is possible, else from all rows."""
    if not held.counts_on or alg not in _AUTOMATIC:
        return _cut(held, lambda shape: whole(shape, seed), shape)
    # One count makes 128 bits: four numbers, also where a number takes 16 bits, or two.
    group = 2 if dtype.size == 8 else 4
    # Multiplied one by one: a GPU computes tf.reduce_prod itself, and all would wait for it.
    inner: Any = math.prod([shape[axis] for axis in range(1, shape.shape[0])], start=tf.constant(1))
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    places = Places.of(held, shape)
    counts = tf.cast(places.first, tf.int64) * tf.cast(inner, tf.int64) // group
    # In 32 bits, which GPUs keep where shapes and slices are decided; hence the remainders first.
    begin = (places.first % group) * (inner % group) % group
    further = tf.bitcast(counter, tf.int64) + tf.stack([counts, tf.zeros_like(counts)])
    # A little more than needed always, because XLA must know the size when it compiles.
    numbers = sample(
        shape=[places.size * inner + (group - 1)],
        key=key,
        counter=tf.bitcast(further, tf.uint64),
        alg=3,
    )
    return tf.reshape(tf.slice(numbers, [begin], [places.size * inner]), shape)


# Numbers that are drawn for all rows --------------------------------------------------------------


def _truncated_normal(
    held: ReplicaRows,
    original: Any,
    shape: Any,
    seed: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = tf.float32,
    name: Any = None,
    alg: Any = "auto_select",
) -> Any:
    dtype = tf.as_dtype(dtype)
    shape = as_shape(shape)
    if not is_by_row(shape):
        return original(shape, seed, mean, stddev, dtype, name, alg)
    # How much is counted for one of these numbers differs between XLA and the rest.
    drawn = _cut(held, lambda shape: original(shape, seed, dtype=dtype, alg=alg), shape)
    return drawn * tf.convert_to_tensor(stddev, dtype) + tf.convert_to_tensor(mean, dtype)


def _categorical(
    held: ReplicaRows,
    original: Any,
    logits: Any,
    num_samples: Any,
    seed: Any,
    dtype: Any = tf.int64,
    name: Any = None,
) -> Any:
    logits = tf.convert_to_tensor(logits)
    if not is_by_row(tf.shape(logits)):
        return original(logits, num_samples, seed, dtype, name)
    places = Places.of(held, tf.shape(logits))
    return places.cut(original(places.spread(logits, 0), num_samples, seed, dtype, name))


def _gamma(
    held: ReplicaRows,
    original: Any,
    shape: Any,
    seed: Any,
    alpha: Any,
    beta: Any = None,
    dtype: Any = tf.float32,
    name: Any = None,
) -> Any:
    shape = as_shape(shape)
    if not is_by_row(shape):
        return original(shape, seed, alpha, beta, dtype, name)
    alpha = tf.convert_to_tensor(alpha, dtype)
    if beta is not None:
        beta = tf.convert_to_tensor(beta, dtype)
        both = tf.broadcast_dynamic_shape(tf.shape(alpha), tf.shape(beta))
        alpha = tf.broadcast_to(alpha, both)
        beta = _parameter(held, tf.broadcast_to(beta, both), shape)
    alpha = _parameter(held, alpha, shape)
    return _cut(held, lambda shape: original(shape, seed, alpha, beta, dtype, name), shape)


def _binomial(
    held: ReplicaRows,
    original: Any,
    shape: Any,
    seed: Any,
    counts: Any,
    probs: Any,
    output_dtype: Any = tf.int32,
    name: Any = None,
) -> Any:
    shape = as_shape(shape)
    if not is_by_row(shape):
        return original(shape, seed, counts, probs, output_dtype, name)
    probs = tf.convert_to_tensor(probs, dtype_hint=tf.float32)
    counts = tf.convert_to_tensor(counts, dtype_hint=probs.dtype)
    probs, counts = _parameter(held, probs, shape), _parameter(held, counts, shape)

    def draw(shape: Any) -> Any:
        return original(shape, seed, counts, probs, output_dtype, name)

    return _cut(held, draw, shape)


def _poisson(
    held: ReplicaRows,
    original: Any,
    shape: Any,
    seed: Any,
    lam: Any,
    dtype: Any = tf.int32,
    name: Any = None,
) -> Any:
    shape = as_shape(shape)
    if not is_by_row(shape):
        return original(shape, seed, lam, dtype, name)
    lam = _parameter(held, tf.convert_to_tensor(lam, dtype_hint=tf.float32), shape)
    return _cut(held, lambda shape: original(shape, seed, lam, dtype, name), shape)


def _parameterized_truncated_normal(
    held: ReplicaRows,
    original: Any,
    shape: Any,
    seed: Any,
    means: Any = 0.0,
    stddevs: Any = 1.0,
    minvals: Any = -2.0,
    maxvals: Any = 2.0,
    name: Any = None,
) -> Any:
    given = (means, stddevs, minvals, maxvals)
    shape = as_shape(shape)
    if not is_by_row(shape):
        return original(shape, seed, *given, name)
    fillings = (0.0, 1.0, -2.0, 2.0)
    parameters = [
        _parameter(held, tf.convert_to_tensor(one), shape, filling)
        for one, filling in zip(given, fillings, strict=True)
    ]
    return _cut(held, lambda shape: original(shape, seed, *parameters, name), shape)


def _cut(held: ReplicaRows, draw: Callable[[Any], Any], shape: Any) -> Any:
    """Draws for the rows of the global batch and returns those of this replica."""
    places = Places.of(held, shape)
    drawn = draw(tf.concat([[places.total], shape[1:]], 0))
    return tf.reshape(places.cut(drawn), shape)


def _parameter(held: ReplicaRows, parameter: Any, shape: Any, filling: Any = 1) -> Any:
    """A parameter of a distribution, which may have rows, for a draw for all rows."""
    if parameter.shape.rank != shape.shape[0] or parameter.shape[0] == 1:
        return parameter
    inner = tf.shape(parameter)[1:]
    for_rows = tf.broadcast_to(
        parameter, tf.concat([shape[:1], inner], 0)
    )  # It may be one for all.
    return Places.of(held, shape).spread(for_rows, filling)
