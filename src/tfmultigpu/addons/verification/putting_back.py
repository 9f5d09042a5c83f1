"""What a step changes is put back, and kept meanwhile in as little memory as it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.steps.other_states import Handle
from tfmultigpu.steps.runner import Runner
from tfmultigpu.types import ConcreteFunction

_WHOLE_NUMBERS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}  # By their bytes.
_LARGE = 2**18  # Bytes from which it is worth to look whether a value can be kept in less.


class Run(Protocol):
    """What can be put back: a step."""

    runner: Runner


@dataclasses.dataclass(frozen=True)
class Before:
    """A variable before a step.

    Attributes:
        handle: Its resource; each copy of a variable has one.
        kept: Its value; the first element alone, if all are equal.
        shape: The shape of the value.
    """

    handle: Handle
    kept: tf.Tensor
    shape: tf.TensorShape

    @property
    def value(self) -> tf.Tensor:
        """The value."""
        value: tf.Tensor = tf.broadcast_to(self.kept, self.shape)
        return value

    def assign(self, value: tf.Tensor) -> None:
        """Assigns a value."""
        with tf.device(self.handle.device):
            tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)


@contextmanager
def putting_back(step: Run, *functions: ConcreteFunction) -> Iterator[list[Before]]:
    """Puts back, at the end, what concrete functions of a step change: variables and tables.

    Yields the variables as they are before.
    """
    before = _before(functions)
    with step.runner.touched.putting_back_tables():
        try:
            yield before
        finally:
            for each in before:
                each.assign(each.value)


def _before(functions: tuple[ConcreteFunction, ...]) -> list[Before]:
    """Returns each variable that functions can assign, with its value."""
    found: dict[int, Before] = {}
    firsts: dict[int, tf.Tensor] = {}
    for function in functions:
        for handle, dtype in _compat.variables_of(function):
            if id(handle) in found:
                continue
            with tf.device(handle.device):
                value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
                kept = first = value
                if value.shape.num_elements() * dtype.size >= _LARGE:
                    # Copies of one variable are equal, if nothing went wrong, and state of an
                    # optimizer is zero at first.
                    variable = _compat.variable_of_handle(handle)
                    if variable is not None:
                        first = firsts.setdefault(id(variable), value)
                    kept = _in_less(value, first)
            found[id(handle)] = Before(handle, kept, value.shape)
    return list(found.values())


def _in_less(value: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
    """Returns a tensor from which the value can be made, ``first`` itself if that is equal."""
    bits = _bits_of(value)
    if bool(tf.reduce_all(bits == tf.reshape(bits, [-1])[0])):
        return tf.reshape(value, [-1])[0]
    if value is not first and bool(tf.reduce_all(bits == _bits_of(first))):
        return first
    return value


def _bits_of(value: tf.Tensor) -> tf.Tensor:
    """Returns what is equal only where all bits are: -0.0 is not 0.0, but compares as equal."""
    dtype = _WHOLE_NUMBERS.get(value.dtype.size)
    if dtype is None or not value.dtype.is_floating:
        return value
    bits: tf.Tensor = tf.bitcast(value, dtype)
    return bits
