"""What layers assign waits, and is read meanwhile, as if it had been assigned."""

from __future__ import annotations

from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import cut, hold, strategy_of

import tfmultigpu as tmg
from tfmultigpu.losses.held_assignments import assign_held, assign_if, holding

_random = np.random.default_rng(43)
X = _random.normal(size=(16, 4)).astype("float32")
Y = _random.normal(size=(16, 1)).astype("float32")
SIZES = (7, 1, 5, 2)


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def in_graph(function):
    return tf.function(function, autograph=False)()


# The scope ----------------------------------------------------------------------------------------


def test_what_is_held_is_read_and_assigned_only_when_asked():
    variable, other = keras.Variable(1.0), keras.Variable(5.0)

    def run():
        with holding([(other, tf.constant(7.0))]) as held:
            variable.assign_add(1.0)
            variable.assign_add(1.0)
            seen = [tf.convert_to_tensor(variable), tf.convert_to_tensor(other)]
        with holding(held=held):
            variable.assign(variable * 2.0)
        before = tf.identity(variable.value)
        values = [held.current(one) for one in held.variables]
        assign_held(held.variables, values, [])
        return [*seen, before]

    seen = in_graph(run)
    assert [float(value) for value in seen] == [3.0, 7.0, 1.0]
    assert float(variable.numpy()) == 6.0
    assert float(other.numpy()) == 5.0, "what was given is not assigned"


def test_a_variable_made_while_assignments_are_held():
    made = []

    def run():
        with holding() as held:
            if not made:
                made.append(keras.Variable("ones", shape=(), name="made"))
            made[0].assign_add(1.0)
        assign_held(held.variables, [held.current(one) for one in held.variables], [])

    in_graph(run)
    assert float(made[0].numpy()) == 2.0


@pytest.mark.parametrize(("condition", "is_held"), [(True, True), (False, True), (True, False)])
def test_assigning_under_a_condition(condition, is_held):
    first, second = keras.Variable(1.0), keras.Variable(10.0)

    def update():
        first.assign_add(second)
        second.assign(first * 2.0)

    def run():
        asked = tf.equal(tf.constant(1), tf.constant(1 if condition else 0))
        with holding() as nothing:
            assign_if(asked, lambda: None)
        assert not nothing.variables
        if not is_held:
            assign_if(asked, update)
            return
        with holding() as held:
            first.assign(3.0)
            assign_if(asked, update)
            first.assign_add(1.0)
        values = [held.current(one) for one in held.variables]
        assert not held.at_once
        assign_held(held.variables, values, [])

    in_graph(run)
    begin = 3.0 if is_held else 1.0
    expected = [begin + 10.0, 2 * (begin + 10.0)] if condition else [begin, 10.0]
    expected[0] += is_held
    assert [float(first.numpy()), float(second.numpy())] == expected


def test_what_an_inner_graph_assigns_is_assigned_at_once():
    count, total = keras.Variable(1.0, trainable=False), keras.Variable(0.0, trainable=False)

    def body(i):
        count.assign_add(1.0)
        total.assign_add(count)
        return i + 1

    def run():
        with holding() as held:
            count.assign(10.0)
            tf.while_loop(lambda i: i < 3, body, [0])
            after = tf.convert_to_tensor(count)
            count.assign_add(100.0)
        assert [id(one) for one in held.at_once] == [id(count), id(total)]
        return after, held.current(count), tf.identity(count.value)

    assert [float(value) for value in in_graph(run)] == [13.0, 113.0, 13.0]
    assert float(total.numpy()) == 11.0 + 12.0 + 13.0


def test_a_gradient_goes_to_a_variable_and_not_through_what_it_was_assigned():
    weight, state = keras.Variable(3.0), keras.Variable(2.0, trainable=False)

    def run():
        with tf.GradientTape() as tape, holding():
            weight.assign(weight * 2.0)
            state.assign(state * weight)
            loss = weight * weight * state
        return loss, tape.gradient(loss, weight.value)

    assert [float(value) for value in in_graph(run)] == [6.0 * 6.0 * 12.0, 2 * 6.0 * 12.0]


def test_losses_of_a_layer_can_be_asked_for_while_assignments_are_held():
    layer = keras.layers.Dense(2, kernel_regularizer="l2", activity_regularizer="l2")
    layer.build((None, 4))

    def run():
        with holding():
            layer(X)
            return layer.losses

    held, plain = in_graph(run), in_graph(lambda: (layer(X), layer.losses)[1])
    np.testing.assert_allclose(held, plain)
    assert len(held) == 2


# Steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["mean", "none"])
def test_a_variable_that_is_put_together_from_all_replicas(aggregation):
    """As TensorFlow assigns it, which is what a layer then reads."""

    class Mean(keras.layers.Layer):
        def build(self, shape):
            self.mean = self.add_weight(
                shape=(4,), initializer="zeros", trainable=False, aggregation=aggregation
            )

        def call(self, inputs):
            self.mean.assign(0.5 * self.mean + tf.reduce_mean(inputs, axis=0))
            self.mean.assign(0.5 * self.mean + 1.0)
            return inputs - self.mean

    strategy = strategy_of(2)
    with strategy.scope():
        mean = Mean()
        model = keras.Sequential([keras.Input((4,)), mean, keras.layers.Dense(1)])
        optimizer = sgd()
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    differ = aggregation != "mean"  # One device has no replicas to add up or to choose from.
    with pytest.warns(tmg.ReplicaDependenceWarning) if differ else nullcontext():
        for batch in cut((X, Y), (6, 8)):
            step(batch)
    found = [copy.numpy() for copy in strategy.experimental_local_results(mean.mean.value)]
    mean.mean.assign(np.zeros(4))

    def assigned_at_once():
        for rows in (slice(0, 6), slice(6, 14)):
            shards = np.split(X[rows], 2)
            shard = strategy.experimental_distribute_values_from_function(
                lambda c, shards=shards: tf.constant(shards[c.replica_id_in_sync_group])
            )
            strategy.run(mean.call, args=(shard,))

    tf.function(assigned_at_once, autograph=False)()
    expected = [copy.numpy() for copy in strategy.experimental_local_results(mean.mean.value)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_weights_that_a_forward_pass_assigns():
    """Of the kernel it was assigned: regularisation, gradient, and where the update begins."""

    def build():
        dense = keras.layers.Dense(3, kernel_regularizer="l2")
        layers = [keras.layers.SpectralNormalization(dense), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((4,)), *layers])

    loss = keras.losses.MeanSquaredError()
    hold(2, build, sgd, loss, cut((X, Y), SIZES), micro_batches=3)


class DrawsInABranch(keras.layers.Layer):
    """Draws where nothing can be held back."""

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5, seed=3)

    def call(self, inputs, training=False):
        positive = tf.reduce_sum(tf.ones([])) > 0
        return tf.cond(positive, lambda: self.dropout(inputs, training=training), lambda: inputs)


@pytest.mark.filterwarnings("ignore:The step could not be held")  # It assigns in a branch.
def test_what_is_drawn_in_a_branch_is_what_one_device_draws():
    def build():
        return keras.Sequential([keras.Input((4,)), DrawsInABranch(), keras.layers.Dense(1)])

    batches = cut((X, Y), SIZES)
    hold(2, build, sgd, keras.losses.MeanSquaredError(), batches, micro_batches=(1, 2))
