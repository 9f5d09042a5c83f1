"""The first value of a table, made in parts: no device holds the whole of it.

An initializer of Keras makes each number from its place and a seed. So some rows can be made
without the others, and they are the rows that one device makes. Whether that is so is tried out on
a small table. Any other initializer makes the whole, in the memory of the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching

_Make: TypeAlias = Callable[[], Any]
_Original: TypeAlias = Callable[..., Any]  # What a wrapper calls.

# By function of ``tf.random``: its operation.
_DRAWS = {
    "stateless_uniform": "StatelessRandomUniformV2",
    "stateless_normal": "StatelessRandomNormalV2",
    "stateless_truncated_normal": "StatelessTruncatedNormalV2",
}
_BLOCK = 16  # The bytes of one block of Philox, the generator of TensorFlow.
_BLOCKS_OF_TRUNCATED = 64  # Set aside for one number, which is drawn until it is in its bounds.
_TRIED = (11, 6)  # A shape.


def made_in_parts(make: _Make, shape: Sequence[int], rows: Sequence[int]) -> Iterator[Any]:
    """Yields the rows of each part of what ``make`` makes of a shape.

    Each part is made where this is when it is asked for, with the seeds of the first one. What
    makes all rows whatever it is asked is cut.
    """
    seeds: list[tf.Tensor] = []
    first = 0
    for number, count in enumerate(rows):
        left = iter(seeds)

        def draw_seed(original: _Original, *args: Any, **options: Any) -> Any:
            if number:  # noqa: B023  # It is called in this turn.
                return next(left)  # noqa: B023
            seeds.append(original(*args, **options))
            return seeds[-1]

        drawing = patching(keras.random.SeedGenerator, "next", draw_seed)
        with drawing, _making_rows(tuple(shape), first, count):
            value = make()
        if value.shape[0] != count:
            value = value[first : first + count]
        yield value
        first += count


def makes_rows_alone(initializer: Callable[..., Any], dtype: tf.DType = tf.float32) -> bool:
    """Returns whether an initializer makes the same rows without the others as with them."""
    if not _compat.is_part_of_keras(type(initializer)):
        return False  # It may do something when it is called.
    make = functools.partial(initializer, _TRIED, dtype=dtype.name)

    def same(_: _Original, *__: Any, **___: Any) -> tf.Tensor:
        return tf.constant([3, 4], tf.int64)  # What is tried advances no seed.

    with patching(keras.random.SeedGenerator, "next", same), tf.device("CPU:0"):
        whole = make()
        try:
            parts = list(made_in_parts(make, _TRIED, (5, 6)))
        except (ValueError, tf.errors.OpError):
            return False  # It goes on with all rows.
        return bool(tf.reduce_all(tf.concat(parts, 0) == whole))


@contextmanager
def _making_rows(shape: tuple[int, ...], first: int, count: int) -> Iterator[None]:
    """Has functions of TensorFlow make some rows of a tensor of a shape, and all of any other."""
    size = math.prod(shape[1:])
    of_rows = (count, *shape[1:])

    def fill(original: _Original, asked: Any, *args: Any, **more: Any) -> Any:
        is_whole = not tf.is_tensor(asked) and tuple(asked) == shape
        return original(of_rows if is_whole else asked, *args, **more)

    def draw(name: str, original: _Original, *args: Any, **options: Any) -> Any:
        asked = options.get("shape")
        if args or asked is None or tf.is_tensor(asked) or tuple(asked) != shape:
            return original(*args, **options)
        dtype = tf.as_dtype(options["dtype"])
        numbers = _numbers(name, options["seed"], dtype, first * size, count * size)
        numbers = tf.reshape(numbers, of_rows)
        if name == "stateless_uniform":
            return numbers * (options["maxval"] - options["minval"]) + options["minval"]
        return numbers * options["stddev"] + options["mean"]

    with ExitStack() as patches:
        for name in ("zeros", "ones", "fill"):
            patches.enter_context(patching(tf, name, fill))
        for name in _DRAWS:
            patches.enter_context(patching(tf.random, name, functools.partial(draw, name)))
        yield


def _numbers(name: str, seed: Any, dtype: tf.DType, first: int, count: int) -> tf.Tensor:
    """Returns some of the numbers that a function of ``tf.random`` draws from a seed."""
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    # So many numbers are made together, from one block or from all that are set aside.
    at_once = _BLOCK // max(dtype.size, 4)
    blocks = at_once * _BLOCKS_OF_TRUNCATED if name == "stateless_truncated_normal" else 1
    before = first // at_once
    counter += tf.constant([before * blocks, 0], tf.uint64)
    extra = first - before * at_once
    draw = getattr(tf.raw_ops, _DRAWS[name])
    numbers = draw(
        shape=[extra + count],
        key=key,
        counter=counter,
        alg=tf.raw_ops.StatelessRandomGetAlg(),
        dtype=dtype,
    )
    drawn: tf.Tensor = numbers[extra:]
    return drawn
