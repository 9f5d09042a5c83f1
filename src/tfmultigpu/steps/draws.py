"""Random draws of layers: each replica draws its rows of what one device draws for the batch.

All replicas have the same seeds, so by themselves they would draw the same numbers: one dropout
mask, repeated for each shard. TensorFlow's generator counts: number ``i`` of a draw depends on the
seed and ``i`` alone. So a replica can draw its rows of the draw for the global batch, and no other
numbers, by starting to count further on.

A draw is *by row* if the length of its first axis is open while the step is traced, as that of
every batch is. A draw of known shape, such as one factor for all rows, stays as it is: the same on
every replica, which is what one device draws. If a model joins rows of several passes, its draws
are not those of one device; the first step says so.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching
from tfmultigpu.steps.batch_norm import moments_of_replicas
from tfmultigpu.steps.features import Feature, Pass, Phase, Rows, Shards
from tfmultigpu.steps.seeds import GlobalSeeds, global_seeds

__all__ = ["Draws", "drawing_rows"]

_AUTOMATIC = (None, 3, "auto_select")  # Philox on a CPU or GPU, compiled by XLA or not.
# Draws that are made for all rows and cut. Their parameters may have rows too; each with what
# stands for it in rows that are not here.
_PARAMETERS: dict[str, dict[str, float]] = {
    "stateless_truncated_normal": {"mean": 0, "stddev": 1},
    "stateless_gamma": {"alpha": 1, "beta": 1},
    "stateless_binomial": {"counts": 1, "probs": 1},
    "stateless_poisson": {"lam": 1},
    "stateless_categorical": {"logits": 0},
    "stateless_parameterized_truncated_normal": {
        "means": 0, "stddevs": 1, "minvals": -2, "maxvals": 2
    },
}  # fmt: skip


class Draws(Feature):
    """Has layers draw the rows of their replica while a step is traced."""

    def __init__(self, *, by_xla: bool = False) -> None:
        """Takes whether XLA compiles the replicas."""
        self._by_xla = by_xla
        self._seeds: GlobalSeeds | None = None

    def bind(self, step: Any) -> None:
        """Takes the step, whose trace learns which states are seeds."""
        self._step = step

    def on_one_device(self) -> Feature:
        """Returns the same: draws without a seed come from the same generator."""
        return Draws(by_xla=self._by_xla)

    def around_phase(self, phase: Phase) -> Phase:
        """Shares the seeds of draws without a seed among replicas."""

        def sharing(shards: Shards) -> list[Pass]:
            with global_seeds(self._step.strategy) as self._seeds:
                return phase(shards)

        return sharing

    @contextmanager
    def around_model(self, rows: Rows) -> Iterator[None]:
        """Has layers draw the rows of this replica."""
        assert self._seeds is not None
        context: Any = tf.distribute.get_replica_context()
        are_all = context.num_replicas_in_sync == 1 and rows.part is None
        with drawing_rows(rows, self._seeds, are_all=are_all, by_xla=self._by_xla):
            yield
        if hasattr(self._step, "trace"):
            self._step.trace.alike |= {id(state) for state in self._seeds.used}


@contextmanager
def drawing_rows(
    rows: Rows, seeds: GlobalSeeds, *, are_all: bool, by_xla: bool = False
) -> Iterator[None]:
    """Makes layers called on this thread draw their rows of the draws for the global batch.

    Synchronized batch normalization with a mask, which Keras does not synchronize, is synchronized
    too. If the first axis of a draw is not a multiple of the rows at run time, the draw is not by
    row after all and made as it is.

    Args:
        rows: The rows of this replica.
        seeds: The source of draws without a seed.
        are_all: Whether these are all rows.
        by_xla: Whether XLA compiles the draws. Then normal numbers are paired by the shape of the
            whole draw, so it is made for all rows.
    """
    if are_all:
        yield
        return
    context: Any = tf.distribute.get_replica_context()
    alone = context is None or context.num_replicas_in_sync == 1
    devices = () if alone else context.strategy.extended.worker_devices
    # The generator of a TPU cannot start to count further on.
    counts_on = not any("TPU" in device for device in devices)
    uniform = functools.partial(_uniform, rows, counts_on)
    wrappers: dict[str, Callable[..., Any]] = {
        "stateless_uniform": uniform,
        "stateless_random_uniform": uniform,  # Dropout and TensorFlow's own functions call it.
        "stateless_normal": functools.partial(_normal, rows, counts_on and not by_xla),
        "global_seed_generator": seeds.on_replica,
        "next": seeds.next_of,
        "_moments": moments_of_replicas,
    }
    wrappers |= {name: functools.partial(_cut, rows, _PARAMETERS[name]) for name in _PARAMETERS}
    with ExitStack() as contexts:
        for name, wrapper in wrappers.items():
            contexts.enter_context(patching(_compat.home_of(name), name, wrapper))
        yield


class _Place(NamedTuple):
    """The place of a first axis in that of the global batch, int32 scalars.

    Several entries belong to one row if the axis is a multiple of the rows. They are taken to
    follow each other, as in ``[rows * steps, ...]``.
    """

    first: Any
    size: Any
    total: Any

    @classmethod
    def of(cls, rows: Rows, size: Any) -> _Place:
        with tf.device("CPU:0"):  # Shapes are decided there; nothing has to wait for a GPU.
            first, count, total = (tf.cast(number, tf.int32) for number in rows[:3])
            times: Any = tf.where(size % count == 0, size // count, 0)
            return cls(first * times, size, tf.where(times > 0, total * times, size))


# Numbers that are drawn by counting on -----------------------------------------------------------


def _uniform(
    rows: Rows,
    counts_on: bool,
    original: Any,
    shape: Any,
    seed: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = tf.float32,
    name: Any = None,
    alg: Any = "auto_select",
) -> Any:
    dtype, shape = tf.as_dtype(dtype), _as_shape(shape)
    wrong = dtype.is_integer and (minval is None) != (maxval is None)
    if wrong or not _is_by_row(shape):
        return original(shape, seed, minval, maxval, dtype, name, alg)
    if not counts_on or alg not in _AUTOMATIC:
        whole = functools.partial(original, seed=seed, dtype=dtype, alg=alg)
        return _rows_of_all(rows, functools.partial(whole, minval=minval, maxval=maxval), shape)
    if dtype.is_integer and minval is None:
        sample = functools.partial(tf.raw_ops.StatelessRandomUniformFullIntV2, dtype=dtype)
        return _draw(rows, sample, shape, seed, dtype)
    maxval = 1 if maxval is None else maxval
    low, high = tf.convert_to_tensor(minval, dtype), tf.convert_to_tensor(maxval, dtype)
    if dtype.is_integer:
        sample = functools.partial(tf.raw_ops.StatelessRandomUniformIntV2, minval=low, maxval=high)
        return _draw(rows, sample, shape, seed, dtype)
    sample = functools.partial(tf.raw_ops.StatelessRandomUniformV2, dtype=dtype)
    return _draw(rows, sample, shape, seed, dtype) * (high - low) + low


def _normal(
    rows: Rows,
    counts_on: bool,
    original: Any,
    shape: Any,
    seed: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = tf.float32,
    name: Any = None,
    alg: Any = "auto_select",
) -> Any:
    dtype, shape = tf.as_dtype(dtype), _as_shape(shape)
    if not _is_by_row(shape):
        return original(shape, seed, mean, stddev, dtype, name, alg)
    if counts_on and alg in _AUTOMATIC:
        sample = functools.partial(tf.raw_ops.StatelessRandomNormalV2, dtype=dtype)
        drawn = _draw(rows, sample, shape, seed, dtype)
    else:
        whole = functools.partial(original, seed=seed, dtype=dtype, alg=alg)
        drawn = _rows_of_all(rows, whole, shape)
    return drawn * tf.convert_to_tensor(stddev, dtype) + tf.convert_to_tensor(mean, dtype)


def _draw(rows: Rows, sample: Any, shape: Any, seed: Any, dtype: tf.DType) -> Any:
    """Draws rows of unit numbers by counting on."""
    # One count makes 128 bits: four numbers, also where a number takes 16 bits, or two.
    group = 2 if dtype.size == 8 else 4
    # Multiplied one by one: a GPU computes tf.reduce_prod itself, and all would wait for it.
    inner: Any = math.prod([shape[axis] for axis in range(1, shape.shape[0])], start=tf.constant(1))
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    place = _Place.of(rows, shape[0])
    counts = tf.cast(place.first, tf.int64) * tf.cast(inner, tf.int64) // group
    # In 32 bits, which GPUs keep where shapes and slices are decided; hence the remainders first.
    begin = (place.first % group) * (inner % group) % group
    further = tf.bitcast(counter, tf.int64) + tf.stack([counts, tf.zeros_like(counts)])
    # A little more than needed always, because XLA must know the size when it compiles.
    size = [place.size * inner + (group - 1)]
    numbers = sample(shape=size, key=key, counter=tf.bitcast(further, tf.uint64), alg=3)
    return tf.reshape(tf.slice(numbers, [begin], [place.size * inner]), shape)


# Numbers that are drawn for all rows --------------------------------------------------------------


def _cut(rows: Rows, fillings: dict[str, float], original: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes a draw for the rows of the global batch and returns those of this replica."""
    call = inspect.signature(original).bind(*args, **kwargs)
    by_logits = "shape" not in call.arguments
    if by_logits:
        call.arguments["logits"] = tf.convert_to_tensor(call.arguments["logits"])
        shape = tf.shape(call.arguments["logits"])
    else:
        shape = call.arguments["shape"] = _as_shape(call.arguments["shape"])
    if not _is_by_row(shape):
        return original(*call.args, **call.kwargs)
    place = _Place.of(rows, shape[0])
    for name in fillings.keys() & call.arguments.keys():
        call.arguments[name] = _spread(place, call.arguments[name], shape, fillings[name])

    def draw(shape: Any) -> Any:
        if not by_logits:
            call.arguments["shape"] = shape
        return original(*call.args, **call.kwargs)

    return _rows_of_all(rows, draw, shape, keep_shape=not by_logits)


def _rows_of_all(
    rows: Rows, draw: Callable[[Any], Any], shape: Any, *, keep_shape: bool = True
) -> Any:
    place = _Place.of(rows, shape[0])
    drawn = draw(tf.concat([[place.total], shape[1:]], 0))
    begin = tf.stack([place.first, *[0] * (drawn.shape.rank - 1)])
    own = tf.slice(drawn, begin, tf.concat([[place.size], tf.shape(drawn)[1:]], 0))
    return tf.reshape(own, shape) if keep_shape else own


def _spread(place: _Place, parameter: Any, shape: Any, filling: float) -> Any:
    """Puts the rows of a parameter where they are in the global batch; the others are filled.

    A parameter with one entry for all rows, such as a number, stays as it is.
    """
    if not tf.is_tensor(parameter) or parameter.shape.rank != shape.shape[0]:
        return parameter
    if parameter.shape[0] is not None:
        return parameter
    here = tf.broadcast_to(parameter, tf.concat([shape[:1], tf.shape(parameter)[1:]], 0))
    inner = [[0, 0]] * (parameter.shape.rank - 1)
    widths = [[place.first, place.total - place.first - place.size], *inner]
    return tf.pad(here, widths, constant_values=filling)


# Which draws are by row ---------------------------------------------------------------------------


def _as_shape(shape: Any) -> Any:
    """Returns a shape, lengths or a tensor of them, as an int32 vector."""
    if tf.is_tensor(shape):
        return tf.cast(shape, tf.int32)
    lengths = [tf.cast(length, tf.int32) for length in shape]
    return tf.stack(lengths) if lengths else tf.zeros([0], tf.int32)


def _is_by_row(shape: Any) -> bool:
    """Returns whether the first axis of a draw has no length yet, while the step is traced.

    A draw is not by row if the graph shows that this length is the one of another axis, as that of
    noise for the positions of a sequence.
    """
    static = tf.broadcast_to(False, shape).shape
    return bool(static.rank) and static[0] is None and _axis_of(shape) in (0, None)


def _axis_of(shape: Any) -> int | None:
    """Returns the axis of a tensor whose length the first axis has; None where unknown."""
    first = shape.op.inputs[0] if shape.op.type == "Pack" else shape
    while first.op.type in ("Cast", "Identity"):
        first = first.op.inputs[0]
    if first.op.type != "StridedSlice" or first.op.inputs[0].op.type != "Shape":
        return None
    begin = tf.get_static_value(first.op.inputs[1])
    rank = first.op.inputs[0].shape[0]
    if begin is None or rank is None or begin.size != 1:
        return None
    return int(begin[0]) % int(rank)
