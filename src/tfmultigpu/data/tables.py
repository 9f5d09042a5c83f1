"""Tables of pandas as the arrays that Keras makes of them."""

from __future__ import annotations

import sys

from tfmultigpu.errors import DataError
from tfmultigpu.types import Data, Untyped


def columns_as_array(value: Data) -> Data:
    """Returns a ``DataFrame`` or a ``Series`` as an array of rank 2; any other value unchanged.

    Columns of one type keep it. Numbers and booleans together, of which NumPy makes Python objects,
    become ``keras.config.floatx()``. A ``Series`` is one column, as in Keras.
    """
    import keras

    pandas: Untyped = sys.modules.get("pandas")
    if pandas is None or not isinstance(value, (pandas.DataFrame, pandas.Series)):
        return value
    frame = value
    if isinstance(value, pandas.Series):
        frame = value.to_frame()
    array = frame.to_numpy()
    if array.dtype != object:
        return array
    if all(map(pandas.api.types.is_numeric_dtype, frame.dtypes)):  # Booleans are numeric here.
        return frame.to_numpy(dtype=keras.config.floatx())
    if all(isinstance(item, str) for item in array.ravel()):
        return array
    raise DataError(
        "The columns of a DataFrame make one array if they are numbers and booleans, or text.",
        f"columns {dict(frame.dtypes.astype(str))}",
        "Write pandas.get_dummies(frame) for columns of text, or give a dict of columns: {name: "
        "frame[name] for name in frame}.",
    )
