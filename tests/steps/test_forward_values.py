"""Values for the logs beside a loss, several models in one step, and a choice of variables."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import SEED, strategy_of

import tfmultigpu as tmg
from tfmultigpu.errors import LossError, ScopeError

SIZES = (5, 1, 3, 7)
ROWS = np.random.default_rng(4).normal(size=(sum(SIZES), 4)).astype("float32")
BATCHES = np.split(ROWS, np.cumsum(SIZES)[:-1])


def models(strategy: Any) -> tuple[Any, Any, Any]:
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        encoder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)], name="encoder")
        decoder = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)], name="decoder")
        return encoder, decoder, keras.optimizers.SGD(0.1, momentum=0.9)


def forward(both: Any, batch: Any, training: bool) -> Any:
    encoder, decoder = both
    code = encoder(batch, training=training)
    error = tmg.loss_sum("mse", batch, decoder(code, training=training))
    size = tf.reduce_sum(code**2, -1)
    large = tf.cast(size > 1, tf.float32)
    return tmg.LossSum(error.sum + tf.reduce_sum(size), error.weight), {
        "size": (tf.reduce_sum(size), error.weight),
        "size_of_large": (tf.reduce_sum(size * large), tf.reduce_sum(large)),
    }


def by_hand(variables: Any = None) -> tuple[list[list[float]], list[np.ndarray]]:
    """Returns loss and values of each batch, and the weights, of a loop without code of ours."""
    encoder, decoder, optimizer = models(strategy_of(1))
    trained = [*encoder.trainable_variables, *decoder.trainable_variables]
    trained = trained if variables is None else [trained[i] for i in variables]
    logs = []
    for batch in BATCHES:
        with tf.GradientTape() as tape:
            code = encoder(batch)
            size = tf.reduce_sum(code**2, -1)
            loss = tf.reduce_mean((batch - decoder(code)) ** 2) + tf.reduce_mean(size)
        optimizer.apply(tape.gradient(loss, trained), trained)
        large = size[size > 1]
        mean = float(tf.reduce_mean(large)) if len(large) else 0.0
        logs.append([float(loss), float(tf.reduce_mean(size)), mean])
    return logs, [*encoder.get_weights(), *decoder.get_weights()]


@pytest.mark.parametrize(
    ("replicas", "options"), [(1, {"jit_compile": True}), (3, {"micro_batches": 2})]
)
def test_values_and_weights_are_those_of_one_device(replicas: int, options: Any) -> None:
    strategy = strategy_of(replicas)
    encoder, decoder, optimizer = models(strategy)
    step = tmg.make_train_step(
        [encoder, decoder], optimizer, None, strategy, forward=forward, **options
    )
    expected, weights = by_hand()
    for batch, values in zip(BATCHES, expected, strict=True):
        logs = step(batch)
        found = [float(logs[name]) for name in ("loss", "size", "size_of_large")]
        np.testing.assert_allclose(found, values, rtol=1e-5)
        assert float(logs["weight"]) == float(logs["size_weight"]) == len(batch)
    for own, other in zip([*encoder.get_weights(), *decoder.get_weights()], weights, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


def test_over_many_batches_a_value_is_divided_once() -> None:
    strategy = strategy_of(2)
    encoder, decoder, optimizer = models(strategy)
    step = tmg.make_train_step([encoder, decoder], optimizer, None, strategy, forward=forward)
    evaluate = tmg.make_eval_step([encoder, decoder], None, strategy, forward=forward)
    data = tf.data.Dataset.from_generator(
        lambda: iter(BATCHES), output_signature=tf.TensorSpec([None, 4])
    )
    before = evaluate.run(iter(tmg.distribute_dataset(data, strategy)), 9)
    size = tf.reduce_sum(encoder(ROWS) ** 2, -1)
    large = size[size > 1]
    np.testing.assert_allclose(float(before["size"]), float(tf.reduce_mean(size)), rtol=1e-5)
    np.testing.assert_allclose(
        float(before["size_of_large"]), float(tf.reduce_mean(large)), rtol=1e-5
    )
    logs = step.run(iter(tmg.distribute_dataset(data, strategy)), 9)
    expected = np.array(by_hand()[0])
    mean = np.sum(expected[:, 1] * SIZES) / np.sum(SIZES)
    np.testing.assert_allclose(float(logs["size"]), mean, rtol=1e-5)
    assert int(logs["steps"]) == len(SIZES)


@pytest.mark.parametrize(("replicas", "shard_update"), [(1, False), (3, True)])
def test_only_the_chosen_variables_are_trained(replicas: int, shard_update: bool) -> None:
    strategy = strategy_of(replicas)
    encoder, decoder, optimizer = models(strategy)
    chosen = [encoder.weights[0], decoder.weights[1]]
    step = tmg.make_train_step(
        [encoder, decoder],
        optimizer,
        None,
        strategy,
        forward=forward,
        variables=chosen,
        shard_update=shard_update,
    )
    for batch in BATCHES:
        step(batch)
    expected = by_hand((0, 3))[1]
    for own, other in zip([*encoder.get_weights(), *decoder.get_weights()], expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)
    assert [variable.path for variable in step.variables] == [one.path for one in chosen]
    assert len(optimizer.variables) == 2 + len(chosen)  # Step count, rate, and their momenta.


def test_a_frozen_variable_is_left_out_although_it_was_chosen() -> None:
    strategy = strategy_of(2)
    encoder, decoder, optimizer = models(strategy)
    both = [encoder, decoder]
    chosen = [encoder.weights[0], decoder.weights[0]]
    step = tmg.make_train_step(both, optimizer, None, strategy, forward=forward, variables=chosen)
    step(BATCHES[0])
    encoder.trainable = False
    before, moved = encoder.get_weights()[0], decoder.get_weights()[0]
    step(BATCHES[0])
    np.testing.assert_array_equal(encoder.get_weights()[0], before)
    assert np.abs(decoder.get_weights()[0] - moved).max() > 0
    with pytest.raises(ValueError, match="no variable"):
        tmg.make_train_step(encoder, optimizer, "mse", strategy, variables=[])


def test_values_that_cannot_be_added_are_refused() -> None:
    encoder, _, optimizer = models(strategy_of(1))
    returned: Any = None

    def wrong(model: Any, batch: Any, training: bool) -> Any:
        return tmg.loss_sum("mse", batch[:, :3], model(batch)), returned

    for returned, message in (  # noqa: B007
        ({"size": 1.0}, "is a sum and the weight that divides it"),
        ({"loss": (1.0, 1.0)}, "A step or a validation logs 'loss' itself"),
        ({"size_weight": (1.0, 1.0)}, "logs 'size_weight' itself"),
        ({"val_size": (1.0, 1.0)}, "logs 'val_size' itself"),
        ({"size": (tf.ones([2]), 1.0)}, r"shape \(2,\) for 'size'"),
    ):
        step = tmg.make_train_step(encoder, optimizer, None, forward=wrong)
        with pytest.raises(LossError, match=message):
            step(BATCHES[0])


def test_several_models_need_a_forward_and_variables_of_theirs() -> None:
    encoder, decoder, optimizer = models(strategy_of(1))
    with pytest.raises(LossError, match="of 2 models and no forward"):
        tmg.make_train_step([encoder, decoder], optimizer, "mse")
    with pytest.raises(ValueError, match="give all of them as the model"):
        tmg.make_train_step(encoder, optimizer, "mse", variables=decoder.weights)
    unbuilt = keras.Sequential([keras.layers.Dense(1)], name="late")
    with pytest.raises(ScopeError, match=r"Received: \['late'\]"):
        tmg.make_train_step([encoder, unbuilt], optimizer, None, forward=forward)
    with pytest.raises(TypeError, match="must be a Keras model"):
        tmg.make_train_step([encoder, 3], optimizer, None, forward=forward)
    with pytest.raises(TypeError, match="Received: forward='mse'"):
        tmg.make_train_step(encoder, optimizer, None, forward="mse")
