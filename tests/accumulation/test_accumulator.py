"""Accumulating gradients over several batches in a loop written by hand."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from forced_addition import forcing_addition
from one_device import strategy_of

import tfmultigpu as tmg


def accumulator_of(replicas: int, *values, dtype="float32"):
    strategy = strategy_of(replicas)
    with strategy.scope():
        variables = [tf.Variable(tf.constant(value, dtype)) for value in values]
        return strategy, variables, tmg.GradientAccumulator(variables)


def on_replicas(strategy, function, *args):
    return strategy.experimental_local_results(
        tf.function(lambda: strategy.run(function, args=args))()
    )


def replica_id() -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    return tf.cast(context.replica_id_in_sync_group, tf.float32)


def test_rows_of_an_embedding_are_summed_into_place():
    strategy, variables, accumulator = accumulator_of(2, np.zeros((4, 2)))

    def add():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(variables[0], [1, 1, 3]))
        gradients = tape.gradient(loss, variables)
        assert isinstance(gradients[0], tf.IndexedSlices)
        accumulator.add(gradients, 1.0)

    on_replicas(strategy, add)
    gradients, _ = accumulator.reduce()
    np.testing.assert_allclose(gradients[0], [[0, 0], [2, 2], [0, 0], [1, 1]])


def test_a_missing_gradient_counts_as_zero():
    strategy, _, accumulator = accumulator_of(2, [1.0], [2.0])
    on_replicas(strategy, lambda: accumulator.add([None, tf.ones([1])], 1.0))
    on_replicas(strategy, lambda: accumulator.add([tf.ones([1]), None], 1.0))
    gradients, weight = accumulator.reduce()
    np.testing.assert_allclose(gradients, [[0.5], [0.5]])
    assert float(weight) == 4.0


def test_sums_of_bfloat16_are_wider():
    strategy, _, accumulator = accumulator_of(2, [0.0], dtype="bfloat16")

    def add():
        accumulator.add([tf.constant([1.0], "bfloat16")], 1.0)

    add = tf.function(lambda one=add: strategy.run(one))
    for _ in range(300):  # bfloat16 would stop counting at 256
        add()
    gradients, weight = accumulator.reduce()
    assert gradients[0].dtype == "bfloat16"
    assert float(weight) == 600.0
    np.testing.assert_allclose(tf.cast(gradients[0], "float32"), [1.0])


@pytest.mark.parametrize("way", ["in memory", "collective"])
def test_gradients_of_either_way_to_add_are_scaled_clipped_and_applied(way):
    strategy, variables, accumulator = accumulator_of(2, [0.0, 0.0], dtype="float16")
    with strategy.scope():
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(variables)
        scale = tmg.LossScale(8.0)
    on_replicas(strategy, lambda: accumulator.add([tf.stack([24.0, replica_id() * 64.0])], 0.5))

    def update():
        gradients, weight = accumulator.reduce()
        unscaled, finite = scale.unscale(gradients)
        clipped, norm = tmg.clip_gradients([*unscaled, None], 5.0)
        tmg.apply_reduced_gradients(optimizer, clipped[:1], variables, where=finite)
        return weight, norm

    with forcing_addition(way):
        weight, norm = tf.function(update)()
    assert (float(weight), float(norm), accumulator.count) == (1.0, 10.0, 0)
    for copy in strategy.experimental_local_results(variables[0]):
        np.testing.assert_allclose(copy, [-3.0, -4.0], rtol=1e-3)


# Fails if the weight 1 of reduction="sum" is added, over replicas, micro-batches or windows.
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_loss_that_is_a_sum_is_not_divided(replicas):
    strategy, variables, accumulator = accumulator_of(replicas, [0.0])
    loss = keras.losses.MeanSquaredError(reduction="sum")

    @tf.function
    def add():
        with tf.GradientTape() as tape:
            outputs = tf.ones([2, 1]) * variables[0]
            pair = tmg.loss_sum(loss, tf.ones([2, 1]) * (replica_id() + 1.0), outputs)
        accumulator.add(tape.gradient(pair.sum, variables), pair.weight)

    for _ in range(2):
        for _ in range(3):
            strategy.run(add)
        gradients, weight = accumulator.reduce()
        assert float(weight) == 1.0
        total = sum(-2.0 * 2 * 3 * (replica + 1) for replica in range(replicas))
        np.testing.assert_allclose(gradients[0], [total])
    assert float(accumulator.reduce()[1]) == 0.0
    with pytest.raises(tmg.TfMultiGpuError, match="both in one accumulator"):
        strategy.run(accumulator.add, args=([None], 1.0))


# Fails if a block of the global gradient takes the part of a replica, or the parts of all.
@pytest.mark.parametrize("inside", [True, False])
def test_parts_of_a_gradient_are_refused_by_each_block(inside):
    strategy, variables, _ = accumulator_of(2, [0.0])
    with strategy.scope():
        optimizer, scale = keras.optimizers.SGD(1.0), tmg.LossScale(8.0)
    blocks = (
        lambda gradients: tmg.clip_gradients(gradients, 1.0),
        scale.unscale,
        lambda gradients: tmg.apply_reduced_gradients(optimizer, gradients, variables),
    )
    parts = strategy.run(lambda: tf.ones([1]) * replica_id())
    for block in blocks:
        call = block if not inside else functools.partial(strategy.run, block)
        with pytest.raises(tmg.TfMultiGpuError, match=r"once, for all of them.*window\.reduce"):
            call(([parts],) if inside else [parts])
    with pytest.raises(tmg.TfMultiGpuError, match="no gradient for 1 variables"):
        tmg.apply_reduced_gradients(optimizer, [None], variables)
    foreign = keras.optimizers.Adam(1.0)
    with pytest.raises(tmg.ScopeError, match="Create the optimizer in the scope"):
        tmg.apply_reduced_gradients(foreign, [tf.ones([1])], variables)
    with pytest.raises(tmg.TfMultiGpuError, match=r"LossScale\.update in a replica"):
        strategy.run(scale.update, args=(tf.constant(True),))
    assert variables[0].numpy().tolist() == [0.0]


def test_what_is_refused():
    with pytest.raises(tmg.TfMultiGpuError, match="Received: a list, no variables"):
        tmg.GradientAccumulator([])
    strategy, _, accumulator = accumulator_of(2, [0.0])
    with pytest.raises(tmg.TfMultiGpuError, match="Received: 2 gradients for 1 variables"):
        accumulator.add([None, None], 1.0)
    with (
        strategy.scope(),
        pytest.raises(tmg.TfMultiGpuError, match="add is for each replica"),
    ):
        accumulator.add([None], 1.0)
    assert accumulator.count == 0
    for reduce in (accumulator.reduce, tf.function(accumulator.reduce)):
        with pytest.raises(tmg.TfMultiGpuError, match=r"reduce in a replica.*after strategy\.run"):
            strategy.run(reduce)
    one = tf.distribute.OneDeviceStrategy("CPU:0")
    with one.scope():
        alone = tmg.GradientAccumulator([tf.Variable([0.0])])
    one.run(lambda: alone.add([tf.ones([1])], 2.0))
    assert one.run(alone.reduce)[0][0].numpy().tolist() == [0.5]
    with one.scope(), pytest.raises(tmg.ScopeError, match="another scope"):
        accumulator.reduce()
