"""Format of a batch: features, labels and sample weights, with any number of rows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfmultigpu.errors import DataError

__all__ = ["any_rows", "take", "unpack_batch"]


def unpack_batch(batch: Any) -> tuple[Any, Any, Any]:
    """Returns features, labels and sample weights of a batch; None for a missing part.

    A tuple is ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``; anything else is ``x``, as in
    Keras.

    Raises:
        DataError: A tuple of another length.
    """
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
    """Returns the type spec of a tensor, with an unknown number of rows."""
    if leaf is None:
        return None
    if isinstance(leaf, tf.RaggedTensor):
        shape = [None, *leaf.shape[1:]]
        splits = leaf.row_splits.dtype
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, splits)
    if isinstance(leaf, tf.SparseTensor):
        return tf.SparseTensorSpec([None, *leaf.shape[1:]], leaf.dtype)
    return tf.TensorSpec([None, *leaf.shape[1:]] if leaf.shape.rank else [], leaf.dtype)


def take(spec: Any, tensors: Any) -> Any:
    """Builds the next leaf from an iterator of tensors; a composite leaf takes several of them."""
    parts = [next(tensors) for _ in tf.nest.flatten(spec, expand_composites=True)]
    return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)
