"""Trying code of the user's on made-up data, beside the step that is being traced.

A trial runs on a thread of its own. TensorFlow and Keras keep by thread what a call depends on and
leaves behind (graph, strategy, tape, scopes, recorders), so the trace of the step is not touched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

__all__ = ["beside", "made_up"]

_Result = TypeVar("_Result")
_LENGTH = 8  # Of axes that are open.


def beside(function: Callable[[], _Result]) -> _Result:
    """Returns what a function returns on a thread of its own, or raises what it raises there."""
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # Raised again, on the thread that waits for it.
            errors.append(error)

    thread = threading.Thread(target=run, name="tfmultigpu trial", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def made_up(spec: Any, rows: int, seed: int, times: int = 1) -> Any:
    """Returns made-up data for a type spec, which depends on its arguments alone.

    Integers are 0 and 1, which nearly every vocabulary and number of classes allows. Numbers are
    positive for seed 0 and have both signs for others.

    Args:
        spec: The type spec of a dense, ragged or sparse tensor.
        rows: How many different rows.
        seed: Makes other data.
        times: How often these rows follow each other.
    """
    inner = [_LENGTH if size is None else size for size in spec.shape[1:]]
    dense = tf.constant(np.concatenate([_values(spec.dtype, [rows, *inner], seed)] * times))
    if (depth := getattr(spec, "ragged_rank", None)) is not None:
        ragged: Any = tf.RaggedTensor
        return ragged.from_tensor(dense, ragged_rank=depth, row_splits_dtype=spec.row_splits_dtype)
    return tf.sparse.from_dense(dense) if isinstance(spec, tf.SparseTensorSpec) else dense


def _values(dtype: tf.DType, shape: Sequence[int], seed: int) -> Any:
    random = np.random.default_rng(seed)
    if dtype == tf.string:
        return np.full(shape, b"a")
    if dtype.is_integer or dtype.is_bool:
        return random.integers(0, 2, shape).astype(dtype.as_numpy_dtype)
    drawn = random.uniform(0.1, 1.0, shape) if seed == 0 else random.normal(size=shape)
    return drawn.astype(dtype.as_numpy_dtype)
