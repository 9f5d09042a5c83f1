"""``forward``: values for the logs, several models in one step, a choice of variables."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import SEED, as_dataset, strategy_of

import tfmultigpu as tmg
from tfmultigpu.errors import LossError

SIZES = (5, 1, 3, 7)
ROWS = np.random.default_rng(4).normal(size=(sum(SIZES), 4)).astype("float32")
BATCHES = np.split(ROWS, np.cumsum(SIZES)[:-1])


def models(replicas: int) -> tuple[Any, Any, Any]:
    keras.utils.set_random_seed(SEED)
    with strategy_of(replicas).scope():
        encoder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)], name="encoder")
        decoder = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)], name="decoder")
        return encoder, decoder, keras.optimizers.SGD(0.1, momentum=0.9)


def forward(both: Any, batch: Any, training: bool) -> Any:
    encoder, decoder = both.parts
    code = encoder(batch, training=training)
    error = tmg.loss_sum("mse", batch, decoder(code, training=training))
    size = tf.reduce_sum(code**2, -1)
    large = tf.cast(size > 1, tf.float32)
    return tmg.LossSum(error.sum + tf.reduce_sum(size), error.weight), {
        "size": (tf.reduce_sum(size), error.weight),
        "size_of_large": (tf.reduce_sum(size * large), tf.reduce_sum(large)),
    }


@functools.cache
def by_hand(chosen: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns loss and values of each batch, and the weights, of a loop without code of ours."""
    encoder, decoder, optimizer = models(1)
    every = [*encoder.trainable_variables, *decoder.trainable_variables]
    trained = [every[i] for i in chosen]
    logs = []
    for batch in BATCHES:
        with tf.GradientTape() as tape:
            code = encoder(batch)
            size = tf.reduce_sum(code**2, -1)
            loss = tf.reduce_mean((batch - decoder(code)) ** 2) + tf.reduce_mean(size)
        optimizer.apply(tape.gradient(loss, trained), trained)
        large = size[size > 1]
        logs.append([float(loss), float(tf.reduce_mean(size)), float(tf.reduce_sum(large)),
                     len(large)])  # fmt: skip
    return np.array(logs), [*encoder.get_weights(), *decoder.get_weights()]


def together(both: Any) -> keras.Model:
    """Several models as one, for a forward that calls its parts."""
    model = keras.Model()
    model.parts = both
    return model


def assert_weights(both: Any, expected: list[np.ndarray]) -> None:
    ours = [weight for one in both for weight in one.get_weights()]
    for own, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


# Fails if a value of the logs is divided before it is added, by another weight, or once a replica.
@pytest.mark.parametrize(
    ("replicas", "options"), [(1, {"jit_compile": True}), (3, {"micro_batches": 2})]
)
def test_values_and_weights_are_those_of_one_device(replicas: int, options: Any) -> None:
    *both, optimizer = models(replicas)
    step = tmg.make_train_step(
        together(both), optimizer, None, strategy_of(replicas), forward=forward, **options
    )
    expected, weights = by_hand()
    for batch, (loss, size, large, count) in zip(BATCHES, expected, strict=True):
        logs = step(batch)
        found = [float(logs[name]) for name in ("loss", "size", "size_of_large")]
        np.testing.assert_allclose(found, [loss, size, large / max(count, 1)], rtol=1e-5)
        assert float(logs["weight"]) == float(logs["size_weight"]) == len(batch)
        assert float(logs["size_of_large_weight"]) == count
    assert_weights(both, weights)


def test_over_many_batches_a_value_is_divided_once() -> None:
    strategy = strategy_of(2)
    *both, optimizer = models(2)
    step = tmg.make_train_step(together(both), optimizer, None, strategy, forward=forward)
    evaluate = tmg.make_eval_step(together(both), None, strategy, forward=forward)
    data = as_dataset([(batch,) for batch in BATCHES]).map(lambda batch: batch)
    before = evaluate.run(iter(tmg.distribute_dataset(data, strategy)), 9)
    size = tf.reduce_sum(both[0](ROWS) ** 2, -1)
    means = [float(tf.reduce_mean(size)), float(tf.reduce_mean(size[size > 1]))]
    found = [float(before["size"]), float(before["size_of_large"])]
    np.testing.assert_allclose(found, means, rtol=1e-5)
    logs = step.run(iter(tmg.distribute_dataset(data, strategy)), 9)
    assert int(logs["steps"]) == len(SIZES)
    _, sizes, large, counts = by_hand()[0].T
    means = [np.average(sizes, weights=SIZES), large.sum() / counts.sum()]
    found = [float(logs["size"]), float(logs["size_of_large"])]
    np.testing.assert_allclose(found, means, rtol=1e-5)


# Fails if a variable that was not chosen, or one that is frozen since, moves or has a slot.
@pytest.mark.parametrize(("replicas", "shard_update"), [(1, False), (3, True)])
def test_only_the_chosen_variables_are_trained(replicas: int, shard_update: bool) -> None:
    *both, optimizer = models(replicas)
    chosen = [both[0].weights[0], both[1].weights[1]]
    options = {"variables": chosen, "shard_update": shard_update, "verify": False}
    step = tmg.make_train_step(
        together(both), optimizer, None, strategy_of(replicas), forward=forward, **options
    )
    for batch in BATCHES:
        step(batch)
    assert_weights(both, by_hand((0, 3))[1])
    assert [variable.path for variable in step.variables] == [one.path for one in chosen]
    assert len(optimizer.variables) == 2 + len(chosen)  # Step count, rate, and their momenta.
    both[0].trainable = False
    before, moved = (variable.numpy() for variable in chosen)
    step(BATCHES[0])
    np.testing.assert_array_equal(chosen[0].numpy(), before)
    assert np.abs(chosen[1].numpy() - moved).max() > 0


def test_what_a_forward_may_not_return_and_what_several_models_need() -> None:
    encoder, decoder, optimizer = models(1)
    loss = tmg.LossSum(tf.constant(1.0), 1)
    for returned, text in (
        (tf.constant(1.0), r"returns a sum .* Received: .*Tensor.*\. Return tmg\.loss_sum"),
        (tmg.LossSum(tf.ones([2]), 2), r"Received: LossSum.*shape=\(2,\)"),
        ((loss, {"size": 1.0}), "Received: 1.0 for 'size'"),
        ((loss, {"loss": (1.0, 1.0)}), "A step or a validation logs 'loss' itself"),
        ((loss, {"size_weight": (1.0, 1.0)}), "logs 'size_weight' itself"),
        ((loss, {"val_size": (1.0, 1.0)}), "logs 'val_size' itself"),
        ((loss, {"size": (tf.ones([2]), 1.0)}), r"shape=\(2,\).* for 'size'"),
    ):
        wrong = lambda model, batch, training, returned=returned: returned  # noqa: E731
        with pytest.raises(LossError, match=text):
            tmg.make_train_step(encoder, optimizer, None, forward=wrong)(BATCHES[0])
    for model, given, options, kind, text in (
        (encoder, "mse", {"forward": forward}, LossError, "Give either a loss"),
        (encoder, "mse", {"variables": decoder.weights}, ValueError, "Several models are attr"),
        (encoder, "mse", {"variables": []}, ValueError, "no variable"),
        ([encoder, decoder], None, {"forward": forward}, TypeError, "must be a Keras model"),
        (encoder, None, {"forward": "mse"}, LossError, "and forward='mse'"),
    ):
        with pytest.raises(kind, match=text):
            tmg.make_train_step(model, optimizer, given, **options)
