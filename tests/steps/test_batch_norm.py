"""Batch normalization over all replicas, models one did not write, and sums within a pass."""

from __future__ import annotations

import contextlib
import functools
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import ByHand, Replicated, assert_same, cut, strategy_of

import tfmultigpu as tmg
from tfmultigpu.steps.batch_norm import short_sums

layers = keras.layers
_random = np.random.default_rng(4)
TOKENS = _random.integers(0, 6, (30, 5))
TOKENS[7:12] = 0  # All of the rows of one replica are masked, and those of whole batches.
STEPS = np.where(TOKENS[..., None] > 0, _random.normal(size=(30, 5, 3)), 0.0).astype("float32")
Y = _random.integers(0, 3, 30)
norm = functools.partial(layers.BatchNormalization, synchronized=True, momentum=0.7, epsilon=0.1)


def number() -> Any:
    return tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)


def local(replicas: int, function: Callable[[], Any]) -> list[Any]:
    """What a function returns on each replica, result by result."""
    strategy = strategy_of(replicas)
    results = tf.function(lambda: strategy.run(function), autograph=False)()
    return [strategy.experimental_local_results(one) for one in results]


def behind_masking() -> keras.Model:
    with_mask = [layers.Masking(dtype="float64"), norm(dtype="float64", name="first")]
    recurrent = [layers.SimpleRNN(3, dtype="float64"), norm(dtype="float64", name="second")]
    return keras.Sequential(
        [keras.Input((5, 3)), *with_mask, *recurrent, layers.Dense(3, dtype="float64")]
    )


# Fails if what is behind a mask is normalized by one replica's rows. The variance of few elements
# amplifies rounding, so in float64; the 1e-7 that Keras adds to a count is less to a count of more.
def test_behind_a_mask_replicas_normalize_as_one_device_does() -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    batches = cut((STEPS, Y), (7, 1, 2, 9, 1, 8))
    expected = ByHand(behind_masking, lambda: keras.optimizers.SGD(0.05), loss).train(batches)
    run = Replicated(2, behind_masking, lambda: keras.optimizers.SGD(0.05), loss)
    assert_same(run.train(batches), expected, weights=2e-7, loss=5e-7)
    for variable in run.model.non_trainable_variables:
        copies = [one.numpy() for one in run.strategy.experimental_local_results(variable.value)]
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0], err_msg=variable.path)


# Models one did not write -------------------------------------------------------------------------


class Block(layers.Layer):
    """Holds layers in a list, where ``model.layers`` does not show them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = [layers.Dense(3), layers.BatchNormalization()]


def normalizations(model: Any) -> list[Any]:
    return [one for one in model._flatten_layers() if isinstance(one, layers.BatchNormalization)]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras saving.
def test_every_batch_normalization_of_a_model_is_synchronized(tmp_path: Path) -> None:
    nested = keras.Sequential([Block(), keras.Sequential([layers.BatchNormalization()])])
    assert tmg.synchronize_batch_norm(nested) is nested
    assert [one.synchronized for one in normalizations(nested)] == [True] * 2
    model = keras.applications.MobileNetV2(
        input_shape=(32, 32, 3), alpha=0.35, weights=None, classes=3
    )
    before = model.get_weights()
    tmg.synchronize_batch_norm(model)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for copy in (model, keras.models.clone_model(model), loaded):
        assert all(one.synchronized for one in normalizations(copy))
    with pytest.raises(TypeError, match=r"must be a Keras model or layer\. Received: .*model"):
        tmg.synchronize_batch_norm([layers.Dense])


# Sums over replicas within a pass -----------------------------------------------------------------

_X = _random.normal(size=(3, 4))
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


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

    def chain_of_sums(depth: int, context: Any) -> Any:
        x = tf.constant(_X)[number()]
        with context(), tf.GradientTape() as tape:
            tape.watch(x)
            total = x
            for _ in range(depth):
                added = tf.distribute.get_replica_context().all_reduce(SUM, tf.sin(total))
                total = tf.cos(added) + total
        return [tape.gradient(total, x)]

    work = {}
    for name, context in {"ours": short_sums, "theirs": contextlib.nullcontext}.items():
        for depth in (6, 12):
            visited.clear()
            local(2, functools.partial(chain_of_sums, depth, context))
            work[name, depth] = sum(visited)
    assert work["theirs", 12] > 3 * work["theirs", 6], "short_sums could go"
    assert work["ours", 12] <= 2.1 * work["ours", 6]

    strategy = strategy_of(2)
    with strategy.scope():
        inner = [layer for _ in range(3) for layer in (layers.Dense(4, use_bias=False), norm())]
        model = keras.Sequential([keras.Input((4,)), *inner])
        optimizer = keras.optimizers.SGD(0.1)
    visited.clear()
    step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False)
    step((np.ones((4, 4), "float32"), np.ones((4, 4), "float32")))
    assert 0 < max(visited) < 20, "a search goes through more than its own sum"
