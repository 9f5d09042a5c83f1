"""Finds losses that pair the rows of one tensor with another axis of a second tensor.

Labels ``[rows]`` with predictions ``[rows, 3]`` are an error for most batches, but broadcast for
three rows, which a shard may have. So the loss is traced with a number of rows that no axis has.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.errors import LossError

_ROWS = (840, 1260, 1680, 2520)  # Divisible by the usual sizes of groups of rows.
_LENGTHS = (0, 11, 13, 17, 19, 23)  # Lengths of unknown axes, by the number of the axis.


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def check_row_axes(
    name: str, values: Callable[..., Any], arguments: tuple[Any, Any, Any], *, throughout: bool
) -> None:
    """Checks, while a step is traced, that a loss pairs rows only with rows."""
    leaves = tf.nest.flatten(arguments)
    tensors = [leaf for leaf in leaves if leaf is not None]
    if tf.executing_eagerly() or not all(map(_is_dense, tensors)):
        return  # TensorFlow checks the shapes of real data itself.
    shapes = [tf.TensorShape(tensor.shape).as_list() for tensor in tensors]
    unknown = [None, *tf.TensorShape(tf.nest.flatten(arguments[1])[0].shape).as_list()[:1]]
    distinct = next(n for n in _ROWS if all(n not in shape[1:] for shape in shapes))

    def shapes_of_values(rows: int | None) -> list[tf.TensorShape]:
        def function(*inputs: Any) -> Any:
            remaining = iter(inputs)
            filled = [leaf if leaf is None else next(remaining) for leaf in leaves]
            return values(*tf.nest.pack_sequence_as(arguments, filled))

        specs = []
        for shape, tensor in zip(shapes, tensors, strict=True):
            full: list[Any] = [
                n or _LENGTHS[min(axis, len(_LENGTHS) - 1)] for axis, n in enumerate(shape)
            ]
            full[:1] = [rows if n in unknown else n for n in shape[:1]]
            specs.append(tf.TensorSpec(full, tensor.dtype))
        traced = tf.function(function, autograph=False).get_concrete_function(*specs)
        inner = [output.shape for op in traced.graph.get_operations() for output in op.outputs]
        return [traced.structured_outputs.shape, *(inner if throughout else [])]

    # TensorFlow and Keras keep the state of a call per thread: a new one leaves the step alone.
    with ThreadPoolExecutor(1) as pool:
        trial = pool.submit(shapes_of_values, distinct)
        error = trial.exception()
        if error is not None and pool.submit(shapes_of_values, None).exception():
            return  # Not of the number of rows: the step will raise it, if it is an error there.
    problem = "each row is paired with every row; if that is intended, see tmg.gather_rows."
    if error is not None:
        problem = str(error).strip().splitlines()[0]
    elif all(not shape.rank or shape.as_list().count(distinct) < 2 for shape in trial.result()):
        return
    raise LossError(
        f"The loss {name!r} does not pair rows with rows: {problem} Received: labels, predictions "
        f"and weights of shapes {', '.join(str(tuple(tensor.shape)) for tensor in tensors)}. Then "
        "the result depends on the number of rows of a shard. Give each tensor all axes after the "
        "rows, of length 1 to broadcast: labels y[:, None] or weights sample_weight[:, None]."
    ) from error


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor | np.ndarray) and tf.TensorShape(leaf.shape).rank is not None
