"""Sums over replicas inside a pass: as TensorFlow's in value and gradient, and short to trace."""

from __future__ import annotations

import contextlib
import pkgutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu.steps.replica_sums import short_sums

_X = np.random.default_rng(6).normal(size=(3, 4))
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


@pytest.fixture
def visited(monkeypatch):
    """How many operations each search of ``tf.custom_gradient`` for variables visits."""
    selector = pkgutil.resolve_name("tensorflow.python.ops.op_selector")
    original = selector.get_backward_walk_ops
    counts = []

    def walk(*args, **kwargs):
        found = original(*args, **kwargs)
        counts.append(len(found))
        return found

    monkeypatch.setattr(selector, "get_backward_walk_ops", walk)
    return counts


def own_rows():
    context = tf.distribute.get_replica_context()
    return tf.constant(_X)[tf.get_static_value(context.replica_id_in_sync_group)]


def local(strategy, function):
    results = tf.function(lambda: strategy.run(function), autograph=False)()
    return [strategy.experimental_local_results(one) for one in results]


@pytest.mark.parametrize(("replicas", "operation"), [(3, SUM), (2, MEAN), (2, "sum")])
def test_values_and_gradients_of_both_orders_are_those_of_tensorflow(replicas, operation):
    def run(context):
        x = own_rows()
        with context(), tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                replica = tf.distribute.get_replica_context()
                one, other = replica.all_reduce(operation, [tf.sin(x), {"a": x[:2] * x[2:]}])
                cubes = tf.reduce_sum(one**3) + tf.reduce_sum(other["a"] ** 2)
            gradient = inner.gradient(cubes, x)
        return one, other["a"], gradient, outer.gradient(gradient, x)

    strategy = strategy_of(replicas)
    expected = local(strategy, lambda: run(contextlib.nullcontext))
    found = local(strategy, lambda: run(short_sums))
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)


def test_gradient_is_what_all_replicas_ask():
    """Against the derivative by hand: that of the sum of what all replicas make of the total."""

    def run():
        x = own_rows()
        with short_sums(), tf.GradientTape() as tape:
            tape.watch(x)
            context = tf.distribute.get_replica_context()
            total = context.all_reduce(SUM, x)
            number = tf.cast(context.replica_id_in_sync_group, tf.float64)
            value = tf.reduce_sum((number + 2.0) * total**2)
        return total, tape.gradient(value, x)

    totals, gradients = local(strategy_of(2), run)
    for total, gradient in zip(totals, gradients, strict=True):
        np.testing.assert_allclose(total, _X[:2].sum(0))
        np.testing.assert_allclose(gradient, (2 + 3) * 2 * _X[:2].sum(0))


def test_rows_of_an_embedding_are_added_as_tensorflow_adds_them():
    def run():
        context = tf.distribute.get_replica_context()
        rows = tf.IndexedSlices(own_rows()[None], tf.constant([1]), tf.constant([2, 4]))
        with short_sums():
            return [tf.convert_to_tensor(context.all_reduce(SUM, rows))]

    for one in local(strategy_of(2), run)[0]:
        np.testing.assert_allclose(one, [np.zeros(4), _X[:2].sum(0)])


def test_one_replica_is_left_alone():
    context = tf.distribute.get_replica_context()
    with short_sums():
        assert "all_reduce" not in vars(context)


def chain_of_sums(depth, context):
    def run():
        x = own_rows()
        with context(), tf.GradientTape() as tape:
            tape.watch(x)
            total = x
            for _ in range(depth):
                added = tf.distribute.get_replica_context().all_reduce(SUM, tf.sin(total))
                total = tf.cos(added) + total
        return [tape.gradient(total, x)]

    return run


def test_each_sum_is_searched_in_constant_time(visited):
    """Twice as many sums take twice as long; TensorFlow's take four times as long."""
    work = {}
    for name, context in {"ours": short_sums, "theirs": contextlib.nullcontext}.items():
        for depth in (6, 12):
            visited.clear()
            local(strategy_of(2), chain_of_sums(depth, context))
            work[name, depth] = sum(visited)
    assert work["theirs", 12] > 3 * work["theirs", 6], (
        "TensorFlow no longer walks through what other replicas computed: short_sums could go"
    )
    assert work["ours", 12] <= 2.1 * work["ours", 6]


def test_a_step_with_synchronized_layers_is_searched_in_linear_time(visited):
    """Work of the searches at depth 3 and 6, of the whole first step."""
    work = {}
    for depth in (3, 6):
        strategy = strategy_of(2)
        with strategy.scope():
            layers = [
                layer
                for _ in range(depth)
                for layer in (
                    keras.layers.Dense(4, use_bias=False),
                    keras.layers.BatchNormalization(synchronized=True),
                )
            ]
            model = keras.Sequential([keras.Input((4,)), *layers])
            optimizer = keras.optimizers.SGD(0.1)
        step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False)
        visited.clear()
        step((np.ones((4, 4), "float32"), np.ones((4, 4), "float32")))
        assert visited
        assert max(visited) < 20, "a search goes through more than its own sum"
        work[depth] = sum(visited)
    assert work[6] <= 2.1 * work[3]
