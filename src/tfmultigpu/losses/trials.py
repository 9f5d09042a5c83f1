"""Trials of user code on synthetic data while a step is traced.

A trial runs on a new thread. TensorFlow and Keras keep the state of a call per thread (graph,
strategy, tape, scopes, recorders), so a trial does not touch the trace of the step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

__all__ = ["run_in_thread", "synthetic_data"]

_Result = TypeVar("_Result")
_LENGTH = 8  # Of axes of unknown length.


def run_in_thread(function: Callable[[], _Result]) -> _Result:
    """Calls a function on a new thread; returns its result or raises its error."""
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # The waiting thread raises it again.
            errors.append(error)

    thread = threading.Thread(target=run, name="tfmultigpu trial", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def synthetic_data(spec: Any, rows: int, seed: int, times: int = 1) -> Any:
    """Returns synthetic data of a type spec, which depends on the arguments alone.

    Integers are 0 and 1, which nearly every vocabulary and number of classes allows. Floats are
    positive for seed 0 and have both signs for other seeds.

    Args:
        spec: The type spec of a dense, ragged or sparse tensor.
        rows: Number of different rows.
        seed: Another seed gives other data.
        times: Number of times that the rows are repeated.
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
