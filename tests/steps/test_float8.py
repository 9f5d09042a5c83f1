"""Layers quantized to float8 train as in Keras on one replica, and are refused on several."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from each import each
from one_device import ByHand, Replicated, cut, hold, strategy_of

import tfmultigpu as tmg

_random = np.random.default_rng(4)
X = _random.normal(size=(20, 4)).astype("float32")
Y = _random.normal(size=(20, 2)).astype("float32")
LOSS = keras.losses.MeanSquaredError()


def quantized() -> keras.Model:
    layers = keras.layers
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(2)])
    for layer in model.layers:
        layer.quantize("float8")
    return model


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(0.1, **options)


def test_one_replica_trains_as_keras_does() -> None:
    optimizer = functools.partial(sgd, momentum=0.9, global_clipnorm=0.05)
    run = hold(1, quantized, optimizer, LOSS, cut((X, Y), (5, 1, 3, 7, 2)))
    assert max(np.max(weight) for weight in run.weights if weight.shape == (1024,)) < 4


def test_the_norm_is_that_of_gradients_alone() -> None:
    run = Replicated(1, quantized, sgd, "mse")
    device = ByHand(quantized, sgd, LOSS)
    weights = [v for v in device.model.trainable_variables if v.name in ("kernel", "bias")]

    @tf.function(autograph=False)
    def norm() -> Any:
        with tf.GradientTape() as tape:
            loss = LOSS(Y, device.model(X, training=True))
        return tf.linalg.global_norm(tape.gradient(loss, weights))

    assert float(run.step((X, Y))["gradient_norm"]) == pytest.approx(float(norm()), rel=1e-4)


@each(
    ("replicas", "options", "said"),
    [
        (2, {}, "2 replicas"),
        (2, {"shard_update": True}, "2 replicas"),
        (1, {"micro_batches": 2}, "micro_batches=2"),
        (1, {"clip_norm": 1.0}, "clip_norm=1.0"),
        (1, {"loss_scale": 8.0}, "a loss scale"),
    ],
)
def test_what_comes_between_is_refused(replicas: int, options: dict[str, Any], said: str) -> None:
    with pytest.raises(tmg.TfMultiGpuError, match=rf"scale.* and {said}\. Write make_train_step"):
        Replicated(replicas, quantized, sgd, "mse", **options).step((X, Y))


def test_a_loss_divided_later_is_refused() -> None:
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    run = Replicated(1, quantized, sgd, loss)
    with pytest.raises(
        tmg.errors.LossError, match=r"how large the gradients are.*only known after"
    ):
        run.step((X, Y, np.ones(len(X), "float32")))


def test_by_hand_several_replicas_are_refused() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model, optimizer = quantized(), sgd()
        optimizer.build(model.trainable_variables)
    gradients = [tf.zeros(one.shape) for one in model.trainable_variables]
    with pytest.raises(tmg.TfMultiGpuError, match="which replicas cannot add"):
        strategy.run(
            lambda: tmg.apply_reduced_gradients(optimizer, gradients, model.trainable_variables)
        )
    with pytest.raises(tmg.TfMultiGpuError, match="cannot be added and divided"):
        tmg.GradientAccumulator(quantized().trainable_variables)
