"""A step that runs out of memory says which replica, on what batch, and what to do."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu.steps.batch_function import BatchFunction
from tfmultigpu.steps.failures import explaining_failures

ROWS_THAT_FIT = 4


class Hungry(keras.layers.Layer):
    """Asks for more memory than any machine has when too many rows come at once."""

    def call(self, inputs):
        many = tf.shape(inputs)[0] > ROWS_THAT_FIT
        size = tf.where(many, tf.constant(2**50, tf.int64), 1)
        # A random start, so that nothing is known of the values before they are there.
        return inputs + tf.reduce_max(tf.fill([size], tf.reduce_max(inputs) * 0.0))


X = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
Y = X[:, :1]


def make_step(replicas, verify=False, **options):
    """Returns a step; TensorFlow waits for ten seconds before it says that memory ran out."""
    strategy = strategy_of(replicas)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Hungry(), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
    return strategy, tmg.make_train_step(
        model, optimizer, "mse", strategy, verify=verify, **options
    )


def test_the_replica_the_batch_and_the_way_out_are_named() -> None:
    strategy, step = make_step(2, verify="first")
    data = tmg.distribute_dataset((X[:9], Y[:9]), strategy, batch_size=9, shares=(1, 2))
    before = [variable.numpy() for variable in step.model.variables]
    with pytest.raises(tmg.OutOfMemoryError) as caught:
        step(next(iter(data)))
    text = str(caught.value)
    assert text.startswith("Replica 1 (CPU:1) has not enough memory for this step.")
    assert "a global batch of 9 rows; " in text
    assert "OOM when allocating tensor with shape[1125899906842624]" in text
    assert "micro_batches=2" in text
    assert "micro_batches=tmg.data.plan_micro_batches(shares, rows_in_memory)" in text
    assert "shares=" in text
    assert "tmg.find_batch_size" in text
    assert int(step.optimizer.iterations.numpy()) == 0
    for variable, value in zip(step.model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value.__cause__, tf.errors.ResourceExhaustedError)


def test_many_steps_in_one_call() -> None:
    strategy, step = make_step(3)
    data = tmg.distribute_dataset((X, Y), strategy, batch_size=12, shares=(5, 5, 2))
    with pytest.raises(tmg.OutOfMemoryError, match=r"Replica \d \(CPU:\d\) has not enough memory"):
        step.run(iter(data), 1)


def test_a_batch_that_cannot_be_copied_to_a_gpu_is_out_of_memory() -> None:
    job = "/job:localhost/replica:0/task:0"
    said = (
        f"Failed copying input tensor from {job}/device:CPU:0 to {job}/device:GPU:0 in order to "
        "run Identity: Dst tensor is not initialized."
    )
    strategy = tf.distribute.get_strategy()
    with (
        pytest.raises(tmg.OutOfMemoryError) as raised,
        explaining_failures(strategy, lambda: 64),
    ):
        raise tf.errors.InternalError(None, None, said)
    text = str(raised.value)
    assert text.startswith("GPU:0 has not enough memory for this step. Received: a global batch of")
    assert "Dst tensor is not initialized" in text
    with pytest.raises(tf.errors.InternalError), explaining_failures(strategy):
        raise tf.errors.InternalError(None, None, "cuDNN launch failure")


def test_arrays_are_not_put_on_the_first_gpu_to_be_cut() -> None:
    """The shards of all replicas would take its memory; seen in what is asked for, without one."""
    two = strategy_of(2)
    function = BatchFunction(lambda shards: shards.local, two, (0, 1))
    cut = tf.function(lambda x: function.cut(x).local, autograph=False)
    graph = cut.get_concrete_function(tf.TensorSpec([None, 3])).graph
    slices = [op for op in graph.get_operations() if op.type == "StridedSlice"]
    of_the_batch = [op for op in slices if op.inputs[0] is graph.inputs[0]]
    assert len(of_the_batch) == 2
    assert {op.device for op in of_the_batch} == {"/device:CPU:0"}
