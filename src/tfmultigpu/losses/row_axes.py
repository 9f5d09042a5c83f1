"""Finds losses that pair the rows of one tensor with another axis of a second tensor.

Labels of shape ``[rows]`` with predictions of shape ``[rows, 3]`` are an error for most batches.
With three rows they broadcast along the wrong axis. A shard may have three rows, or one, although
its batch has another number. So the loss is traced once with a number of rows that no other axis
has.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.errors import LossError
from tfmultigpu.losses.trials import run_in_thread

__all__ = ["check_row_axes"]

_log = logging.getLogger("tfmultigpu")

_ROWS = (840, 1260, 1680, 2520)  # Divisible by the usual sizes of groups of rows.
_LENGTHS = (0, 11, 13, 17, 19, 23)  # Lengths of unknown axes, by the number of the axis.
# The shapes that have passed the check, by loss.
_passed: MutableMapping[Any, set[Any]] = weakref.WeakKeyDictionary()


def check_row_axes(
    loss: Any,
    values: Callable[..., Any],
    y_true: Any,
    y_pred: Any,
    sample_weight: Any,
    *,
    throughout: bool,
) -> None:
    """Checks, while a step is traced, that a loss pairs rows only with rows.

    Args:
        loss: The Keras loss.
        values: ``f(y_true, y_pred, sample_weight)``, the values of the loss, weighted.
        y_true: Labels.
        y_pred: Predictions.
        sample_weight: Weights, or None.
        throughout: Whether the loss never compares rows on purpose, so that intermediate tensors
            may not have two axes of rows either.

    Raises:
        LossError: It pairs rows with another axis, or each row with every row.
    """
    if tf.executing_eagerly():
        return  # TensorFlow checks the shapes of the data itself.
    structure = (y_true, y_pred, sample_weight)
    leaves = tf.nest.flatten(structure)
    masks = [_compat.keras_mask(leaf) for leaf in leaves]
    shapes = [_shape_of(leaf) for leaf in [*leaves, *masks]]
    first = _shape_of(tf.nest.flatten(y_pred)[0])
    if not first or "unknown" in shapes:
        return
    key = tuple(shapes)
    try:
        known = _passed.setdefault(loss, set())
    except TypeError:  # A user's loss without a hash or weak references.
        known = set()
    if key in known:
        return
    used = {length for shape in shapes for length in (shape or ())[1:]}
    rows = next(number for number in _ROWS if number not in used)

    def shapes_for(number: int | None) -> list[Any]:
        """Returns the shapes of the values and of intermediate tensors; None: unknown rows."""
        resized = [_with_rows(shape, first[0], number) for shape in shapes]
        pairs = zip(resized, [*leaves, *masks], strict=True)
        specs = [None if one is None else tf.TensorSpec(shape, one.dtype) for shape, one in pairs]

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def function(*tensors: Any) -> Any:
            given = iter(tensors)
            made = [None if spec is None else next(given) for spec in specs]
            for leaf, mask in zip(made, made[len(leaves) :], strict=False):
                _compat.set_keras_mask(leaf, mask)
            return values(*tf.nest.pack_sequence_as(structure, made[: len(leaves)]))

        signature = [spec for spec in specs if spec is not None]
        traced = tf.function(function, autograph=False).get_concrete_function(*signature)
        inner = [one.shape for op in traced.graph.get_operations() for one in op.outputs]
        return [traced.structured_outputs.shape, *(inner if throughout else [])]

    try:
        found = run_in_thread(lambda: shapes_for(rows))
    except Exception as error:  # User code may raise anything.
        if _also_fails(lambda: shapes_for(None)):
            return
        raise LossError(_message(loss, leaves, str(error))) from error
    if any(shape.rank and shape.as_list().count(rows) > 1 for shape in found):
        pairs = "each row is paired with every row; if that is intended, see tmg.gather_rows."
        raise LossError(_message(loss, leaves, pairs))
    known.add(key)


def _also_fails(call: Callable[[], Any]) -> bool:
    try:
        run_in_thread(call)
    except Exception as error:
        _log.info("A loss could not be traced on shapes alone: %s", error)
        return True
    return False


def _shape_of(leaf: Any) -> Any:
    """Returns the shape of a dense tensor as a tuple, None for None, else "unknown"."""
    if leaf is None:
        return None
    if not isinstance(leaf, tf.Tensor | np.ndarray):
        return "unknown"
    shape = tf.TensorShape(leaf.shape)
    return "unknown" if shape.rank is None else tuple(shape.as_list())


def _with_rows(shape: Any, known_rows: Any, rows: int | None) -> Any:
    """Returns the shape with another number of rows, and a length for every other unknown axis."""
    if not shape:
        return shape
    inner = [
        _LENGTHS[min(axis, len(_LENGTHS) - 1)] if length is None else length
        for axis, length in enumerate(shape)
    ][1:]
    return [rows if shape[0] in (None, known_rows) else shape[0], *inner]


def _message(loss: Any, leaves: list[Any], problem: str) -> str:
    shapes = [str(tuple(leaf.shape)) for leaf in leaves if leaf is not None]
    return (
        f"The loss {loss.name!r} does not pair rows with rows: {problem.strip().splitlines()[0]} "
        f"Received: labels, predictions and weights of shapes {', '.join(shapes)}. One device "
        "raises an error, or pairs the wrong numbers if two axes are equally long; shards would do "
        "so for other batches. Give each tensor all axes after the rows, of length 1 to broadcast: "
        "labels y[:, None] or weights sample_weight[:, None]."
    )
