"""Low precision: one verdict about the global gradient, the same on every replica."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import ByHand, Replicated, assert_same, cut, difference, strategy_of

import tfmultigpu as tmg
from tfmultigpu.accumulation.loss_scale import LossScale

REPLICAS = 3
ROWS = 12

_random = np.random.default_rng(17)
X = _random.normal(size=(48, 6)).astype("float32")
Y = _random.integers(0, 4, 48)


def mlp(policy: str = "float32") -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,), dtype="float32"),
            keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2", dtype=policy),
            keras.layers.Dense(4, dtype=policy),
            keras.layers.Activation("linear", dtype="float32"),
        ]
    )


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def crossentropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def scaling(growth: int = 2) -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(sgd(), dynamic_growth_steps=growth)


def overflowing(batch, replica: int, replicas: int = REPLICAS):
    """The batch with one row whose gradient is infinite, on this replica alone."""
    x, y, weight = batch
    weight = weight.copy()
    weight[len(x) * replica // replicas] = np.inf
    return x, y, weight


def batches_with_overflow() -> list[tuple[np.ndarray, ...]]:
    good = cut((X, Y, np.ones(48, "float32")), [ROWS] * 8)
    bad = {1: 1, 4: 0, 5: 2}  # the step and the replica on which it overflows
    return [overflowing(batch, bad[i]) if i in bad else batch for i, batch in enumerate(good)]


@pytest.mark.parametrize("replica", [1])
def test_overflow_on_any_one_replica_skips_the_step_on_all(replica):
    strategy = strategy_of(REPLICAS)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, "relu", kernel_initializer="ones", dtype="mixed_float16"),
                keras.layers.Dense(4, dtype="mixed_float16"),
            ]
        )
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2))
    step = tmg.make_train_step(model, optimizer, crossentropy(), strategy)
    x, y = X[:ROWS].copy(), Y[:ROWS]
    assert float(step((x, y))["skipped"]) == 0.0
    before = [v.numpy() for v in [*model.variables, *optimizer.inner_optimizer.variables]]
    x[ROWS * replica // REPLICAS] = 6e4  # a float16, but the sum of six of them is not
    logs = step((x, y))
    assert float(logs["skipped"]) == 1.0
    assert float(logs["loss_scale"]) == 2.0**15
    after = [v.numpy() for v in [*model.variables, *optimizer.inner_optimizer.variables]]
    assert difference(after, before) == 0.0, "weights, slots and iterations stay"
    assert int(optimizer.iterations.numpy()) == 1
    scales = strategy.experimental_local_results(optimizer.dynamic_scale.value)
    assert [float(scale) for scale in scales] == [2.0**14] * REPLICAS
    logs = step((X[:ROWS], y))
    assert float(logs["skipped"]) == 0.0
    assert float(logs["loss_scale"]) == 2.0**14
    assert int(optimizer.iterations.numpy()) == 2


@pytest.mark.parametrize("micro_batches", [1])
def test_loss_scale_optimizer_as_keras_has_it_on_one_device(micro_batches):
    batches = batches_with_overflow()
    truth = ByHand(mlp, scaling, crossentropy())
    expected = truth.train(batches)
    run = Replicated(REPLICAS, mlp, scaling, crossentropy(), micro_batches=micro_batches)
    result = run.train(batches)
    assert_same(result, expected)
    assert result.iterations == 5
    assert [log["skipped"] for log in result.logs] == [0, 1, 0, 0, 1, 1, 0, 0]
    for name in ("dynamic_scale", "step_counter"):
        ours, keras_own = (getattr(each.optimizer, name).numpy() for each in (run, truth))
        assert ours == keras_own, name


def test_a_dynamic_loss_scale_without_the_optimizer_of_keras():
    batches = batches_with_overflow()
    expected = ByHand(mlp, lambda: scaling(2000), crossentropy()).train(batches)
    run = Replicated(REPLICAS, mlp, sgd, crossentropy(), loss_scale="dynamic")
    result = run.train(batches)
    assert_same(result, expected)
    scales = [log["loss_scale"] / 2.0**15 for log in result.logs]
    assert scales == [1, 1, 0.5, 0.5, 0.5, 0.25, 0.125, 0.125]


def test_a_fixed_loss_scale():
    batches = batches_with_overflow()
    good = [batch for batch in batches if np.isfinite(batch[2]).all()]
    expected = ByHand(mlp, sgd, crossentropy(), clip_norm=0.5).train(good)
    run = Replicated(REPLICAS, mlp, sgd, crossentropy(), loss_scale=1024.0, clip_norm=0.5)
    assert_same(run.train(good), expected)
    result = run.train(batches)
    assert difference(result.weights, expected.weights) <= 1e-6, "skipped steps leave no trace"
    assert {log["loss_scale"] for log in result.logs} == {1024.0}
    assert sum(log["skipped"] for log in result.logs) == 3
    assert result.iterations == 5


def test_moving_averages_under_a_loss_scale():
    def optimizer():
        return keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)

    batches = batches_with_overflow()
    good = [batch for batch in batches if np.isfinite(batch[2]).all()]
    expected = ByHand(mlp, optimizer, crossentropy()).train(good)
    run = Replicated(REPLICAS, mlp, optimizer, crossentropy(), loss_scale="dynamic")
    assert difference(run.train(batches).weights, expected.weights) <= 1e-6


def test_large_batches_do_not_overflow_float16():
    """Gradients are divided by the rows before they are rounded, not after they were added."""
    x, y = np.tile(X, (86, 1))[:4096], np.tile(Y, 86)[:4096]
    run = Replicated(2, lambda: mlp("mixed_float16"), sgd, crossentropy(), loss_scale=2.0**15)
    result = run.train([(x, y)] * 3)
    assert [log["skipped"] for log in result.logs] == [0, 0, 0]


# The rule of a dynamic scale ----------------------------------------------------------------------


def dynamic(scale: float, good_steps: int = 0, growth_steps: int = 3) -> LossScale:
    return LossScale.of_variables(tf.Variable(scale), tf.Variable(good_steps), growth_steps)


def test_a_dynamic_scale_halves_doubles_and_stays_in_bounds():
    scale = dynamic(8.0)
    seen = []
    for finite in (True, True, True, True, False, True, True, True):
        scale.update(tf.constant(finite))
        seen.append((float(scale.value()), int(scale.good_steps)))
    expected = [(8, 1), (8, 2), (16, 0), (16, 1), (8, 0), (8, 1), (8, 2), (16, 0)]
    assert seen == expected
    low = dynamic(1.5)
    low.update(tf.constant(False))
    assert float(low.value()) == 1.0
    low.update(tf.constant(False))
    assert float(low.value()) == 1.0
    high = dynamic(3e38, good_steps=2)
    high.update(tf.constant(True))
    assert np.isfinite(float(high.value()))
    fixed = LossScale(64, growth_steps=None)
    fixed.update(tf.constant(False))
    assert float(fixed.value()) == 64.0


def test_what_is_no_loss_scale():
    for make, loss_scale, text in (
        (sgd, "dynamc", "loss_scale is None, 'dynamic' or a number. Received: loss_scale='dynamc'"),
        (sgd, -2.0, "A loss scale must be positive and finite. Received: loss_scale=-2.0"),
        (scaling, 8.0, "scales dynamically. Received: loss_scale=8.0"),
    ):
        with pytest.raises(ValueError, match=text):
            tmg.make_train_step(mlp(), make(), crossentropy(), loss_scale=loss_scale)
