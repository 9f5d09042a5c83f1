"""Which layers are synchronized, and sums within a pass. The results: promises."""

from __future__ import annotations

import contextlib
import functools
import pkgutil
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu.steps.batch_norm import short_sums

layers = keras.layers
_X = np.random.default_rng(4).normal(size=(3, 4))
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def number() -> Any:
    return tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)


def local(replicas: int, function: Callable[[], Any]) -> list[Any]:
    """What a function returns on each replica, result by result."""
    strategy = strategy_of(replicas)
    results = tf.function(lambda: strategy.run(function), autograph=False)()
    return [strategy.experimental_local_results(one) for one in results]


def test_every_batch_normalization_of_a_model_is_synchronized() -> None:
    class Block(layers.Layer):
        """Holds layers in a list, where ``model.layers`` does not show them."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = [layers.Dense(3), layers.BatchNormalization()]

    nested = keras.Sequential([Block(), keras.Sequential([layers.BatchNormalization()])])
    assert tmg.synchronize_batch_norm(nested) is nested
    found = [one for one in nested._flatten_layers() if hasattr(one, "synchronized")]
    assert [one.synchronized for one in found] == [True] * 2
    model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization()])
    copy = keras.models.clone_model(tmg.synchronize_batch_norm(model))
    assert copy.layers[0].synchronized
    with pytest.raises(TypeError, match=r"must be a Keras model or layer\. Received: .*model"):
        tmg.synchronize_batch_norm([layers.Dense])


# Sums over replicas within a pass -----------------------------------------------------------------


# Fails if a sum, a mean, or a gradient of either order is not that of TensorFlow, or if rows of an
# embedding get lost.
@pytest.mark.parametrize(("replicas", "operation"), [(3, SUM), (2, MEAN), (2, "sum")])
def test_values_and_gradients_of_both_orders_are_those_of_tensorflow(
    replicas: int, operation: Any
) -> None:
    def run(context: Any) -> Any:
        x = tf.constant(_X)[number()]
        with context(), tf.GradientTape() as outer:
            outer.watch(x)
            replica = tf.distribute.get_replica_context()
            with tf.GradientTape() as inner:
                inner.watch(x)
                one, other = replica.all_reduce(operation, [tf.sin(x), {"a": x[:2] * x[2:]}])
                cubes = tf.reduce_sum(one**3) + tf.reduce_sum(other["a"] ** 2)
            gradient = inner.gradient(cubes, x)
            rows = tf.IndexedSlices(x[None], tf.constant([1]), tf.constant([2, 4]))
            dense = tf.convert_to_tensor(replica.all_reduce(SUM, rows))
        return one, other["a"], gradient, outer.gradient(gradient, x), dense

    expected = local(replicas, lambda: run(contextlib.nullcontext))
    found = local(replicas, lambda: run(short_sums))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    np.testing.assert_allclose(found[-1][0], [np.zeros(4), _X[:replicas].sum(0)])
    with short_sums():  # One replica is left alone.
        assert "all_reduce" not in vars(tf.distribute.get_replica_context())


# Fails if tf.custom_gradient searches through what other replicas have computed: a trace of twice
# as many layers would take four times as long.
def test_each_sum_is_searched_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    selector = pkgutil.resolve_name("tensorflow.python.ops.op_selector")
    original = selector.get_backward_walk_ops
    visited: list[int] = []

    def walk(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        visited.append(len(found))
        return found

    monkeypatch.setattr(selector, "get_backward_walk_ops", walk)
    strategy = strategy_of(2)
    with strategy.scope():
        norm = functools.partial(layers.BatchNormalization, synchronized=True)
        inner = [layer for _ in range(3) for layer in (layers.Dense(4, use_bias=False), norm())]
        model = keras.Sequential([keras.Input((4,)), *inner])
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False)
    step((np.ones((4, 4), "float32"), np.ones((4, 4), "float32")))
    assert 0 < max(visited) < 20, "a search goes through more than its own sum"
