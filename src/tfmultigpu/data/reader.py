"""Batches that Python makes, read pass after pass: a generator function, a ``PyDataset``, a loader.

The thread of ``tf.data`` reads them ahead of the steps. Whatever else Keras calls of such an
object, it calls between the passes, on the thread that trains. So does this::

    fit        on_epoch_end, then for each epoch: on_epoch_begin, the batches, on_epoch_end
    iter(data) on_epoch_end of the pass before, on_epoch_begin; so the first one is as in fit
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.arguments import brief, check_callable
from tfmultigpu.data.batch_format import any_rows, lists_to_tuples
from tfmultigpu.errors import DataError
from tfmultigpu.types import Array, Function, Shard, Tensor

# The batches that determine the type specs; Keras looks at as many.
_LOOKED_AT = 2


class Reader:
    """Fresh iterators of batches, for ``tf.data.Dataset.from_generator``.

    Attributes:
        spec: Type specs of a batch. An axis that differs between the first two batches is unknown.
        cardinality: Batches of a pass, negative as of a ``tf.data.Dataset``.
    """

    def __init__(
        self,
        begin: Callable[[], Iterator[Shard]],
        spec: Any,
        hooks: Any = None,
    ) -> None:
        """Use ``of_function`` or ``of_keras``; ``hooks`` is a ``PyDataset``, or None."""
        self.spec = spec
        self.cardinality: int = tf.data.UNKNOWN_CARDINALITY
        if hooks is not None:
            length = hooks.num_batches
            self.cardinality = tf.data.INFINITE_CARDINALITY if length is None else length
        self._begin, self._hooks = begin, hooks
        # Keras ends an epoch before the first one begins.
        self._has_ended = False
        self._most: int | None = None
        self._continues = False
        self._pass: Iterator[Shard] | None = None

    @classmethod
    def of_function(cls, make_batches: Callable[[], Iterable[Shard]]) -> Reader:
        """Reads what a function returns; its first pass continues the one that is looked at."""
        check_callable("data", make_batches, write="def data(), which yields batches (x, y).")
        first = iter(make_batches())
        looked_at = _look_at(first)
        # It is not kept once it is read: a generator of the user then ends.
        first_pass: list[Iterator[Shard]] = [itertools.chain(looked_at, first)]
        first_iterator = _weakly(first)

        def begin() -> Iterator[Shard]:
            if first_pass:
                return first_pass.pop()
            batches = iter(make_batches())
            if batches is first_iterator():
                raise DataError(
                    "The function returns the same iterator each time, so the second pass would "
                    "have no data.",
                    "",
                    "Make the generator inside the function.",
                )
            return batches

        name = getattr(make_batches, "__name__", "")
        return cls(begin, _spec_of_batches(looked_at, name))

    @classmethod
    def of_keras(cls, data: Any) -> Reader | None:
        """Reads data as ``fit`` of Keras reads it; None if Keras does not read it by batches."""
        reading = _compat.reading_of_keras(data)
        if reading is None:
            return None
        # Keras makes these once more for the first pass, which on_epoch_end may have shuffled.
        looked_at = _look_at(reading.looked_at())
        spec = _spec_of_batches(looked_at, type(data).__name__)
        return cls(reading.batches, spec, reading.hooks)

    def apart(self) -> Reader:
        """Returns a reader of the same data whose passes are its own: nothing else ends them."""
        return Reader(self._begin, self.spec, self._hooks)

    # Between the passes, on the thread that trains. -----------------------------------------------

    def begin(self) -> None:
        """Calls ``on_epoch_begin``, after the ``on_epoch_end`` that is still due."""
        if not self._has_ended:
            self.end()
        self._has_ended = False
        if self._hooks is not None:
            self._hooks.on_epoch_begin()

    def end(self) -> None:
        """Calls ``on_epoch_end``."""
        self._has_ended = True
        if self._hooks is not None:
            self._hooks.on_epoch_end()

    def owe_no_end(self) -> None:
        """Leaves out the ``on_epoch_end`` before the first pass, as ``predict`` of Keras does."""
        self._has_ended = True

    def read_by(self, most: int | None, *, continues: bool) -> None:
        """Has each iterator end after so many batches, so that none is read before its epoch.

        Args:
            most: The batches of an epoch; None for a whole pass.
            continues: Whether an iterator continues the pass that the one before it has left.
        """
        self._most, self._continues = most, continues

    def end_pass(self) -> None:
        """Drops the pass that is to be continued: the next iterator begins another one.

        No iterator may read it any more: Python refuses to close what another thread runs.
        """
        close: Function | None = getattr(self._pass, "close", None)
        self._pass = None
        if close is not None:
            close()

    # In the thread of tf.data. --------------------------------------------------------------------

    def __call__(self) -> Iterator[Shard]:
        """Begins a pass, or continues one."""
        batches = self._pass if self._continues else None
        if batches is None:
            batches = self._begin()
        if self._continues:
            self._pass = batches
        return map(self._checked, itertools.islice(batches, self._most))

    def _checked(self, batch: Shard) -> Shard:
        """Returns a batch; TensorFlow would convert one of another type, and drop fractions."""
        batch = _to_tensors_or_arrays(batch)
        for spec, leaf in zip(tf.nest.flatten(self.spec), tf.nest.flatten(batch), strict=False):
            if getattr(spec, "dtype", None) != getattr(leaf, "dtype", None):
                raise DataError(
                    "The batches of the generator differ in their types.",
                    f"{brief(leaf)}, after {spec}",
                )
        return batch


def _weakly(iterator: Iterator[Shard]) -> Callable[[], Iterator[Shard] | None]:
    try:
        return weakref.ref(iterator)
    except TypeError:  # Of an iterator written in C, which holds nothing of the user.
        return lambda: iterator


def _look_at(batches: Iterable[Shard]) -> list[Shard]:
    return list(map(_to_tensors_or_arrays, itertools.islice(batches, _LOOKED_AT)))


def _to_tensors_or_arrays(batch: Shard) -> Shard:
    return tf.nest.map_structure(_to_tensor_or_array, lists_to_tuples(batch))


def _to_tensor_or_array(leaf: Tensor) -> Tensor | Array:
    if leaf is None or tf.is_tensor(leaf):
        return leaf
    return np.asarray(leaf)


def _spec_of_batches(batches: list[Shard], name: str) -> Any:
    if not batches:
        raise DataError("The data yields no batches.", repr(name))
    first = tf.nest.map_structure(_spec_of, batches[0])
    second = tf.nest.map_structure(_spec_of, batches[-1])
    return tf.nest.map_structure(
        lambda spec, other: spec.most_specific_common_supertype([other]) or spec, first, second
    )


def _spec_of(leaf: Tensor) -> Any:
    spec = tf.type_spec_from_value(leaf)
    return spec if leaf is None else any_rows(spec)
