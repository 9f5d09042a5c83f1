"""The number of losses is held to the number of rows, by which a step divides.

Shapes alone decide, so nothing waits for values.
"""

from __future__ import annotations

import re

import tensorflow as tf

from tfmultigpu.data.graph_messages import GraphMessage
from tfmultigpu.errors import LossError
from tfmultigpu.types import Scalar, Tensor

_OTHER_ROWS = GraphMessage(
    "The loss did not return one value per row: the model or the loss merges, drops or adds rows.",
    "values, and values of so many rows {}",
    "Give it as a function, whose values are counted: lambda y_true, y_pred: loss(y_true, y_pred).",
)
# The scope of the operation that fails then, and what TensorFlow says of it.
_SCOPE = "the_loss_has_one_value_per_row"
_OTHER_SHAPE = re.compile(r"tensor with (\d+) values, but the requested shape has (\d+)")


def one_for_each_row(values: Tensor, rows: Scalar, per_row: int) -> Tensor:
    """Returns the values of a loss, held to their number: as many for each row as a row has.

    It is known from shapes alone, so nothing has to wait for the values. XLA compares it too, which
    leaves out assertions.
    """
    found, known = values.shape.num_elements(), tf.get_static_value(rows)
    if found is not None and known is not None:
        if found != known * per_row:
            raise _OTHER_ROWS.as_error(LossError, f"{_OTHER_ROWS.text} [{found} {known * per_row}]")
        return values
    # Of one axis more: TensorFlow's optimizer takes a reshape away that keeps the known shape.
    shape = [tf.cast(rows, tf.int32), *values.shape[1:], 1]
    with tf.name_scope(_SCOPE):
        return tf.reshape(values, shape)


def as_rows_error(message: str) -> LossError | None:
    """Returns what TensorFlow's error says of ``one_for_each_row``; None if it is of others."""
    numbers = _OTHER_SHAPE.search(message)
    if _SCOPE not in message or numbers is None:
        return None
    return _OTHER_ROWS.as_error(LossError, f"{_OTHER_ROWS.text} [{' '.join(numbers.groups())}]")
