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

_AUTOMATIC = (None, 3, "auto_select")  # Philox on a CPU or GPU, compiled by XLA or not.
# Draws, with the parameters of each that may have rows too, and what stands for them in rows that
# are not here.
_UNIFORM: dict[str, float] = {"minval": 0, "maxval": 1}
_PARAMETERS: dict[str, dict[str, float]] = {
    "stateless_uniform": _UNIFORM,
    "stateless_random_uniform": _UNIFORM,  # Dropout and TensorFlow's own functions call it.
    "stateless_normal": {"mean": 0, "stddev": 1},
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
    """
    if are_all:
        yield
        return
    context: Any = tf.distribute.get_replica_context()
    alone = context is None or context.num_replicas_in_sync == 1
    devices = () if alone else context.strategy.extended.worker_devices
    counted = {"stateless_uniform", "stateless_random_uniform", "stateless_normal"}
    if any("TPU" in device for device in devices):
        counted = set()  # Its generator cannot start to count further on.
    elif by_xla:
        counted.remove("stateless_normal")
    wrappers: dict[str, Callable[..., Any]] = {
        "global_seed_generator": seeds.on_replicas,
        "next": seeds.next_of,
        "_moments": moments_of_replicas,
    }
    for name, fillings in _PARAMETERS.items():
        wrappers[name] = functools.partial(_count_on if name in counted else _cut, rows, fillings)
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


def _count_on(rows: Rows, fillings: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Draws uniform or normal numbers of the rows of this replica, and no others."""
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    shape, dtype = _as_shape(options["shape"]), tf.as_dtype(options["dtype"])
    if options["alg"] not in _AUTOMATIC:
        return _cut(rows, fillings, original, *args, **kwargs)
    low, high = (options[name] for name in fillings)
    one_of_two = dtype.is_integer and (low is None) != (high is None)  # Which raises an error.
    if one_of_two or not _is_by_row(shape):
        return original(*call.args, **call.kwargs)
    raw, draw = tf.raw_ops, functools.partial(_draw, rows, shape, options["seed"], dtype)
    if dtype.is_integer and low is None:
        return draw(functools.partial(raw.StatelessRandomUniformFullIntV2, dtype=dtype))
    low, high = (tf.convert_to_tensor(1 if n is None else n, dtype) for n in (low, high))
    if "mean" in fillings:
        return draw(functools.partial(raw.StatelessRandomNormalV2, dtype=dtype)) * high + low
    if dtype.is_integer:
        return draw(functools.partial(raw.StatelessRandomUniformIntV2, minval=low, maxval=high))
    return draw(functools.partial(raw.StatelessRandomUniformV2, dtype=dtype)) * (high - low) + low


def _draw(rows: Rows, shape: Any, seed: Any, dtype: tf.DType, sample: Any) -> Any:
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
