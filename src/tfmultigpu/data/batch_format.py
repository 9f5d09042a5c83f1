"""Format of a batch: features, labels and sample weights; its tensors, rows and type specs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.data.parts import ROWS, is_marked, part_of_each_leaf
from tfmultigpu.errors import DataError

__all__ = [
    "any_rows",
    "as_data_error",
    "check_rows_agree",
    "checked_rows",
    "count_rows",
    "first_tensor",
    "rows_of_parts",
    "take",
    "tensors_by_part",
    "tensors_of",
    "unpack_batch",
    "with_dependencies",
]


NO_ROWS = (
    "A batch has no rows. A replica cannot train on it. Drop empty batches: "
    "dataset.filter(lambda x, y: tf.shape(x)[0] > 0)."
)
ROWS_DIFFER = (
    "The tensors of a batch differ in their number of rows (their first axis), so features and "
    "labels would be paired wrongly. Check the dataset before .batch(). If they are meant to "
    "differ, give tmg.Parts(labeled=(x, y), unlabeled=u). Received: rows"
)
PART_NO_ROWS = (
    "A part of a batch has no rows, and a replica cannot compute on it. Repeat the smaller data, "
    "dataset.repeat(), or drop such batches: dataset.filter(...). Received: no rows in part"
)
PART_ROWS_DIFFER = (
    "The tensors of one part of a batch differ in their number of rows (their first axis), so they "
    "would be paired wrongly. Give tensors with other rows another part: Parts(labeled=(x, y), "
    "unlabeled=u). Received: rows"
)
PREPROCESSED_ROWS = (
    "preprocess was given the rows of a process and returned another number of rows, so it is "
    "unknown which shard each belongs to. Return one row for each. Received: rows in and out"
)
DRAW_NOT_ROWS = (
    "A random draw for several parts of a batch has another number of rows than these parts "
    "together, so it is unknown which numbers belong to which example. Draw for each part by "
    "itself, with the shape of one of its tensors."
)


def unpack_batch(batch: Any) -> tuple[Any, Any, Any]:
    """Returns features, labels and sample weights of a batch; None for a missing part.

    A tuple is ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``; anything else is ``x``, as in
    Keras.

    Raises:
        DataError: A tuple of another length; or a batch of ``Parts`` or with ``Whole`` values,
            which only a function of the user can take apart.
    """
    if is_marked(batch):
        raise DataError(
            "Only your own function knows what to do with Parts and Whole values of a batch. "
            f"Received: a batch of type {type(batch).__name__}, and no forward. Write "
            "make_train_step(..., loss=None, forward=f) with f(model, batch, training), which "
            "returns a LossSum."
        )
    if not isinstance(batch, tuple):
        return batch, None, None
    if not 1 <= len(batch) <= 3:
        raise DataError(
            f"A batch is x, (x, y) or (x, y, sample_weight). Received: a tuple of {len(batch)} "
            "elements. Put several inputs into a dict or an inner tuple, or unpack the batch "
            "yourself in forward=f(model, batch, training)."
        )
    x, y, weight = (*batch, None, None)[:3]
    return x, y, weight


def any_rows(leaf: Any) -> Any:
    """Returns the type spec of a tensor, or of its spec, with an unknown number of rows."""
    if leaf is None:
        return None
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        leaf = tf.type_spec_from_value(leaf)
    if isinstance(leaf, tf.RaggedTensorSpec):
        spec: Any = leaf
        shape = [None, *spec.shape[1:]]
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    if isinstance(leaf, tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None, *leaf.shape[1:]], leaf.dtype)
    return tf.TensorSpec([None, *leaf.shape[1:]] if leaf.shape.rank else [], leaf.dtype)


def take(spec: Any, tensors: Any) -> Any:
    """Builds the next leaf from an iterator of tensors; a composite leaf takes several of them."""
    parts = [next(tensors) for _ in tf.nest.flatten(spec, expand_composites=True)]
    return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)


def tensors_of(batch: Any) -> list[Any]:
    """Returns the tensors of a batch in the order of ``tf.nest``, leaving out None."""
    return [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]


def tensors_by_part(batch: Any) -> dict[str, list[Any]]:
    """Returns the tensors with rows of each part of a batch, by name, leaving out None.

    An ordinary batch is one part, ``ROWS``. ``Whole`` values are left out.
    """
    found: dict[str, list[Any]] = {}
    for name, leaf in zip(part_of_each_leaf(batch), tf.nest.flatten(batch), strict=True):
        if name is not None and leaf is not None:
            found.setdefault(name, []).append(leaf)
    return found


def first_tensor(batch: Any) -> Any:
    """Returns the first tensor with rows of a nested structure.

    Raises:
        DataError: The structure holds no such tensor.
    """
    return next(iter(_tensors_by_part(batch).values()))[0]


def _tensors_by_part(batch: Any) -> dict[str, list[Any]]:
    found = tensors_by_part(batch)
    if found:
        return found
    if tensors_of(batch):
        raise DataError(
            "The batch has no rows to divide over the replicas: all of it is Whole. Received: "
            f"{batch!r}. Give at least one tensor with a row per example, such as the numbers of "
            "the nodes to train on."
        )
    raise DataError(
        f"The batch holds no tensors. Received: {batch!r}. "
        "A batch is a tensor or a tuple or dict of tensors, such as (features, labels)."
    )


def rows_of_parts(batch: Any) -> dict[str, Any]:
    """Returns the number of rows of each part of a batch, int64 scalars, by name."""
    return {name: _rows_of(leaves[0]) for name, leaves in _tensors_by_part(batch).items()}


def count_rows(batch: Any) -> Any:
    """Returns the number of rows of a batch, that of its smallest part: an int64 scalar."""
    rows = list(rows_of_parts(batch).values())
    return rows[0] if len(rows) == 1 else tf.reduce_min(tf.stack(rows))


def _rows_of(tensor: Any) -> Any:
    if isinstance(tensor, tf.SparseTensor):
        return tensor.dense_shape[0]
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.nrows(out_type=tf.int64)
    if isinstance(tensor, tf.Tensor) and tensor.shape.rank and tensor.shape[0] is not None:
        return tf.constant(tensor.shape[0], tf.int64)
    # On the device of the tensor, so that it is not copied to be counted. In 32 bits, which GPUs
    # keep in host memory.
    with tf.device(None):
        rows = tf.shape(tensor)[0]
    return tf.cast(rows, tf.int64)


def check_rows_agree(batch: Any) -> list[tf.Operation]:
    """Returns assertions that all tensors of a batch have the same number of rows, at least one.

    In a batch of ``Parts`` those of each part; ``Whole`` values have no rows.

    Args:
        batch: Nested structure of dense, ragged or sparse tensors.

    Returns:
        Operations for a control dependency, which fail with ``tf.errors.InvalidArgumentError``.
        The list is empty if the static shapes are enough, and in eager mode, in which a wrong batch
        raises at once.
    """
    checks = []
    for name, leaves in _tensors_by_part(batch).items():
        known = {leaf.shape[0] if leaf.shape.rank else None for leaf in leaves}
        if len(known) == 1 and (known.pop() or 0) > 0:
            continue
        part = [] if name == ROWS else [f"part '{name}'"]
        differ, none = (PART_ROWS_DIFFER, PART_NO_ROWS) if part else (ROWS_DIFFER, NO_ROWS)
        # In int32: without a conditional around it, Assert prints only int32 and text.
        rows = tf.stack([tf.cast(_rows_of(leaf), tf.int32) for leaf in leaves])
        alike = tf.reduce_all(rows == rows[0])
        checks += [
            tf.debugging.Assert(alike, [differ, rows, *part], summarize=100),
            tf.debugging.Assert(rows[0] > 0, [none, *part]),
        ]
    return [check for check in checks if check is not None]


def checked_rows(batch: Any) -> Any:
    """Returns a batch whose tensors depend on the assertions of ``check_rows_agree``."""
    checks = check_rows_agree(batch)
    if not checks:
        return batch
    return with_dependencies(checks, batch)


def with_dependencies(operations: Sequence[Any], batch: Any) -> Any:
    """Returns a batch whose tensors are computed after some operations."""
    with tf.control_dependencies(operations):
        return tf.nest.map_structure(
            lambda one: None if one is None else tf.identity(one), batch, expand_composites=True
        )


def as_data_error(error: Any) -> Exception:
    """Returns the DataError that an error of TensorFlow stands for, any other error unchanged.

    That is a failed assertion of ``check_rows_agree``, or a DataError that Python code raised
    inside ``tf.data``.
    """
    if NO_ROWS in error.message:
        return DataError(NO_ROWS)
    if DRAW_NOT_ROWS in error.message:
        return DataError(DRAW_NOT_ROWS)
    # TensorFlow writes a backslash before the quotes of an assertion.
    part = re.search(r"part \\?'([^'\\]*)\\?'", error.message)
    if PART_NO_ROWS in error.message and part:
        return DataError(f"{PART_NO_ROWS} '{part[1]}'.")
    for text in (ROWS_DIFFER, PART_ROWS_DIFFER, PREPROCESSED_ROWS):
        if text in error.message:
            rows = re.search(r"[\d ,]+", error.message.split(text, 1)[1].lstrip("]['\n "))
            counts = ", ".join(re.findall(r"\d+", rows.group())) if rows else "unknown"
            where = "" if text != PART_ROWS_DIFFER or part is None else f" in part '{part[1]}'"
            return DataError(f"{text} {counts}{where}.")
    raised = re.search(r"^(?:.*\s)?DataError: (.+)$", error.message, re.MULTILINE)
    return DataError(raised[1]) if raised else error
