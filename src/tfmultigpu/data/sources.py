"""What people have as data, turned into a ``tf.data.Dataset`` of global batches."""

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
from tfmultigpu.data import partition
from tfmultigpu.errors import DataError

__all__ = ["to_dataset"]


def to_dataset(data: Any, batch_size: int | None = None) -> tf.data.Dataset[Any]:
    """Returns data as a dataset of global batches.

    Args:
        data: A ``tf.data.Dataset`` of batches, a ``keras.utils.PyDataset``, a function without
            arguments that returns a fresh generator of batches, or arrays (one, or a tuple, list or
            dict of them) that agree in their first axis. The batches of a PyDataset come in order,
            ``workers`` of them being made at a time by threads.
        batch_size: Rows of a global batch, for arrays only.

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
            f"The data is already distributed. Received: {type(data).__name__}. Give the "
            "tf.data.Dataset of global batches it was made from."
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
            "An iterator can be read once, and looking at it would lose batches. Received: "
            f"{type(data).__name__}. Give the function that makes it: "
            "tmg.distribute_dataset(make_batches), not tmg.distribute_dataset(make_batches())."
        )
    if callable(data):
        _no_batch_size(data, batch_size, "batches of that size from the generator")
        return _from_passes(_Passes(data))
    return _from_arrays(data, batch_size)


def _from_arrays(data: Any, batch_size: int | None) -> tf.data.Dataset[Any]:
    try:
        arrays = tf.nest.map_structure(_array_to_tensor, _lists_to_tuples(data))
    except (TypeError, ValueError) as error:
        hint = ""
        if hasattr(data, "__iter__") and not isinstance(data, (str, bytes, tuple, list, Mapping)):
            hint = " If a loop over it yields batches, give a function that returns it: lambda: it."
        raise DataError(
            f"This is not data that can be distributed: {error}. Received: {type(data).__name__}. "
            f"Give a tf.data.Dataset of global batches, or arrays with batch_size.{hint}"
        ) from None
    leaves = _present(arrays)
    if not leaves:
        raise DataError(f"There are no arrays. Received: {data!r}. Give (features, labels).")
    shapes = [tuple(leaf.shape) for leaf in leaves]
    if () in shapes:
        raise DataError(
            "An array of examples has rows, but one of these is a single value. Received: shapes "
            f"{shapes}."
        )
    if batch_size is None:
        raise DataError(
            "Arrays need the size of a global batch. Received: batch_size=None. Write "
            "tmg.distribute_dataset((x, y), batch_size=64)."
        )
    batch_size = check_count("batch_size", batch_size)
    if len({int(partition.count_rows(leaf)) for leaf in leaves}) > 1:
        raise DataError(
            "The arrays differ in their number of rows, so they cannot be paired. Received: shapes "
            f"{shapes}."
        )
    present = tf.data.Dataset.from_tensor_slices(tuple(leaves)).batch(batch_size)
    return present.map(functools.partial(_fill, arrays))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _fill(structure: Any, *tensors: Any) -> Any:
    """The structure with these tensors in place of its leaves, and None where it had None."""
    turn = iter(tensors)
    leaves = [None if leaf is None else next(turn) for leaf in tf.nest.flatten(structure)]
    return tf.nest.pack_sequence_as(structure, leaves)


def _present(structure: Any) -> tuple[Any, ...]:
    return tuple(leaf for leaf in tf.nest.flatten(structure) if leaf is not None)


def _array_to_tensor(value: Any) -> Any:
    if value is None or tf.is_tensor(value):
        return value
    if not hasattr(value, "__array__"):
        raise TypeError(f"{type(value).__name__} is not an array")
    return tf.convert_to_tensor(value)


def _lists_to_tuples(batch: Any) -> Any:
    """Lists of arrays as tuples, lists of numbers as arrays: tf.data would stack either kind."""
    if isinstance(batch, list):
        if not any(_holds_arrays(item) for item in batch):
            return np.asarray(batch)
        batch = tuple(batch)
    if isinstance(batch, tuple):
        items = [_lists_to_tuples(item) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if isinstance(batch, Mapping):
        return {key: _lists_to_tuples(value) for key, value in batch.items()}
    return batch


def _holds_arrays(item: Any) -> bool:
    if isinstance(item, (list, tuple)):
        return any(_holds_arrays(part) for part in item)
    return isinstance(item, Mapping) or len(getattr(item, "shape", ())) > 0


class _Passes:
    """Fresh iterators of batches; the first pass continues the one whose types were looked at.

    Attributes:
        spec: The types of a batch. An axis that differs between the first two batches is open.
    """

    def __init__(self, make_batches: Callable[[], Any]) -> None:
        """Looks at the first two batches, and keeps them for the first pass."""
        self._make = make_batches
        self._first = iter(make_batches())
        seen = list(itertools.islice(self._first, 2))
        if not seen:
            raise DataError(
                "The generator yields no batches. Received: "
                f"{getattr(make_batches, '__name__', make_batches)!r}."
            )
        first, second = (
            tf.nest.map_structure(_any_rows, _to_tensors_or_arrays(batch))
            for batch in (seen[0], seen[-1])
        )
        try:
            self.spec = tf.nest.map_structure(_supertype, first, second)
        except (TypeError, ValueError):
            raise DataError(
                "The batches of the generator differ in their structure or types. Received: "
                f"{first}, then {second}."
            ) from None
        self._waiting: Iterator[Any] | None = itertools.chain(seen, self._first)

    def __call__(self) -> Iterator[Any]:
        """Begins a pass."""
        batches, self._waiting = self._waiting, None
        if batches is None:
            batches = iter(self._make())
            if batches is self._first:
                raise DataError(
                    "The function returns the same iterator each time, which can be read only "
                    "once, so the second pass would have no data. Make the generator inside it."
                )
        return map(self._checked, batches)

    def _checked(self, batch: Any) -> tuple[Any, ...]:
        leaves, specs = _present(_to_tensors_or_arrays(batch)), _present(self.spec)
        shapes = [leaf.shape for leaf in leaves]
        fits = len(leaves) == len(specs) and all(
            spec.shape.is_compatible_with(shape) for spec, shape in zip(specs, shapes, strict=True)
        )
        if not fits:
            raise DataError(
                "A batch of the generator does not fit the first two. Received: shapes "
                f"{[tuple(shape) for shape in shapes]} where {[spec.shape for spec in specs]} was "
                "expected. An axis may vary if it does so between the first two batches; or give "
                "tf.data.Dataset.from_generator(..., output_signature=...), which says it."
            )
        return leaves


def _supertype(first: Any, second: Any) -> Any:
    if first is None and second is None:
        return None
    spec = first.most_specific_common_supertype([second])
    if spec is None:
        raise TypeError(f"{first} and {second} have nothing in common")
    return spec


def _from_passes(passes: _Passes) -> tf.data.Dataset[Any]:
    present = tf.data.Dataset.from_generator(passes, output_signature=_present(passes.spec))
    return present.map(functools.partial(_fill, passes.spec))


def _to_tensors_or_arrays(batch: Any) -> Any:
    return tf.nest.map_structure(
        lambda leaf: leaf if leaf is None or tf.is_tensor(leaf) else np.asarray(leaf),
        _lists_to_tuples(batch),
    )


def _any_rows(leaf: Any) -> Any:
    if leaf is None:
        return None
    spec: Any = tf.type_spec_from_value(leaf)
    if isinstance(spec, tf.RaggedTensorSpec):
        shape = [None, *leaf.shape[1:]]
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None, *leaf.shape[1:]], leaf.dtype)
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if spec.shape.rank else spec


def _is_py_dataset(data: Any) -> bool:
    # Who has a PyDataset has imported Keras; the others need not wait for it.
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(data, keras.utils.PyDataset)


def _num_batches(data: Any) -> int | None:
    """Batches of a PyDataset; None where it has no end."""
    count = data.num_batches if hasattr(data, "num_batches") else len(data)
    return None if count is None else int(count)


def _py_dataset_batches(data: Any) -> Iterator[Any]:
    """One epoch of a PyDataset, in order; workers make batches ahead of time."""
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
            f"batch_size is for arrays. Received: batch_size={batch_size} with a "
            f"{type(data).__name__}, which already yields batches; use {instead}."
        )
