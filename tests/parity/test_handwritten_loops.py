"""Loops written by hand from the building blocks give one device's weights, small batches too."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfmultigpu as tmg

RNG = np.random.default_rng(7)
X = RNG.normal(size=(21, 4)).astype("float32")


def test_a_batch_that_something_else_cut_has_no_row_weight():
    strategy = tmg.create_strategy(devices=["CPU:0", "CPU:1"])
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(4)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
    with pytest.raises(tmg.errors.DataError, match="unknown whether the shards of the batch are"):
        tmg.data.row_weight(batch, strategy)
