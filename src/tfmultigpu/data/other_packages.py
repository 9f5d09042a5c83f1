"""Data of PyTorch, Hugging Face ``datasets`` and SciPy, recognised without importing them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.data.batch_format import map_items
from tfmultigpu.errors import DataError

__all__ = ["is_data_loader", "is_table", "loader_batches", "read_tables", "with_tables"]

_LOADER = "torch.utils.data.dataloader", "DataLoader"
_COLUMN = "datasets.arrow_dataset", "Column"
_DATASET = "datasets.arrow_dataset", "Dataset"
# Kinds that are refused, with the line to write.
_REFUSED = {
    ("datasets.dataset_dict", "DatasetDict"): 'Give one of its datasets: data["train"].',
    ("datasets.dataset_dict", "IterableDatasetDict"): 'Give one of its datasets: data["train"].',
    ("datasets.iterable_dataset", "IterableDataset"): (
        'Give batches of it: lambda: data.with_format("numpy").iter(batch_size=64).'
    ),
    ("torch.utils.data.dataset", "Dataset"): (
        "Give batches of it: torch.utils.data.DataLoader(data, batch_size=64)."
    ),
}
_PLAIN = (int, float, str, bytes)
# The pass that reads each DataLoader; a later one takes over.
_reading: MutableMapping[Any, object] = weakref.WeakKeyDictionary()


def is_data_loader(data: Any) -> bool:
    """Returns whether data is a ``torch.utils.data.DataLoader``."""
    return _is_a(data, _LOADER)


def is_table(value: Any) -> bool:
    """Returns whether ``read_tables`` reads a value: a sparse matrix, a Dataset or its column."""
    return _is_sparse(value) or _is_a(value, _COLUMN) or _is_a(value, _DATASET)


def read_tables(data: Any) -> Any:
    """Reads sparse matrices as sparse tensors, and Hugging Face datasets as arrays.

    Args:
        data: Data of a user; such tables may be anywhere in tuples, lists and dicts.

    Returns:
        The same structure. A matrix of SciPy is a ``tf.SparseTensor``, a Hugging Face dataset a
        dict of one array per column, and a column of it an array. All else is unchanged.

    Raises:
        DataError: A column is not an array, or data is of a kind that has no rows at hand.
    """
    return with_tables(data, _read)


def with_tables(data: Any, convert: Callable[[Any], Any]) -> Any:
    """Returns data with the result of a function in the place of each table in it."""
    if not sys.modules.keys() & {"scipy.sparse", "datasets", "torch"}:
        return data
    for kind, instead in _REFUSED.items():
        if _is_a(data, kind):
            raise DataError(
                f"A {kind[0].partition('.')[0]} {kind[1]} is not batches or arrays. Received: "
                f"{type(data).__name__}. {instead}"
            )
    if is_table(data):
        return convert(data)
    if isinstance(data, (tuple, list)) and data and all(isinstance(one, _PLAIN) for one in data):
        return data
    if isinstance(data, (tuple, list, Mapping)):
        return map_items(lambda item: with_tables(item, convert), data)
    return data


def loader_batches(loader: Any) -> Iterator[Any]:
    """Yields the batches of one pass over a ``DataLoader``, as arrays.

    Raises:
        DataError: The loader reads the part of one process only, a batch is not made of tensors,
            or two passes share one iterator.
    """
    sampler = getattr(loader, "sampler", None)
    if _is_a(sampler, ("torch.utils.data.distributed", "DistributedSampler")):
        parts = getattr(sampler, "num_replicas", 1)
        if parts > 1:
            raise DataError(
                "The DataLoader reads the examples of one process only. Received: a "
                f"DistributedSampler with num_replicas={parts}. Every worker must read all global "
                "batches, of which it takes its rows. Leave the sampler out: "
                "DataLoader(dataset, batch_size=global_batch_size, shuffle=True)."
            )
    turn = _reading[loader] = object()
    for batch in loader:
        if getattr(loader, "persistent_workers", False) and _reading.get(loader) is not turn:
            raise DataError(
                "Two passes read one DataLoader at once. Received: persistent_workers=True, with "
                "which both share one iterator, so the first pass would lose batches. Make a "
                "second DataLoader, or set persistent_workers=False."
            )
        yield _as_arrays(batch)


def _as_arrays(batch: Any) -> Any:
    """Returns a batch of torch tensors as arrays, and lists of text or numbers too."""
    if isinstance(batch, (tuple, list)) and batch and all(isinstance(i, _PLAIN) for i in batch):
        return np.asarray(batch)
    if isinstance(batch, (tuple, list, Mapping)):
        return map_items(_as_arrays, tuple(batch) if isinstance(batch, list) else batch)
    if batch is None or isinstance(batch, np.ndarray):
        return batch
    try:
        # A tensor may be on a GPU, and part of a graph.
        return np.asarray(batch.detach().cpu().numpy())
    except (AttributeError, TypeError, RuntimeError) as error:
        raise DataError(
            f"A batch of the DataLoader is not made of tensors that NumPy can hold: {error} "
            f"Received: {type(batch).__name__}. Convert it in the collate_fn of the DataLoader, "
            "for example bfloat16 with tensor.float()."
        ) from None


def _read(table: Any) -> Any:
    if _is_sparse(table):
        return _sparse_tensor(table)
    if _is_a(table, _COLUMN):
        name, source = table.column_name, table.source
        if _is_a(source, _DATASET):  # Not the column of a column.
            return _read(source.select_columns([name]))[name]
        return _column(repr(name), table[:])
    form = table.format
    if form["type"] == "custom":
        raise DataError(
            "The dataset has a transform, which may give other values each time it is read. "
            "Received: a Dataset with set_transform. Read it anew in each pass: "
            "lambda: data.iter(batch_size=64)."
        )
    # A format of the user chooses columns.
    chosen = {name: form[name] for name in ("columns", "output_all_columns")}
    rows = table.with_format("numpy", **chosen)[:]
    return {name: _column(repr(name), values) for name, values in rows.items()}


def _column(name: str, values: Any) -> Any:
    try:
        array = np.asarray(values)
    except ValueError:  # Lists of different lengths.
        array = np.asarray(None)
    if array.dtype == object:
        raise DataError(
            f"A column is not an array: its rows differ in their lengths, are missing or are "
            f"objects. Received: column {name}. Pad it to one length, such as "
            'tokenizer(..., padding="max_length"), or leave it out: data.remove_columns([...]).'
        )
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _sparse_tensor(matrix: Any) -> Any:
    if len(matrix.shape) != 2:
        raise DataError(
            "A sparse array has rows and columns. Received: a "
            f"{type(matrix).__name__} of shape {matrix.shape}. Write array.toarray()."
        )
    rows = matrix.tocsr(copy=True)  # The next line changes it.
    rows.sum_duplicates()
    entries = rows.tocoo()
    indices = np.stack([entries.row, entries.col], axis=1).astype(np.int64)
    return tf.SparseTensor(indices, entries.data, matrix.shape)


def _is_sparse(value: Any) -> bool:
    module = type(value).__module__
    return module.split(".")[:2] == ["scipy", "sparse"] and hasattr(value, "tocsr")


def _is_a(value: Any, kind: tuple[str, str]) -> bool:
    """Returns whether a class of this module and name is among those of a value."""
    return any((one.__module__, one.__name__) == kind for one in type(value).__mro__)
