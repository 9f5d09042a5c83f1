"""Rows of replicas that other workers need: here all are of this process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from law.pair import strategy_of

from tfmultigpu.strategies.gathering import gather_rows
from tfmultigpu.strategies.topology import per_replica

DENSE = [np.array([[0.0, 2.0], [3.0, 0.0]]), np.array([[0.0, 0.0, 5.0]]), np.zeros([1, 1])]


@pytest.mark.parametrize(("replicas", "dtype"), [(2, tf.float32), (3, tf.float32), (3, tf.string)])
def test_sparse_rows_are_as_wide_as_the_widest(replicas: int, dtype: tf.DType) -> None:
    strategy = strategy_of(replicas)

    def sparse(array: np.ndarray) -> Any:
        found = tf.sparse.from_dense(tf.constant(array, tf.float32))
        values = tf.strings.as_string(found.values) if dtype == tf.string else found.values
        return found.with_values(values)

    values = per_replica(strategy, [sparse(array) for array in DENSE[:replicas]])
    gathered = tf.function(lambda value: gather_rows(strategy, value))(values)
    rows = sum(len(array) for array in DENSE[:replicas])
    assert gathered.dense_shape.numpy().tolist() == [rows, 3]
    assert gathered.indices.numpy().tolist() == [[0, 1], [1, 0], [2, 2]]
    numbers = gathered.values if dtype != tf.string else tf.strings.to_number(gathered.values)
    assert numbers.numpy().tolist() == [2.0, 3.0, 5.0]
