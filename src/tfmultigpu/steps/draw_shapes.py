"""Shapes of random draws: what the graph tells about their first axis while a step is traced."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

__all__ = ["as_shape", "axis_of", "is_along_rows", "is_by_row", "passes_of", "rows_from"]


def as_shape(shape: Any) -> Any:
    """Returns a shape, lengths or a tensor of them, as an int32 vector."""
    if tf.is_tensor(shape):
        return tf.cast(shape, tf.int32)
    lengths = [tf.cast(length, tf.int32) for length in shape]
    return tf.stack(lengths) if lengths else tf.zeros([0], tf.int32)


def is_by_row(shape: Any) -> bool:
    """Returns whether the first axis of a draw has no length yet, while the step is traced.

    Nor is it by row where that length is seen to be the one of another axis of some tensor, as that
    of noise for the positions of a sequence.
    """
    static = tf.broadcast_to(False, shape).shape
    return bool(static.rank) and static[0] is None and axis_of(shape)[1] in (0, None)


def passes_of(shape: Any) -> int:
    """Returns how many times the first axis of a draw goes through the rows of a batch.

    It does so twice where ``tf.concat`` put the rows of one tensor behind those of another: fake
    behind real ones, or a second view behind the first. Then all first parts come first in the
    global batch, on whatever replica they are. The graph tells, from the tensor whose length the
    axis has; where it does not, all that belongs to a row is taken to be in one place.
    """
    tensor, _ = axis_of(shape)
    return 1 if tensor is None else _passes(tensor)


def axis_of(shape: Any) -> tuple[Any, int | None]:
    """Returns the tensor and the axis whose length the first axis has; None where unknown."""
    first = shape.op.inputs[0] if shape.op.type == "Pack" else shape
    while first.op.type in ("Cast", "Identity"):
        first = first.op.inputs[0]
    if first.op.type == "Shape":
        return first.op.inputs[0], 0
    if first.op.type != "StridedSlice" or first.op.inputs[0].op.type != "Shape":
        return None, None
    begin = tf.get_static_value(first.op.inputs[1])
    rank = first.op.inputs[0].shape[0]
    if begin is None or rank is None or begin.size != 1:
        return None, None
    return first.op.inputs[0].op.inputs[0], int(begin[0]) % int(rank)


_known: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def _passes(tensor: Any) -> int:
    """Counts how often the first axis of a tensor goes through the rows."""
    known = _known.setdefault(tensor.graph, {})  # A graph may have thousands of operations.
    pending = [tensor]
    while pending:
        one = pending[-1]
        times, adds, sources = rows_from(one)
        missing = [source for source in sources if source.name not in known]
        if missing:
            pending.extend(missing)
            continue
        found = [known[source.name] for source in sources]
        alike = found[0] if len(set(found)) == 1 else 1
        known[one.name] = times * (sum(found) if adds else alike)
        pending.pop()
    return known[tensor.name]


def rows_from(tensor: Any) -> tuple[int, bool, list[Any]]:
    """Returns the tensors from which one has its rows: how many times, if one behind the other."""
    op = tensor.op
    given = [one for one in op.inputs if one.shape.rank and one.shape[0] is None]
    if op.type == "ConcatV2" and is_along_rows(op.inputs[-1], tensor):
        parts = list(op.inputs)[:-1]
        return (1, True, parts) if len(given) == len(parts) else (1, False, [])
    if op.type == "Tile":
        times = tf.get_static_value(op.inputs[1], partial=True)
        return (int(times[0]) if times is not None and times[0] else 1), False, given[:1]
    if op.type == "Reshape":  # The first axis is that of a stack: [2, rows, ...] -> [2 * rows, ...]
        before = op.inputs[0].shape
        stacked = before.rank and before.rank > 1 and before[0] is not None and before[1] is None
        return (int(before[0]) if stacked else 1), False, given[:1]
    return 1, False, given if _keeps_rows(op) else []


def is_along_rows(axis: Any, tensor: Any) -> bool:
    """Returns whether an axis, a tensor, is known to be the first one of another tensor."""
    return _static(axis) in (0, -(tensor.shape.rank or 0))


def _keeps_rows(op: Any) -> bool:
    """Returns whether an operation leaves rows in place, as nearly all do."""
    if op.type == "StridedSlice":
        step, inside = _static(op.inputs[3], 0), ("shrink_axis_mask", "new_axis_mask")
        all_of_it = op.get_attr("begin_mask") & op.get_attr("end_mask") & 1 and step == 1
        dots = op.get_attr("ellipsis_mask") & 1
        return bool(all_of_it or dots) and not any(op.get_attr(one) & 1 for one in inside)
    if op.type == "Transpose":
        return _static(op.inputs[1], 0) == 0
    if op.type in ("Split", "SplitV", "GatherV2"):
        cut = op.inputs[1 if op.type == "Split" else 0]
        axis = _static(op.inputs[0 if op.type == "Split" else 2])
        cuts_rows = axis in (0, None) or axis == -(cut.shape.rank or 0)
        return not cuts_rows or cut.shape[0] is not None
    return op.type not in ("Slice", "GatherNd", "Unpack", "DynamicPartition")


def _static(tensor: Any, index: int | None = None) -> int | None:
    value = tf.get_static_value(tensor)
    return None if value is None else int(value if index is None else value[index])
