"""Outputs whose length depends on the shard are refused, in words."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg


class UpToLongest(keras.layers.Layer):
    """Cuts rows to the largest number in the batch."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x[:, : tf.cast(tf.reduce_max(x), tf.int32)]


def test_rows_of_different_lengths_are_refused() -> None:
    with strategy_of(2).scope():
        inputs = keras.Input((4,))
        model = keras.Model(inputs, UpToLongest()(inputs))
    x = np.full((5, 4), 2.0, "float32")
    assert tmg.predict(model, x, batch_size=5).shape == (5, 2)
    x[4] = 3
    with pytest.raises(
        tmg.errors.DataError, match=r"rows of \[\(2,\), \(3,\)\], by replica\. One device"
    ):
        tmg.predict(model, x, batch_size=5)
