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


def test_what_loss_scale_and_clipping_refuse():
    with pytest.raises(ValueError, match=r"positive, finite number.*Received: loss_scale=0"):
        tmg.LossScale(0)
    with pytest.raises(ValueError, match=r"limit must be a positive number\. Received: limit=0"):
        tmg.clip_gradients([tf.constant([1.0])], 0)
    fixed = tmg.LossScale(8.0, growth_steps=None)
    fixed.update(tf.constant(False))
    assert float(fixed.value()) == 8.0
    assert fixed.variables == []
