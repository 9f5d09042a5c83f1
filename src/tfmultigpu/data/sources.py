"""Conversion of user data to a ``tf.data.Dataset`` of global batches."""

from __future__ import annotations

import functools
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.data.batch_format import any_rows, count_rows, map_items, tensors_of
from tfmultigpu.errors import DataError

__all__ = ["fill", "tensors_of_arrays", "to_dataset"]


def to_dataset(data: Any, batch_size: int | None = None) -> tf.data.Dataset[Any]:
    """Returns data as a dataset of global batches.

    Args:
        data: A ``tf.data.Dataset`` of batches, a ``keras.utils.PyDataset``, a function without
            arguments that returns a fresh iterator of batches (of a torch ``DataLoader``:
            ``lambda: loader``), or arrays (one, or a tuple, list or dict of them) that agree in
            their first axis. The batches of a PyDataset come in order; its ``workers`` threads make
            them ahead of time.
        batch_size: Examples of a global batch, for arrays only.

    Returns:
        A dataset that can be iterated any number of times.

    Raises:
        DataError: The data is already distributed, one-shot, or not data; arrays without
            ``batch_size``, or ``batch_size`` without arrays.

    Example:
        >>> import numpy as np
        >>> from tfmultigpu.data.sources import to_dataset
        >>> [batch.shape[0] for batch in to_dataset(np.zeros((5, 2)), batch_size=2)]
        [2, 2, 1]
    """
    if isinstance(data, (tf.distribute.DistributedDataset, tf.distribute.DistributedValues)):
        raise DataError(
            f"The data is already distributed. Received: {type(data).__name__}. Give the original "
            "tf.data.Dataset of global batches."
        )
    if isinstance(data, tf.data.Dataset):
        _no_batch_size(data, batch_size, "dataset.batch(batch_size)")
        return data
    if _is_py_dataset(data):
        _no_batch_size(data, batch_size, "the batch size of the PyDataset itself")
        if _num_batches(data) == 0:
            raise DataError(
                f"The PyDataset has no batches. Received: {type(data).__name__} of length 0."
            )
        return _from_passes(_Passes(lambda: _py_dataset_batches(data)))
    if isinstance(data, (Iterator, tf.data.Iterator)):
        raise DataError(
            "An iterator can be read once, and inspecting it would lose batches. Received: "
            f"{type(data).__name__}. Give the function that makes it: write "
            "tmg.distribute_dataset(make_batches), not tmg.distribute_dataset(make_batches())."
        )
    if callable(data):
        _no_batch_size(data, batch_size, "batches of that size from the generator")
        return _from_passes(_Passes(data))
    return _from_arrays(data, batch_size)


def tensors_of_arrays(data: Any) -> Any:
    """Returns arrays, one or a tuple, list or dict of them, as tensors with equally many rows.

    Lists of arrays are tuples in the result, as in the batches of ``to_dataset``.

    Raises:
        DataError: The data is not arrays, or they differ in their number of rows.
    """
    try:
        arrays = tf.nest.map_structure(_array_to_tensor, _lists_to_tuples(data))
    except (TypeError, ValueError) as error:
        hint = ""
        if hasattr(data, "__iter__") and not isinstance(data, (str, bytes, tuple, list, Mapping)):
            hint = " If it is an iterable of batches, give a function that returns it: lambda: it."
        received = repr(data) if isinstance(data, (str, int, float)) else type(data).__name__
        raise DataError(
            f"The data cannot be distributed: {error}. Received: {received}. Give a "
            f"tf.data.Dataset of global batches, or arrays with batch_size.{hint}"
        ) from None
    leaves = tensors_of(arrays)
    if not leaves:
        raise DataError(f"The data has no arrays. Received: {data!r}. Give (features, labels).")
    shapes = [tuple(leaf.shape) for leaf in leaves]
    if () in shapes:
        raise DataError(
            "An array of examples has rows, but one of these is a scalar. Received: shapes "
            f"{shapes}. Give every array one row per example."
        )
    if len({int(count_rows(leaf)) for leaf in leaves}) > 1:
        raise DataError(
            "The arrays differ in their number of rows, so they cannot be paired. Received: shapes "
            f"{shapes}. Give one row per example in each."
        )
    return arrays


def _from_arrays(data: Any, batch_size: int | None) -> tf.data.Dataset[Any]:
    arrays = tensors_of_arrays(data)
    if batch_size is None:
        raise DataError(
            "Arrays need the size of a global batch. Received: batch_size=None. Write "
            "tmg.distribute_dataset((x, y), batch_size=64)."
        )
    batch_size = check_count("batch_size", batch_size, error=DataError)
    leaves = tuple(tensors_of(arrays))
    present = tf.data.Dataset.from_tensor_slices(leaves).batch(batch_size)
    return present.map(functools.partial(fill, arrays))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def fill(structure: Any, *tensors: Any) -> Any:
    """Returns the structure with these tensors as its leaves; a None leaf stays None."""
    replacements = iter(tensors)
    leaves = [None if leaf is None else next(replacements) for leaf in tf.nest.flatten(structure)]
    return tf.nest.pack_sequence_as(structure, leaves)


def _array_to_tensor(value: Any) -> Any:
    if value is None or tf.is_tensor(value):
        return value
    if not hasattr(value, "__array__"):
        raise TypeError(f"{type(value).__name__} is not an array")
    return tf.convert_to_tensor(value)


def _lists_to_tuples(batch: Any) -> Any:
    """Converts lists of arrays to tuples and other lists to arrays; tf.data would stack both."""
    if isinstance(batch, list):
        if not any(_holds_arrays(item) for item in batch):
            return np.asarray(batch)
        batch = tuple(batch)
    return map_items(_lists_to_tuples, batch) if isinstance(batch, (tuple, Mapping)) else batch


def _holds_arrays(item: Any) -> bool:
    if isinstance(item, (list, tuple)):
        return any(_holds_arrays(part) for part in item)
    return isinstance(item, Mapping) or len(getattr(item, "shape", ())) > 0


class _Passes:
    """Fresh iterators of batches; the first pass continues the iterator that was inspected.

    Attributes:
        spec: Type specs of a batch. An axis that differs between the first two batches is unknown.
    """

    def __init__(self, make_batches: Callable[[], Any]) -> None:
        """Reads the first two batches, and keeps them for the first pass."""
        self._make = make_batches
        self._first = iter(make_batches())
        seen = list(itertools.islice(self._first, 2))
        if not seen:
            raise DataError(
                "The generator yields no batches. Received: "
                f"{getattr(make_batches, '__name__', make_batches)!r}."
            )
        first, second = (
            tf.nest.map_structure(_spec_of, _to_tensors_or_arrays(batch))
            for batch in (seen[0], seen[-1])
        )
        try:
            self.spec = tf.nest.map_structure(_supertype, first, second)
        except (TypeError, ValueError):
            raise DataError(
                "The batches of the generator differ in their structure or types. Received: "
                f"{first}, then {second}."
            ) from None
        self._next_pass: Iterator[Any] | None = itertools.chain(seen, self._first)

    def __call__(self) -> Iterator[Any]:
        """Begins a pass."""
        batches, self._next_pass = self._next_pass, None
        if batches is None:
            batches = iter(self._make())
            if batches is self._first:
                raise DataError(
                    "The function returns the same iterator each time, so the second pass would "
                    "have no data. Make the generator inside the function."
                )
        return map(self._checked, batches)

    def _checked(self, batch: Any) -> tuple[Any, ...]:
        leaves, specs = tensors_of(_to_tensors_or_arrays(batch)), tensors_of(self.spec)
        shapes = [leaf.shape for leaf in leaves]
        fits = len(leaves) == len(specs) and all(
            spec.shape.is_compatible_with(shape) for spec, shape in zip(specs, shapes, strict=True)
        )
        if not fits:
            raise DataError(
                "A batch of the generator does not fit the first two. Received: shapes "
                f"{[tuple(shape) for shape in shapes]}, expected {[spec.shape for spec in specs]}. "
                "An axis may vary if it differs between the first two batches; or set "
                "tf.data.Dataset.from_generator(..., output_signature=...)."
            )
        return tuple(leaves)


def _supertype(first: Any, second: Any) -> Any:
    if first is None and second is None:
        return None
    spec = first.most_specific_common_supertype([second])
    if spec is None:
        raise TypeError(f"{first} and {second} have nothing in common")
    return spec


def _from_passes(passes: _Passes) -> tf.data.Dataset[Any]:
    present = tf.data.Dataset.from_generator(
        passes, output_signature=tuple(tensors_of(passes.spec))
    )
    return present.map(functools.partial(fill, passes.spec))


def _to_tensors_or_arrays(batch: Any) -> Any:
    return tf.nest.map_structure(
        lambda leaf: leaf if leaf is None or tf.is_tensor(leaf) else np.asarray(leaf),
        _lists_to_tuples(batch),
    )


def _spec_of(leaf: Any) -> Any:
    return None if leaf is None else any_rows(tf.type_spec_from_value(leaf))


def _is_py_dataset(data: Any) -> bool:
    # A PyDataset exists only after Keras was imported; without one, the import is saved.
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(data, keras.utils.PyDataset)


def _num_batches(data: Any) -> int | None:
    """Returns the number of batches of a PyDataset; None if it has no end."""
    count = data.num_batches if hasattr(data, "num_batches") else len(data)
    return None if count is None else int(count)


def _py_dataset_batches(data: Any) -> Iterator[Any]:
    """Yields one epoch of a PyDataset in order; threads make batches ahead of time."""
    if hasattr(data, "on_epoch_begin"):
        data.on_epoch_begin()
    count = _num_batches(data)
    indices = iter(itertools.count() if count is None else range(count))
    workers = max(1, data.workers)
    if workers == 1:
        yield from (data[index] for index in indices)
    else:
        with ThreadPoolExecutor(workers) as pool:
            ahead = max(workers, data.max_queue_size)
            queue = deque(
                pool.submit(data.__getitem__, i) for i in itertools.islice(indices, ahead)
            )
            while queue:
                yield queue.popleft().result()
                queue.extend(pool.submit(data.__getitem__, i) for i in itertools.islice(indices, 1))
    data.on_epoch_end()


def _no_batch_size(data: Any, batch_size: int | None, instead: str) -> None:
    if batch_size is not None:
        raise DataError(
            f"batch_size is for arrays, and a {type(data).__name__} already yields batches. "
            f"Received: batch_size={batch_size}. Use {instead}."
        )
