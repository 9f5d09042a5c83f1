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


def quantized(bias: bool = False) -> keras.Model:
    """Without biases: Keras rounds their gradients to bfloat16, each replica its own part."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, "tanh", use_bias=bias),
            keras.layers.EinsumDense("bi,ij->bj", 5, activation="tanh"),
            keras.layers.Dense(2, use_bias=bias),
        ]
    )
    for layer in model.layers:
        layer.quantize("float8")
    return model


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(0.1, **options)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_scales_and_histories_are_those_of_one_device(replicas: int) -> None:
    """Batches smaller than the replicas, too, and ones that they do not divide."""
    run = hold(replicas, quantized, functools.partial(sgd, momentum=0.9), LOSS, BATCHES)
    assert len(run.weights) == 3 * 7
    assert max(np.max(weight) for weight in run.weights if weight.shape == (1024,)) < 4


@pytest.mark.parametrize("micro_batches", [4, [1, 2, 3]])
def test_micro_batches_keep_the_largest(micro_batches: Any) -> None:
    hold(3, quantized, sgd, LOSS, BATCHES, micro_batches=micro_batches)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.AdamW(0.01, weight_decay=0.5, clipnorm=0.1),
        lambda: sgd(global_clipnorm=0.05, use_ema=True),
    ],
    ids=["AdamW, clipnorm", "global_clipnorm, averages"],
)
def test_nothing_else_that_an_optimizer_does_touches_them(make: Any) -> None:
    hold(2, quantized, make, LOSS, BATCHES)


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_norm_counts_and_clips_gradients_alone(replicas: int) -> None:
    device = ByHand(quantized, sgd, LOSS)
    weights = [v for v in device.model.trainable_variables if v.name == "kernel"]

    @tf.function(autograph=False)
    def norm_on_one_device() -> Any:
        with tf.GradientTape() as tape:
            loss = LOSS(Y, device.model(X, training=True))
        return tf.linalg.global_norm(tape.gradient(loss, weights))

    norm = float(norm_on_one_device())
    run = Replicated(replicas, quantized, sgd, "mse", clip_norm=norm / 2)
    logs = run.step((X, Y))
    assert float(logs["gradient_norm"]) == pytest.approx(norm, rel=1e-5)
    clipped = Replicated(replicas, quantized, lambda: sgd(global_clipnorm=norm / 2), "mse")
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


def test_frozen_with_their_layer() -> None:
    def frozen() -> keras.Model:
        model = quantized()
        model.layers[0].trainable = False
        return model

    hold(2, frozen, sgd, LOSS, BATCHES)


def test_biases_to_the_precision_in_which_keras_sums_them() -> None:
    hold(3, lambda: quantized(True), sgd, LOSS, BATCHES, tolerance=3e-3)


def test_many_steps_in_a_call() -> None:
    expected = ByHand(quantized, sgd, LOSS).train(BATCHES)
    run = Replicated(3, quantized, sgd, "mse")
    data = tf.data.Dataset.from_generator(
        lambda: iter(BATCHES),
        output_signature=(tf.TensorSpec([None, 4]), tf.TensorSpec([None, 2])),
    )
    run.step.run(iter(tmg.distribute_dataset(data, run.strategy)), 9)
    assert difference([v.numpy() for v in run.model.variables], expected.weights) <= 1e-6
    run.assert_replicas_agree()


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
    "options",
    [
        {"loss": lambda y, p: tf.reduce_mean(tf.square(y - p), axis=-1)},
        {"loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")},
        {"loss": None, "forward": lambda m, b, t: tmg.loss_sum("mse", b[1], m(b[0], training=t))},
    ],
    ids=["function", "mean_with_sample_weight", "forward"],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_losses_divided_later_are_refused(replicas: int, options: dict[str, Any]) -> None:
    run = Replicated(replicas, quantized, sgd, **options)
    with pytest.raises(tmg.LossError, match=r"how large the gradients are.*only known after"):
        run.step((X, Y, np.ones(len(X), "float32")))


def test_a_sharded_update_is_refused() -> None:
    with pytest.raises(tmg.TfMultiGpuError, match="overwritten by its gradient"):
        Replicated(2, quantized, sgd, "mse", shard_update=True)


def test_an_accumulator_by_hand_refuses_them() -> None:
    with pytest.raises(tmg.TfMultiGpuError, match=r"inputs_scale.*micro_batches"):
        tmg.GradientAccumulator(quantized().trainable_variables)
