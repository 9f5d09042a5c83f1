"""Layers quantized to float8, whose scales and histories are values to be assigned, not added."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import ByHand, Replicated, assert_same, cut, difference, hold, strategy_of

import tfmultigpu as tmg

_random = np.random.default_rng(4)
X = _random.normal(size=(20, 4)).astype("float32")
Y = _random.normal(size=(20, 2)).astype("float32")
BATCHES = cut((X, Y), (5, 1, 3, 7, 2))
LOSS = keras.losses.MeanSquaredError()


def quantized() -> keras.Model:
    """Without biases: Keras rounds their gradients to bfloat16, each replica its own part."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, "tanh", use_bias=False),
            keras.layers.EinsumDense("bi,ij->bj", 5, activation="tanh"),
            keras.layers.Dense(2, use_bias=False),
        ]
    )
    for layer in model.layers:
        layer.quantize("float8")
    return model


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(0.1, **options)


def test_scales_and_histories_are_those_of_one_device() -> None:
    """Batches smaller than the replicas, too, and ones that they do not divide."""
    run = hold(8, quantized, functools.partial(sgd, momentum=0.9), LOSS, BATCHES)
    assert len(run.weights) == 3 * 7
    assert max(np.max(weight) for weight in run.weights if weight.shape == (1024,)) < 4


def test_micro_batches_keep_the_largest() -> None:
    hold(3, quantized, sgd, LOSS, BATCHES, micro_batches=[1, 2, 3])


def test_nothing_else_that_an_optimizer_does_touches_them() -> None:
    options = {"weight_decay": 0.5, "global_clipnorm": 0.05, "use_ema": True}
    hold(2, quantized, lambda: keras.optimizers.AdamW(0.01, **options), LOSS, BATCHES)


def test_the_norm_counts_and_clips_gradients_alone() -> None:
    device = ByHand(quantized, sgd, LOSS)
    weights = [v for v in device.model.trainable_variables if v.name == "kernel"]

    @tf.function(autograph=False)
    def norm_on_one_device() -> Any:
        with tf.GradientTape() as tape:
            loss = LOSS(Y, device.model(X, training=True))
        return tf.linalg.global_norm(tape.gradient(loss, weights))

    norm = float(norm_on_one_device())
    run = Replicated(3, quantized, sgd, "mse", clip_norm=norm / 2)
    logs = run.step((X, Y))
    assert float(logs["gradient_norm"]) == pytest.approx(norm, rel=1e-5)
    clipped = Replicated(3, quantized, lambda: sgd(global_clipnorm=norm / 2), "mse")
    clipped.step((X, Y))
    one, other = ([v.numpy() for v in each.model.variables] for each in (run, clipped))
    assert difference(one, other) <= 1e-6


def test_loss_scaling_is_seen_by_them_as_keras_has_it() -> None:
    """What passes through a layer is multiplied; a step that overflows replaces nothing."""
    scaled = functools.partial(keras.optimizers.LossScaleOptimizer, initial_scale=64.0)
    device = ByHand(quantized, lambda: scaled(sgd()), LOSS)
    run = Replicated(3, quantized, lambda: scaled(sgd()), "mse")
    assert_same(run.train(BATCHES), device.train(BATCHES))
    before = [v.numpy() for v in run.model.variables]
    bad = np.where(np.arange(20)[:, None] == 19, np.inf, X)
    assert float(run.step((bad, Y))["skipped"]) == 1.0
    assert difference([v.numpy() for v in run.model.variables], before) == 0.0


def test_a_narrow_sum_does_not_round_them() -> None:
    run = Replicated(3, quantized, sgd, "mse", reduce_dtype="bfloat16")
    device = ByHand(quantized, sgd, LOSS)
    weights = run.train(BATCHES[:1]).weights
    for variable, one, other in zip(
        run.model.variables, weights, device.train(BATCHES[:1]).weights, strict=True
    ):
        if "scale" in variable.name or "amax" in variable.name:
            np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=variable.path)


def test_values_applied_by_hand_are_assigned_on_every_replica() -> None:
    strategy = strategy_of(3)
    with strategy.scope():
        plain = keras.Variable([1.0, 2.0])
        scale = keras.Variable(1.0)
        scale.overwrite_with_gradient = True
        optimizer = sgd(clipvalue=0.1, weight_decay=0.5)
        optimizer.build([plain, scale])
    gradients = [tf.constant([1.0, -1.0]), tf.constant(0.1)]
    strategy.run(lambda: tmg.apply_reduced_gradients(optimizer, gradients, [plain, scale]))
    strategy.run(lambda: tmg.apply_reduced_gradients(optimizer, gradients[1:], [scale]))
    for copy in strategy.experimental_local_results(scale.value):
        assert copy.numpy() == np.float32(0.1)
    np.testing.assert_allclose(plain.numpy(), [0.94, 1.91], rtol=1e-6)
    assert int(optimizer.iterations.numpy()) == 2


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (1, {"loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")}),
        (
            2,
            {
                "loss": None,
                "forward": lambda m, b, t: tmg.loss_sum("mse", b[1], m(b[0], training=t)),
            },
        ),
    ],
    ids=["mean_with_sample_weight", "forward"],
)
def test_losses_divided_later_are_refused(replicas: int, options: dict[str, Any]) -> None:
    run = Replicated(replicas, quantized, sgd, **options)
    with pytest.raises(tmg.LossError, match=r"how large the gradients are.*only known after"):
        run.step((X, Y, np.ones(len(X), "float32")))


def test_where_they_are_refused() -> None:
    with pytest.raises(tmg.TfMultiGpuError, match="overwritten by its gradient"):
        Replicated(2, quantized, sgd, "mse", shard_update=True)
    with pytest.raises(tmg.TfMultiGpuError, match=r"inputs_scale.*micro_batches"):
        tmg.GradientAccumulator(quantized().trainable_variables)
