"""What a step changes is put back, and kept meanwhile in as little memory as it takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.steps.other_states import Handle
from tfmultigpu.steps.runner import Runner

_WHOLE_NUMBERS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}  # By their bytes.
LARGE = 2**18  # Bytes from which it is worth to look whether a value can be kept in less.
_PIECE, _PIECES = 2**18, 64  # Elements at one time, and in how many pieces, if that is too many.
_WRITES_ROWS = (tf.float16, tf.float32, tf.float64)  # Of which all devices can write single rows.


class Run(Protocol):
    """What can be put back: a step."""

    runner: Runner


@dataclasses.dataclass(frozen=True)
class Contents:
    """The resource of a variable, read some rows at a time.

    Reading or writing rows makes TensorFlow copy the variable at each read of its value from then
    on. So that is done only where the step does it as well.

    Attributes:
        handle: The resource; each copy of a variable has one.
        dtype: The dtype.
        shape: The shape of the value.
        by_rows: Whether rows are read and written by themselves.
    """

    handle: Handle
    dtype: tf.DType
    shape: tuple[int, ...]
    by_rows: bool

    def read(self) -> tf.Tensor:
        """Returns the value; a copy, if rows of the variable were read or written before."""
        with tf.device(self.handle.device):
            value: tf.Tensor = tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)
        return value

    def pieces(self) -> Iterator[tf.Tensor]:
        """Yields the elements, some rows at a time."""
        if not self.by_rows:
            yield from _pieces_of(self.read())
            return
        for begin, end in _ranges(self.shape):
            with tf.device(self.handle.device):
                piece = tf.raw_ops.ResourceGather(
                    resource=self.handle, indices=tf.range(begin, end), dtype=self.dtype
                )
            yield piece

    def assign(self, value: tf.Tensor) -> None:
        """Assigns a value."""
        with tf.device(self.handle.device):
            tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)

    def assign_rows(self, begin: int, end: int, rows: tf.Tensor) -> None:
        """Assigns some rows, without a copy of the others."""
        with tf.device(self.handle.device):
            ids = tf.range(begin, end)
            tf.raw_ops.ResourceScatterUpdate(resource=self.handle, indices=ids, updates=rows)


@dataclasses.dataclass(frozen=True)
class Before:
    """A variable before a step.

    Attributes:
        contents: The variable.
        kept: Its value; the first element alone, if all are equal.
    """

    contents: Contents
    kept: tf.Tensor

    @property
    def handle(self) -> Handle:
        """The resource of the variable."""
        return self.contents.handle

    @property
    def value(self) -> tf.Tensor:
        """The value."""
        value: tf.Tensor = self.kept
        if not value.shape.rank:  # One number for all of them.
            value = tf.broadcast_to(value, self.contents.shape)
        return value

    def put_back(self) -> None:
        """Assigns what the variable was."""
        contents, shape = self.contents, self.contents.shape
        if not (contents.by_rows and contents.dtype in _WRITES_ROWS):
            contents.assign(self.value)
            return
        for begin, end in _ranges(shape):
            with tf.device(self.kept.device):
                rows = self.kept
                if rows.shape.rank:
                    rows = rows[begin:end]
                rows = tf.broadcast_to(rows, [end - begin, *shape[1:]])
            contents.assign_rows(begin, end, rows)


def contents_of(step: Run, handle: Handle, dtype: tf.DType) -> Contents:
    """Returns the resource of a variable that a step may read or write."""
    with tf.device(handle.device):
        shape = tuple(tf.raw_ops.VariableShape(input=handle).numpy().tolist())
    return Contents(handle, dtype, shape, id(handle) in step.runner.touched.by_rows)


class Kept:
    """Keeps what a step changes, read once for several runs, and puts it back after each."""

    def __init__(self, step: Run) -> None:
        """Keeps nothing yet."""
        self._step = step
        self._is_keeping = False
        self._changed: dict[Any, list[Before]] = {}  # By the function.
        self._before: dict[int, Before] = {}  # By the ``id`` of the resource.
        self._firsts: dict[int, tf.Tensor] = {}

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keeps until the end what is read meanwhile."""
        if self._is_keeping:
            yield
            return
        self._is_keeping = True
        try:
            yield
        finally:
            self._is_keeping = False
            self._changed.clear()
            self._before.clear()
            self._firsts.clear()

    @contextmanager
    def putting_back(self, *functions: Any) -> Iterator[list[Before]]:
        """Puts back, at the end, what concrete functions of the step change: variables and tables.

        Yields the variables as they are before.
        """
        with self.keeping():
            changed: dict[int, Before] = {}
            for function in functions:
                changed.update((id(each.handle), each) for each in self._changed_by(function))
            before = list(changed.values())
            with self._step.runner.touched.putting_back_tables():
                try:
                    yield before
                finally:
                    for each in before:
                        each.put_back()

    def _changed_by(self, function: Any) -> list[Before]:
        """Returns each variable that a function can assign, with its value."""
        if function not in self._changed:
            found = self._changed[function] = []
            for handle, dtype in _compat.variables_of(function):
                if id(handle) not in self._before:
                    contents = contents_of(self._step, handle, dtype)
                    self._before[id(handle)] = Before(contents, _in_less(contents, self._firsts))
                found.append(self._before[id(handle)])
        return self._changed[function]


def _in_less(contents: Contents, firsts: dict[int, tf.Tensor]) -> tf.Tensor:
    """Returns a tensor from which the value can be made, of little room where it can be.

    Args:
        contents: The variable.
        firsts: The values of the first copies of variables that are kept whole, by ``id``.
    """
    if math.prod(contents.shape) * contents.dtype.size < LARGE:
        return contents.read()
    # State of an optimizer is zero at first.
    first = tf.reshape(next(contents.pieces()), [-1])[0]
    if all(_same(piece, first) for piece in contents.pieces()):
        return first
    variable = _compat.variable_of_handle(contents.handle)
    if variable is None:
        return contents.read()
    # Copies of one variable are equal, if nothing went wrong.
    kept = firsts.get(id(variable))
    if kept is not None and all(map(_same, contents.pieces(), _pieces_of(kept))):
        return kept
    value = contents.read()
    firsts.setdefault(id(variable), value)
    return value


def _ranges(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields where some rows begin and end that are handled at one time."""
    count = max(1, _PIECE // max(1, math.prod(shape[1:])), shape[0] // _PIECES)
    for begin in range(0, shape[0], count):
        yield begin, min(begin + count, shape[0])


def _pieces_of(value: tf.Tensor) -> Iterator[tf.Tensor]:
    """Yields the elements of a tensor, some rows at a time."""
    if not value.shape.rank:
        yield value
        return
    for begin, end in _ranges([size or 0 for size in value.shape.as_list()]):
        with tf.device(value.device):
            piece = value[begin:end]
        yield piece


def _same(one: tf.Tensor, other: tf.Tensor) -> bool:
    """Returns whether all bits are equal."""
    with tf.device(one.device):
        return bool(tf.reduce_all(_bits_of(one) == _bits_of(other)))


def _bits_of(value: tf.Tensor) -> tf.Tensor:
    """Returns what is equal only where all bits are: -0.0 is not 0.0, but compares as equal."""
    dtype = _WHOLE_NUMBERS.get(value.dtype.size)
    if dtype is None or not value.dtype.is_floating:
        return value
    bits: tf.Tensor = tf.bitcast(value, dtype)
    return bits
