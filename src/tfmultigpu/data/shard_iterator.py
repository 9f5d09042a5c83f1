"""One pass over a distributed dataset, which ends before Python does.

An iterator of ``tf.data`` reads ahead in threads of its own. A thread that runs Python, for a
generator or a ``tf.numpy_function``, must have ended before the interpreter does: it would wait
for Python forever, and the process for the thread. What has a reference to an iterator cannot be
known, tracebacks among them, so that it is not enough to drop ours.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import as_data_error
from tfmultigpu.data.cut import Cut
from tfmultigpu.data.sources import untuned
from tfmultigpu.errors import DataError
from tfmultigpu.recorder import noting
from tfmultigpu.types import Batches, Shard

# Those that a user holds, or a traceback, when the program ends.
_open: weakref.WeakSet[ShardIterator] = weakref.WeakSet()


@dataclasses.dataclass(eq=False)
class NextBatch:
    """The next batch of a ``ShardIterator``, or the end of the data, as TensorFlow's optionals.

    Attributes:
        optional: The underlying ``tf.experimental.Optional``.
        cut: Makes a batch of its value.
    """

    optional: Any
    cut: Cut

    def has_value(self) -> tf.Tensor:
        """Returns whether there was a batch, a bool scalar."""
        more: tf.Tensor = self.optional.has_value()
        return more

    def get_value(self) -> Shard:
        """Returns the batch; inside a ``tf.function`` in a branch of ``has_value()`` alone."""
        return self.cut.to_batch(self.optional.get_value())

    def __tf_flatten__(self) -> tuple[tuple[Cut], tuple[Any]]:
        """Lets a ``tf.while_loop`` carry it."""
        return (self.cut,), (self.optional,)

    @classmethod
    def __tf_unflatten__(cls, metadata: tuple[Cut], components: tuple[Any]) -> NextBatch:
        """Inverts ``__tf_flatten__``."""
        return cls(components[0], metadata[0])


@dataclasses.dataclass(eq=False)
class ShardIterator(Iterator[Shard]):
    """One pass over a ``ShardedDataset``; ``iter(dataset)`` creates it.

    Attributes:
        source: The underlying TensorFlow iterator.
        cut: Makes shards and batches of its elements.
        elements: The dataset that the iterator reads; None in a ``tf.function``.
        never_ends: Whether the data is known to have no end.
        read: The batches that ``next`` has returned, outside of a ``tf.function``.
    """

    source: Any
    cut: Cut
    elements: Batches | None = None
    never_ends: bool = False
    read: int = 0

    @classmethod
    def over(cls, source: Any, elements: Batches, cut: Cut, *, never_ends: bool) -> ShardIterator:
        """Begins a pass over ``source``, which hands out the elements."""
        if tf.inside_function():  # Such an iterator ends with the call of the function.
            return cls(iter(source), cut)
        iterator = cls(iter(source), cut, elements, never_ends)
        _open.add(iterator)
        return iterator

    def close(self) -> None:
        """Ends the pass and its threads, even if other code refers to it; no batch is left then.

        Waits for the batch that is being made.
        """
        elements, self.elements, self.never_ends = self.elements, None, False
        if elements is None:
            return
        # TensorFlow ends the threads of an iterator that is made anew, here over no element.
        handle, *_ = tf.nest.flatten(self.source, expand_composites=True)
        with tf.device("CPU:0"):
            nothing = tf.data.experimental.to_variant(untuned(elements.take(0), optimized=False))
            if isinstance(self.source, tf.distribute.DistributedIterator):
                tf.raw_ops.MultiDeviceIteratorInit(
                    dataset=nothing, multi_device_iterator=handle, max_buffer_size=1
                )
            else:
                tf.raw_ops.MakeIterator(dataset=nothing, iterator=handle)

    def __iter__(self) -> ShardIterator:
        """Returns itself; in a ``tf.function``, where a ``for`` over it never ends, raises."""
        if tf.inside_function():
            raise DataError(
                "A for loop over an iterator inside a tf.function would be unrolled forever.",
                "",
                "Write for batch in data, over the dataset itself, or call next(iterator).",
            )
        return self

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __next__(self) -> Shard:
        """Returns the next batch of shards.

        Raises:
            StopIteration: The data has ended (inside a ``tf.function``:
                ``tf.errors.OutOfRangeError`` when it runs).
            DataError: The batch has no rows, or its tensors differ in their number of rows.
        """
        if tf.inside_function():
            return self.get_next()
        try:
            with noting("next batch", "of the pass", self.read + 1):
                element = next(self.source)
            self.read += 1
            return self.cut.to_batch(element)
        except tf.errors.InvalidArgumentError as error:
            raise as_data_error(error) from None

    def get_next(self) -> Shard:
        """Returns the next batch; at the end raises ``OutOfRangeError``, as TensorFlow's does."""
        try:
            element = self.source.get_next()
        except ValueError as error:
            # TensorFlow notices that Python repeats this call, and never ends.
            if "unusually high number" not in str(error):
                raise
            raise DataError(
                "A loop of Python over the data inside a tf.function would be unrolled forever.",
                "enumerate(data), zip(data, ...) or a comprehension",
                "Write for batch in data, and count with a tensor: number += 1.",
            ) from error
        return self.cut.to_batch(element)

    def get_next_as_optional(self) -> NextBatch:
        """Returns the next batch if there is one: see ``has_value()`` and ``get_value()``."""
        return NextBatch(self.source.get_next_as_optional(), self.cut)

    def __tf_flatten__(self) -> tuple[tuple[Cut], tuple[Any]]:
        """Lets a ``tf.function`` take the iterator as an argument; one trace serves all passes."""
        return (self.cut,), (self.source,)

    @classmethod
    def __tf_unflatten__(cls, metadata: tuple[Cut], components: tuple[Any]) -> ShardIterator:
        """Inverts ``__tf_flatten__``."""
        return cls(components[0], metadata[0])


@atexit.register
def close_all() -> None:
    """Closes what is still open, when the program ends."""
    for iterator in list(_open):
        iterator.close()


# The threads of an iterator are not in a process that was forked.
os.register_at_fork(after_in_child=_open.clear)
