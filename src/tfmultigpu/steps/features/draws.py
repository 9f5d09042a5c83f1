"""Random draws of layers: each replica draws its rows of what one device draws for the batch.

All replicas have the same seeds, so by themselves they would draw the same numbers: one dropout
mask, repeated for each shard. TensorFlow's generator counts: number ``i`` of a draw depends on the
seed and ``i`` alone. So a replica can draw its rows of the draw for the global batch, and no other
numbers, by starting to count further on.

A draw is *by row* if the length of its first axis is open while the step is traced, as every
batch's is. A draw of known shape, such as one factor for all rows, stays as it is: the same on
every replica, which is what one device draws. A draw of several times as many rows, such as the
noise of ``tf.concat([fake, real], 0)``, has these side by side for each row, not block after block:
nothing in its shape tells. If a model joins rows of several passes, or draws by other functions,
its draws are not one device's; the first step says so.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching
from tfmultigpu.data.batch_format import cast_all
from tfmultigpu.errors import ScopeError
from tfmultigpu.lists import pick
from tfmultigpu.steps.batch_norm import moments_of_replicas
from tfmultigpu.steps.features.feature import BoundStep, Feature
from tfmultigpu.steps.values import Pass, Phase, Rows, Shards, Trace
from tfmultigpu.strategies.topology import kind_of
from tfmultigpu.types import Function, Nested, Options, Scalar, Tensor
from tfmultigpu.user_code import place_of_user

_AUTOMATIC = (None, 3, "auto_select")  # Philox on a CPU or GPU, compiled by XLA or not.
# What unit numbers are added to, and multiplied by, where a replica counts on.
_COUNTED = {
    "stateless_uniform": ("minval", "maxval"),
    "stateless_random_uniform": ("minval", "maxval"),  # Dropout and TensorFlow's own call it.
    "stateless_normal": ("mean", "stddev"),
}
# Of these all rows are drawn, and cut.
_CUT = "stateless_truncated_normal", "stateless_gamma", "stateless_binomial"


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A draw whose first axis is open, as one replica made it.

    Attributes:
        place: The file and the line of the user that draws.
        size: The length of the first axis, an int scalar.
    """

    place: str
    size: Scalar


@dataclasses.dataclass(frozen=True)
class WatchedDraws:
    """The draws of one replica that somebody watches.

    Attributes:
        in_blocks: Whether the entries of a draw of ``k * rows`` lie block after block, one block
            for each of ``k`` parts, and not side by side for each row.
        drawn: The draws whose first axis is open, so far.
    """

    in_blocks: bool
    drawn: list[Drawn] = dataclasses.field(default_factory=list)


_watched: ContextVar[WatchedDraws | None] = ContextVar("watched", default=None)


@contextmanager
def watching_draws(*, in_blocks: bool) -> Iterator[list[Drawn]]:
    """Yields a list of the draws of this thread whose first axis is open; also on one device."""
    watched = WatchedDraws(in_blocks)
    token = _watched.set(watched)
    try:
        yield watched.drawn
    finally:
        _watched.reset(token)


class GlobalSeeds:
    """Seeds of draws without a seed, during one call of ``strategy.run``.

    Keras keeps a generator of seeds for them, one for each thread, and replicas are threads. So the
    ``generator`` of the thread that starts them serves all; the first draw has one made if there is
    none. Create it on the thread that starts the replicas.

    Attributes:
        generator: The generator, or None so far.
        used: The states of all generators that were drawn from, once traced.
    """

    def __init__(self, strategy: tf.distribute.Strategy, used: list[Any]) -> None:
        self.generator = _compat.global_seeds()
        self.used = used
        self._strategy = strategy

    def next_of(
        self, original: Function, generator: Any, *args: object, **kwargs: object
    ) -> Tensor:
        """Returns a seed from a generator, by ``original``, and notes that it was drawn from."""
        if id(generator.state) not in map(id, self.used):
            if not self._is_on_replicas(generator):
                raise ScopeError(
                    "A seed generator was created outside the scope of the strategy, so each "
                    "replica draws other numbers than one device does.",
                    f"{generator.name!r}, and {type(self._strategy).__name__} with "
                    f"{self._strategy.num_replicas_in_sync} replica(s)",
                    "Create it inside:\n"
                    "    with strategy.scope():\n"
                    "        seeds = keras.random.SeedGenerator(seed)",
                )
            self.used.append(generator.state)
        return original(generator, *args, **kwargs)

    def on_replicas(self, original: Function) -> Nested:
        """Returns the generator, made by ``original`` if there is none, on all replicas."""
        if self.generator is None or not self._is_on_replicas(self.generator):
            with ThreadPoolExecutor(1) as pool:  # A thread without scopes.
                self.generator = pool.submit(self._make, original).result()
        return self.generator

    def _is_on_replicas(self, generator: Any) -> bool:
        state = generator.state.value  # A tensor where it was assigned to already.
        if self._strategy.num_replicas_in_sync == 1 or not isinstance(state, tf.Variable):
            return True
        return bool(self._strategy.extended.variable_created_in_scope(state))

    def _make(self, original: Function) -> Nested:
        with self._strategy.scope():
            if self.generator is None:
                return original()
            copy = keras.random.SeedGenerator(0)
            copy.state.assign(self.generator.state)
            return copy


@contextmanager
def sharing_seeds(
    strategy: tf.distribute.Strategy, used: list[Any] | None = None
) -> Iterator[GlobalSeeds]:
    """Has draws without a seed, on this thread, draw from one generator of all replicas.

    Args:
        strategy: The strategy.
        used: A list to which the states of all generators that are drawn from are added.
    """
    seeds = GlobalSeeds(strategy, [] if used is None else used)
    name = "global_seed_generator"
    before = seeds.generator
    with patching(_compat.home_of(name), name, seeds.on_replicas):
        yield seeds
    if seeds.generator is not before:
        _compat.set_global_seeds(seeds.generator)


class Draws(Feature):
    """Has layers draw the rows of their replica while a step is traced.

    If the first axis of a draw is not a multiple of the rows at run time, the draw is not by row
    after all and made as it is. Synchronized batch normalization with a mask, which Keras does not
    synchronize, is synchronized too.
    """

    seeds: GlobalSeeds

    def __init__(self, *, by_xla: bool = False) -> None:
        self._by_xla = by_xla

    def bind(self, step: BoundStep) -> None:
        """Keeps the strategy."""
        self._strategy = step.strategy

    def on_one_device(self) -> Feature:
        """Returns the same: draws without a seed come from the same generator."""
        return Draws(by_xla=self._by_xla)

    def around_phase(self, phase: Phase) -> Phase:
        """Shares the seeds of draws without a seed among replicas."""

        def sharing(shards: Shards, trace: Trace) -> list[Pass]:
            with sharing_seeds(self._strategy, trace.seeds) as self.seeds:
                return phase(shards, trace)

        return sharing

    @contextmanager
    def around_model(self, rows: Rows) -> Iterator[None]:
        """Has layers draw the rows of this replica."""
        strategy = tf.distribute.get_strategy()
        is_cut = rows.parts is not None or rows.dealt is not None
        is_whole = strategy.num_replicas_in_sync == 1 and not is_cut
        if is_whole and _watched.get() is None:
            yield
            return
        wrappers: dict[str, Function] = {
            "global_seed_generator": self.seeds.on_replicas,
            "next": self.seeds.next_of,
        }
        # The generator of a TPU cannot start to count further on, and XLA pairs normal numbers.
        counted = dict(_COUNTED) if kind_of(strategy).counts_draws else {}
        if self._by_xla:
            counted.pop("stateless_normal", None)
        for name in (*_COUNTED, *_CUT):
            wrappers[name] = functools.partial(_draw, rows, counted.get(name))
        with ExitStack() as contexts:
            contexts.enter_context(patching(*_compat.moments_of_batch(), moments_of_replicas))
            for name, wrapper in wrappers.items():
                contexts.enter_context(patching(_compat.home_of(name), name, wrapper))
            yield


def _place(rows: Rows, size: Scalar) -> tuple[Scalar, Scalar]:
    """Returns where a first axis begins in the global batch's, and how long that is.

    Several entries belong to one row if the axis is a multiple of the rows. They are taken to
    follow each other, as in ``[rows * steps, ...]``.
    """
    with tf.device("CPU:0"):  # Shapes are decided there; nothing has to wait for a GPU.
        first, count, total = cast_all(rows[:3], tf.int32)
        times: Scalar = tf.where(size % count == 0, size // count, 0)
        return first * times, tf.where(times > 0, total * times, size)


def _places_in_blocks(rows: Rows, size: Scalar) -> Tensor:
    """Returns which entries of a draw are of these rows, if they lie block after block."""
    first, count, total = cast_all(rows[:3], tf.int32)
    numbers = tf.range(size)
    places = numbers // count * total + first + numbers % count
    return tf.where(size % count == 0, places, numbers)


def _draw(
    rows: Rows, counted: Scalar, original: Function, *args: object, **kwargs: object
) -> Tensor:
    """Draws the rows of this replica, if the draw is by row and its parameters are not."""
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    shape = options["shape"] = tf.cast(options["shape"], tf.int32)
    static = tf.broadcast_to(False, shape).shape
    if not static.rank or static[0] is not None:
        return original(*call.args, **call.kwargs)
    first, total = _place(rows, shape[0])
    watched = _watched.get()
    in_blocks = False
    if watched is not None:
        watched.drawn.append(Drawn(place_of_user(), shape[0]))
        in_blocks = watched.in_blocks
    is_counted = counted and not in_blocks and options["alg"] in _AUTOMATIC
    if is_counted and tf.as_dtype(options["dtype"]).is_floating:
        return _count_on(first, shape, options, counted)
    for name in options.keys() - {"shape", "seed"}:
        parameter = options[name]
        if tf.is_tensor(parameter) and parameter.shape.rank and parameter.shape[0] is None:
            return original(*call.args, **call.kwargs)
    options["shape"] = tf.concat([[total], shape[1:]], 0)
    drawn = original(*call.args, **call.kwargs)
    if in_blocks:
        return tf.gather(drawn, _places_in_blocks(rows, shape[0]))
    begin = tf.stack([first, *[0] * (drawn.shape.rank - 1)])
    own = tf.slice(drawn, begin, tf.concat([shape[:1], tf.shape(drawn)[1:]], 0))
    return tf.ensure_shape(own, [None, *drawn.shape[1:]])


def _count_on(first: Scalar, shape: Tensor, options: Options, names: tuple[str, str]) -> Scalar:
    """Draws uniform or normal numbers of the rows of this replica, and no others."""
    dtype = tf.as_dtype(options["dtype"])
    # One count makes 128 bits: four numbers, also where a number takes 16 bits, or two.
    group = 2 if dtype.size == 8 else 4
    # Multiplied one by one: a GPU computes tf.reduce_prod itself, and all would wait for it.
    inner: Scalar = math.prod(pick(shape, range(1, shape.shape[0])), start=tf.constant(1))
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=options["seed"])
    counts = tf.cast(first, tf.int64) * tf.cast(inner, tf.int64) // group
    # In 32 bits, which GPUs keep where shapes and slices are decided; hence the remainders first.
    begin = (first % group) * (inner % group) % group
    further = tf.bitcast(counter, tf.int64) + tf.stack([counts, tf.zeros_like(counts)])
    # A little more than needed always, because XLA must know the size when it compiles.
    size = [shape[0] * inner + (group - 1)]
    raw, is_normal = tf.raw_ops, "mean" in names
    sample = raw.StatelessRandomNormalV2 if is_normal else raw.StatelessRandomUniformV2
    numbers = sample(
        shape=size, key=key, counter=tf.bitcast(further, tf.uint64), alg=3, dtype=dtype
    )
    unit = tf.reshape(tf.slice(numbers, [begin], [shape[0] * inner]), shape)
    low, high = (
        tf.convert_to_tensor(1 if options[n] is None else options[n], dtype) for n in names
    )
    return unit * (high if is_normal else high - low) + low
