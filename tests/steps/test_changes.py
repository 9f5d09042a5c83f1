"""What may change between two calls of a step, and what is refused."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmultigpu as tmg

RNG = np.random.default_rng(11)


@pytest.fixture(scope="module")
def strategy():
    return tmg.create_strategy(devices=["CPU:0", "CPU:1", "CPU:2"])


def dense_step(strategy, **options):
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)]
        )
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    return model, tmg.make_train_step(model, optimizer, "mse", strategy, **options)


def batch(rows):
    shape = (rows, 4), (rows, 2)
    return tuple(RNG.normal(size=one).astype("float32") for one in shape)


def test_a_layer_frozen_between_steps_stays_and_moves_when_thawed(strategy):
    model, step = dense_step(strategy)
    kernel = model.layers[0].kernel
    step(batch(5))
    before = kernel.numpy()
    model.layers[0].trainable = False
    step(batch(5))
    data = tmg.distribute_dataset(batch(9), strategy, batch_size=4)
    assert int(step.run(iter(data), 10)["steps"]) == 3
    np.testing.assert_array_equal(kernel.numpy(), before)
    model.layers[0].trainable = True
    step(batch(5))
    assert np.abs(kernel.numpy() - before).max() > 1e-4


def test_a_layer_thawed_after_the_optimizer_was_built_is_named(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="late")])
        model.add(keras.layers.Dense(2))
        model.layers[0].trainable = False
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    step(batch(4))
    model.layers[0].trainable = True
    with pytest.raises(tmg.ScopeError, match=r"built for other variables.*late/kernel"):
        step(batch(4))


def test_freezing_back_and_forth_traces_once_for_each_set(strategy):
    traces = []

    def loss(y_true, y_pred):
        if y_pred.shape[0] is None:  # Else its shapes are tried, once, for a number of rows.
            traces.append(y_pred.shape)
        return tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)

    with strategy.scope():
        norm = keras.layers.BatchNormalization(scale=False, center=False, synchronized=True)
        model = keras.Sequential([keras.Input((4,)), norm, keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(model, optimizer, loss, strategy, verify=False)
    for frozen in (False, True, False, True):
        norm.trainable = not frozen  # It has no weight to train, but statistics to update.
        before = norm.moving_mean.numpy()
        step(batch(6))
        assert np.array_equal(norm.moving_mean.numpy(), before) == frozen
    assert len(traces) == 2 * 3


def test_a_loss_that_reduces_over_the_rows_is_refused(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(
        model, optimizer, lambda t, p: tf.reduce_mean(tf.square(t - p), axis=0), strategy
    )
    with pytest.raises(tmg.errors.LossError, match=r"returns 2 values for any number of rows"):
        step(batch(5))


def counting_step(strategy, make_inputs):
    """A step, and a list that grows by one for each of three replicas at each trace."""
    traces = []
    with strategy.scope():
        inputs = make_inputs()
        pooled = keras.layers.GlobalAveragePooling1D()(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(pooled))
        optimizer = keras.optimizers.SGD(0.1)

    def loss(y_true, y_pred):
        if y_pred.shape[0] is None:  # Else its shapes are tried, once, for a number of rows.
            traces.append(y_pred.shape)
        return tf.square(y_true - y_pred)

    return tmg.make_train_step(model, optimizer, loss, strategy, verify=False), traces


def test_two_traces_serve_every_length_of_padded_sequences(strategy):
    step, traces = counting_step(strategy, lambda: keras.Input((None, 3)))
    for length, rows in [(4, 6), (4, 2), (7, 6), (5, 1), (9, 5), (4, 3)]:
        x = RNG.normal(size=(rows, length, 3)).astype("float32")
        step((x, np.ones((rows, 1), "float32")))
    assert len(traces) == 2 * 3


def test_a_step_inside_strategy_run_is_refused(strategy):
    _, step = dense_step(strategy)
    step(batch(4))
    with pytest.raises(tmg.ScopeError, match=r"Call step\(batch\) beside strategy.run"):
        tf.function(lambda: strategy.run(lambda: step(batch(4))["loss"]))()


def test_a_step_in_the_scope_of_another_strategy_is_refused(strategy):
    _, step = dense_step(strategy)
    other = tmg.create_strategy(devices=["CPU:0", "CPU:1"])
    with other.scope(), pytest.raises(tmg.ScopeError, match=r"scope of another strategy.*2 repl"):
        step(batch(4))
    with strategy.scope():
        assert float(step(batch(4))["weight"]) == 4.0


def test_unsynchronized_batch_normalization_is_warned_about_where_it_is_trained(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(2)]
        )
        optimizer = keras.optimizers.SGD(0.1)
    tmg.make_eval_step(model, "mse", strategy)(batch(4))
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    with pytest.warns(tmg.ReplicaDependenceWarning, match=r"norm'\..*synchronized=True"):
        step(batch(4))


def test_a_stateful_layer_is_refused(strategy):
    with strategy.scope():
        inputs = keras.Input(batch_shape=(6, 2, 3))
        hidden = keras.layers.LSTM(2, stateful=True, name="memory")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        optimizer = keras.optimizers.SGD(0.1)
    with pytest.raises(tmg.ScopeError, match=r"stateful layer .*\['memory'\].*Drop stateful"):
        tmg.make_train_step(model, optimizer, "mse", strategy)


def test_an_infinite_clip_norm_clips_nothing(strategy):
    model, step = dense_step(strategy, clip_norm=float("inf"))
    assert np.isfinite(float(step(batch(4))["gradient_norm"]))
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_arguments_of_another_kind_are_named(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1)
    given = {"model": model, "optimizer": optimizer, "loss": "mse", "strategy": strategy}
    for arguments, text in (
        ({"model": "net"}, r"model must be a Keras model. Received: 'net'"),
        ({"optimizer": "sgd"}, r"optimizer must be a Keras optimizer. Received: 'sgd'.*scope"),
        ({"strategy": "mirrored"}, r"strategy must be a tf.distribute.Strategy.*'mirrored'"),
    ):
        with pytest.raises(TypeError, match=text):
            tmg.make_train_step(**{**given, **arguments})


def test_a_loss_that_flattens_or_drops_rows_is_counted_as_it_is(strategy):
    x = RNG.normal(size=(7, 5, 4)).astype("float32")
    y = RNG.integers(0, 3, (7, 5))
    crossentropy = keras.losses.sparse_categorical_crossentropy

    def flat(labels, predictions):
        labels, predictions = tf.reshape(labels, [-1]), tf.reshape(predictions, [-1, 3])
        kept = labels > 0
        labels, predictions = tf.boolean_mask(labels, kept), tf.boolean_mask(predictions, kept)
        return crossentropy(labels, predictions, from_logits=True)

    def model():
        keras.utils.set_random_seed(4)
        return keras.Sequential([keras.Input((5, 4)), keras.layers.Dense(3)])

    one = model()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(flat(y, one(x)))
    keras.optimizers.SGD(0.5).apply(tape.gradient(loss, one.trainable_variables), one.weights)
    with strategy.scope():
        ours, optimizer = model(), keras.optimizers.SGD(0.5)
    logs = tmg.make_train_step(ours, optimizer, flat, strategy)((x, y))
    assert float(logs["loss"]) == pytest.approx(float(loss), abs=1e-6)
    assert float(logs["weight"]) == (y > 0).sum()
    for a, b in zip(ours.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_layers_of_different_precision_are_clipped_together():
    x, y = batch(7)
    results = []
    for here in (
        tf.distribute.get_strategy(),
        tmg.create_strategy(devices=["CPU:0", "CPU:1", "CPU:2"]),
    ):
        keras.utils.set_random_seed(6)
        with here.scope():
            inputs = keras.Input((4,))
            hidden = keras.layers.Dense(3, "tanh", dtype="float64")(inputs)
            model = keras.Model(inputs, keras.layers.Dense(2, dtype="float32")(hidden))
            optimizer = keras.optimizers.SGD(0.5)
        logs = tmg.make_train_step(model, optimizer, "mse", here, clip_norm=0.1)((x, y))
        results.append((float(logs["gradient_norm"]), model.get_weights()))
    assert results[1][0] == pytest.approx(results[0][0], abs=1e-6)
    for ours, expected in zip(results[1][1], results[0][1], strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)


def test_activity_regularizers_of_older_keras_are_refused(strategy, monkeypatch):
    monkeypatch.setattr(keras, "__version__", "3.12.4")
    with strategy.scope():
        hidden = keras.layers.Dense(2, activity_regularizer="l2", name="active")
        model = keras.Sequential([keras.Input((4,)), hidden])
        optimizer = keras.optimizers.SGD(0.1)
    with pytest.raises(tmg.ScopeError, match=r"Before Keras 3.14.*\['active'\].*keras>=3.14"):
        tmg.make_train_step(model, optimizer, "mse", strategy)


def test_an_input_of_a_fixed_number_of_rows_is_refused(strategy):
    with strategy.scope():
        inputs = keras.Input(batch_shape=(6, 3), name="here")
        fixed = keras.Model(inputs, keras.layers.Dense(1)(inputs), name="fixed")
        called = keras.Sequential([keras.layers.Dense(1)])
        called(tf.ones((6, 3)))  # Keras notes the rows of this batch, and takes any other.
    words = r"'here' of model 'fixed' with batch_shape=\(6, 3\).*keras\.Input\(shape=\(3,\)\)"
    with pytest.raises(tmg.ScopeError, match=words):
        tmg.make_predict_step(fixed, strategy)(tf.ones((5, 3)))
    assert tmg.make_predict_step(called, strategy)(tf.ones((5, 3))).shape == (5, 1)
