"""Tables that are divided by rows over the devices: which they are, and how they are created.

Keras creates a variable by a function without arguments, long after the layer has asked for it. So
the initializer of a large weight tells, if it is asked, what it is to make.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmultigpu._patch import patching
from tfmultigpu.accumulation.table_rows import LARGE
from tfmultigpu.addons.sharding import _private
from tfmultigpu.addons.sharding.initial_rows import made_in_parts, makes_rows_alone
from tfmultigpu.strategies.row_parts import RowParts
from tfmultigpu.strategies.topology import tf_variable
from tfmultigpu.types import KerasLayer, KerasVariable


@dataclasses.dataclass(frozen=True)
class Weight:
    """A large weight that is about to be created.

    Attributes:
        initializer: Its initializer.
        shape: Its shape; of a table rows and width.
        dtype: The dtype of its numbers.
        is_table: Whether its rows may be divided over the devices.
    """

    initializer: Callable[..., Any]
    shape: tuple[int, ...]
    dtype: tf.DType
    is_table: bool

    @property
    def size(self) -> int:
        """The bytes of the weight."""
        return int(math.prod(self.shape) * self.dtype.size)

    def make(self) -> tf.Tensor:
        """Returns the first value of all of it."""
        return tf.convert_to_tensor(self.initializer(self.shape, dtype=self.dtype.name), self.dtype)

    def make_parts(self, rows: Sequence[int]) -> Iterator[Any]:
        """Yields the first value of some rows after others."""
        if makes_rows_alone(self.initializer, self.dtype):
            yield from made_in_parts(self.make, self.shape, rows)
            return
        with tf.device("CPU:0"):
            whole = self.make().numpy()
        ends = np.cumsum(rows)[:-1]
        yield from np.split(whole, ends)


_asking: ContextVar[list[Weight] | None] = ContextVar("asking", default=None)


class _Telling:
    """An initializer that tells, if it is asked, what it is to make."""

    def __init__(self, initializer: Callable[..., Any], is_table: bool) -> None:
        self._initializer, self._is_table = initializer, is_table

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        asked = _asking.get()
        if asked is None:
            return self._initializer(shape, dtype=dtype)
        asked.append(Weight(self._initializer, tuple(shape), tf.as_dtype(dtype), self._is_table))
        return tf.zeros([0])


@contextmanager
def telling_weights() -> Iterator[None]:
    """Has the large weights that layers create here tell what they are."""

    def add_weight(
        original: Callable[..., KerasVariable], layer: KerasLayer, *args: Any, **options: Any
    ) -> KerasVariable:
        is_large = math.prod(options.get("shape") or ()) >= LARGE
        if args or not is_large or options.get("initializer") is None:
            return original(layer, *args, **options)
        is_table = _is_table(layer, options)
        # Made of a name here and not by Keras: each draws a seed of Python.
        initializer = keras.initializers.get(options["initializer"])
        options["initializer"] = _Telling(initializer, is_table)
        variable = original(layer, **options)
        if is_table:
            # Keras would make a tensor of an array that is loaded, on one device.
            variable.assign = functools.partial(_assign, variable, variable.assign)
        return variable

    with patching(keras.layers.Layer, "add_weight", add_weight):
        yield


def _is_table(layer: KerasLayer, options: dict[str, Any]) -> bool:
    """Returns whether a weight is a table of which a layer does nothing but look up rows."""
    embedding = keras.layers.Embedding
    if not isinstance(layer, embedding) or type(layer).call is not embedding.call:
        return False  # As one that is tied to the output, which takes the whole.
    if options.get("name") != "embeddings" or layer.lora_rank or options.get("dtype"):
        return False
    return _adds_rows(options.get("regularizer"))


def _assign(variable: KerasVariable, original: Callable[[Any], Any], value: Any) -> Any:
    """Assigns to a table; an array, also one in a file, part by part."""
    table = tf_variable(variable)
    is_array = not tf.is_tensor(value) and tuple(np.shape(value)) == tuple(variable.shape)
    if not isinstance(table, RowParts) or not is_array or not tf.executing_eagerly():
        return original(value)
    table.assign(value)
    return value


def _adds_rows(regularizer: Callable[[Any], Any] | None) -> bool:
    """Returns whether the penalty of a table is the sum of the penalties of its parts."""
    if regularizer is None:
        return True
    rows = tf.reshape(tf.linspace(-1.0, 2.0, 24), [6, 4])
    with tf.device("CPU:0"):
        of_parts = regularizer(rows[:2]) + regularizer(rows[2:])
        return bool(np.allclose(of_parts, regularizer(rows), rtol=1e-5))


def made(initial: Callable[[], Any]) -> Weight | tf.Tensor:
    """Returns the first value of a variable; of a large weight what it is, and nothing is made."""
    asked: list[Weight] = []
    token = _asking.set(asked)
    try:
        value = initial()
    finally:
        _asking.reset(token)
    return asked[0] if asked else value


def part_in_words(number: int, count: int, name: str) -> str:
    """Returns what a message says of one of ``count`` parts of a table that is being created."""
    return f"part {number + 1} of {count} of the table {_private.path_of(name)!r}"


def create_parts(
    make_variable: Callable[..., tf.Variable],
    devices: Sequence[str],
    values: Iterator[Any],
    name: str,
    *,
    trainable: bool,
) -> RowParts:
    """Creates a table from the first values of its parts, each made on its device.

    Args:
        make_variable: ``make_variable(device, value, name, trainable=..., part=...)``, the part
            in words.
        devices: The device of each part.
        values: The rows of each part.
        name: The name of the table.
        trainable: Whether it is trained.
    """
    parts: list[tf.Variable] = []
    for number, device in enumerate(devices):
        with tf.init_scope(), tf.device(device):
            value = tf.convert_to_tensor(next(values))
        part = part_in_words(number, len(devices), name)
        parts.append(make_variable(device, value, name, trainable=trainable, part=part))
    rows = [int(part.shape[0] or 0) for part in parts]

    def create_like(_: Any, **options: Any) -> RowParts:
        def make() -> tf.Tensor:
            return tf.convert_to_tensor(options["initial_value"](), options["dtype"])

        shape = [sum(rows), *parts[0].shape[1:]]
        values = made_in_parts(make, shape, rows)
        return create_parts(make_variable, devices, values, options["name"], trainable=False)

    return RowParts(parts, name, _private.share_identity(parts), create_like)
