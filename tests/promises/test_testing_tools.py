"""``tmg.testing`` makes devices to test on, and tells what depends on the number of replicas."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from law.model import FLOAT, regression

import tfmultigpu as tmg


class MinusBatchMean(keras.layers.Layer):
    """What many losses and layers of users do: the rows of a batch touch each other."""

    def call(self, x: Any) -> Any:
        return x - tf.reduce_mean(x, 0, keepdims=True)


def build(*layers: Any) -> tmg.testing.Training:
    model = keras.Sequential(
        [keras.Input((4,), dtype="float64"), *layers, keras.layers.Dense(2, **FLOAT)]
    )
    return tmg.testing.Training(
        model, keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError(**FLOAT)
    )


# Fails if a device is missing, or if the call changes anything where there are enough already.
def test_virtual_devices() -> None:
    assert tmg.testing.virtual_devices(3) == ("CPU:0", "CPU:1", "CPU:2")
    assert len(tf.config.list_logical_devices("CPU")) == 8
    with pytest.raises(tmg.DevicesInitializedError, match="9"):
        tmg.testing.virtual_devices(9)
    with pytest.raises(ValueError, match="0"):
        tmg.testing.virtual_devices(0)


# Fails if a model without faults is accused, at a batch that two replicas do not divide and one
# smaller than the replicas, with weights of rows and unequal shares.
def test_a_model_that_does_not_depend_on_replicas_passes() -> None:
    batches = [(x, y, abs(x[:, 0])) for x, y in regression([5, 3, 1])]
    tmg.testing.assert_replica_invariant(build, batches, replicas=2, shares=(3, 1))
    tmg.testing.assert_replica_invariant(build, regression([5, 3, 1]), replicas=3)


# Fails if a layer whose rows touch each other passes, or if neither it nor a variable is named.
def test_a_layer_whose_rows_touch_each_other_fails() -> None:
    with (
        pytest.warns(tmg.ReplicaDependenceWarning, match="minus_batch_mean"),
        pytest.raises(AssertionError) as caught,
    ):
        tmg.testing.assert_replica_invariant(
            lambda: build(keras.layers.Dense(3, **FLOAT), MinusBatchMean(**FLOAT)),
            regression([5]),
            predict=False,
        )
    assert "dense" in str(caught.value)  # The variable that is another one afterwards.
    assert "step 1" in str(caught.value)
