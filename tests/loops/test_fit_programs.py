"""fit with a forward, a step or several steps, held to loops of steps on one device."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import SEED, strategy_of

import tfmultigpu as tmg
from tfmultigpu.errors import CheckpointError, DataError, LossError, ScopeError

EPOCHS = 3
ROWS = np.random.default_rng(8).normal(size=(11, 4)).astype("float32")
BATCH = 4  # 4, 4 and 3 rows.


def batches() -> list[np.ndarray]:
    return [ROWS[i : i + BATCH] for i in range(0, len(ROWS), BATCH)]


def data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(ROWS).batch(BATCH)


def autoencoder(strategy: Any, compiled: bool = True) -> Any:
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(3, "tanh", kernel_regularizer="l2"),
                keras.layers.Dropout(0.3, seed=2),
                keras.layers.Dense(4),
            ]
        )
        model.tracker = keras.metrics.MeanAbsoluteError(name="mae")
        model.unused = keras.metrics.Mean(name="never updated")
        if compiled:
            model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    return model


def forward(model: Any, batch: Any, training: bool) -> Any:
    output = model(batch, training=training)
    if training:
        model.tracker.update_state(batch, output)
    big = tf.reduce_sum(tf.cast(tf.abs(output) > 1, tf.float32))
    size = tf.cast(tf.size(output), tf.float32)
    return tmg.loss_sum("mse", batch, output), {"big": (big, size)}


def by_hand(epochs: int = EPOCHS) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    """Returns the history and the weights of a loop for one device without code of ours."""
    model = autoencoder(strategy_of(1))
    history: dict[str, list[float]] = {"loss": [], "mae": [], "big": [], "val_loss": []}
    for _ in range(epochs):
        losses, outputs = [], []
        for batch in batches():
            with tf.GradientTape() as tape:
                output = model(batch, training=True)
                loss = tf.reduce_mean((batch - output) ** 2) + tf.add_n(model.losses)
            variables = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, variables), variables)
            losses.append(float(loss) * len(batch))
            outputs.append(output.numpy())
        every = np.concatenate(outputs)
        history["loss"].append(sum(losses) / len(ROWS))
        history["mae"].append(float(np.abs(ROWS - every).mean()))
        history["big"].append(float((np.abs(every) > 1).mean()))
        error = np.mean((ROWS[:5] - model(ROWS[:5]).numpy()) ** 2) + float(tf.add_n(model.losses))
        history["val_loss"].append(float(error))
    return history, [variable.numpy() for variable in model.trainable_variables]


def assert_same(model: Any, history: Any) -> None:
    expected, weights = by_hand()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    for own, other in zip(model.trainable_variables, weights, strict=True):
        np.testing.assert_allclose(own.numpy(), other, rtol=1e-5, atol=1e-6)


def test_a_forward_has_history_values_metrics_and_validation() -> None:
    model = autoencoder(strategy_of(3))
    seen: list[Any] = []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs))
    history = tmg.fit(
        model,
        data(),
        forward=forward,
        epochs=EPOCHS,
        validation_data=tf.data.Dataset.from_tensor_slices(ROWS[:5]).batch(2),
        callbacks=[callback],
        verbose=0,
    ).history
    assert set(history) == {"loss", "mae", "big", "val_loss", "val_big"}
    assert [one["loss"] for one in seen] == history["loss"]
    assert_same(model, history)


def test_a_step_that_was_made() -> None:
    strategy = strategy_of(2)
    model = autoencoder(strategy, compiled=False)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    step = tmg.make_train_step(model, optimizer, None, strategy, forward=forward)
    evaluate = tmg.make_eval_step(model, None, strategy, forward=forward)
    options = {"step": step, "eval_step": evaluate, "validation_data": ROWS[:5], "verbose": 0}
    first = tmg.fit(model, data(), epochs=2, **options).history
    again = tmg.fit(model, data(), epochs=EPOCHS, initial_epoch=2, **options).history
    assert_same(model, {name: [*first[name], *again[name]] for name in first})


@pytest.mark.parametrize("steps_per_call", ["auto", 2])
def test_several_steps_in_turn(steps_per_call: Any) -> None:
    strategy = strategy_of(2)

    def made() -> tuple[Any, list[Any]]:
        model = autoencoder(strategy, compiled=False)
        with strategy.scope():
            optimizers = [keras.optimizers.SGD(rate) for rate in (0.1, 0.01)]
        return model, [
            tmg.make_train_step(model, one, None, strategy, forward=forward) for one in optimizers
        ]

    model, steps = made()
    expected: dict[str, list[float]] = {"step1_loss": [], "step2_loss": []}
    for _ in range(EPOCHS):
        sums = np.zeros(2)
        for batch in batches():
            sums += [float(step(batch)["loss"]) * len(batch) for step in steps]
        expected["step1_loss"].append(sums[0] / len(ROWS))
        expected["step2_loss"].append(sums[1] / len(ROWS))
    weights = model.get_weights()

    model, steps = made()
    history = tmg.fit(
        model, data(), step=steps, epochs=EPOCHS, steps_per_call=steps_per_call, verbose=0
    ).history
    assert set(history) == {*expected, "step1_big", "step2_big", "mae"}
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    for own, other in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


class Interrupt(keras.callbacks.Callback):
    """Ends the run in the middle of an epoch."""

    every_batches = 1

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self._at, self._now = epoch, -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._now = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self._now, batch) == (self._at, 1):
            raise KeyboardInterrupt


def test_a_chain_that_is_interrupted_resumes_to_the_bit(tmp_path: Any) -> None:
    strategy = strategy_of(2)

    def train(folder: Any, *others: Any) -> tuple[Any, dict[str, list[float]]]:
        model = autoencoder(strategy)
        with strategy.scope():
            second = keras.optimizers.SGD(0.01, momentum=0.9)
        steps = [
            tmg.make_train_step(model, one, None, strategy, forward=forward)
            for one in (model.optimizer, second)
        ]
        chain = tmg.chain_steps(*steps, names=("a", "b"), times=(2, 1))
        checkpoints = tmg.Checkpoints(folder, train_step=chain, every_steps=1)
        checkpoints.restore()
        options = {"batch_size": BATCH, "callbacks": [checkpoints.callback(), *others]}
        history = tmg.fit(model, ROWS, step=chain, epochs=3, verbose=0, **options)
        return model, history.history

    keras.utils.set_random_seed(3)
    expected, history = train(tmp_path / "whole")
    keras.utils.set_random_seed(3)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", Interrupt(1))
    model, resumed = train(tmp_path / "cut")
    for own, other in zip(model.variables, expected.variables, strict=True):
        np.testing.assert_array_equal(own.numpy(), other.numpy())
    assert {name: values[-2:] for name, values in history.items()} == {
        name: values[-2:] for name, values in resumed.items()
    }


def test_a_seed_generator_in_a_closure_is_not_lost_silently(tmp_path: Any) -> None:
    model = autoencoder(strategy_of(2))
    with strategy_of(2).scope():
        seeds = keras.random.SeedGenerator(1)

    def noisy(model: Any, batch: Any, training: bool) -> Any:
        batch += keras.random.normal(tf.shape(batch), seed=seeds)
        return tmg.loss_sum("mse", batch, model(batch, training=training))

    def run(**more: Any) -> Any:
        return tmg.Checkpoints(tmp_path, model=model, optimizer=model.optimizer, **more)

    with pytest.raises(CheckpointError, match=r"would not hold.*seed_generator.*model\.seeds ="):
        tmg.fit(model, data(), forward=noisy, callbacks=[run().callback()], verbose=0)
    extra = {"seeds": [seeds.state]}
    tmg.fit(model, data(), forward=noisy, callbacks=[run(extra=extra).callback()], verbose=0)
    step = tmg.make_train_step(model, model.optimizer, None, strategy_of(2), forward=noisy)
    step(ROWS)
    with pytest.raises(CheckpointError, match=r"seed_generator"):
        tmg.Checkpoints(tmp_path / "other", train_step=step).save()


def test_checkpoints_of_one_step_of_a_chain_are_refused(tmp_path: Any) -> None:
    strategy = strategy_of(2)
    models = [autoencoder(strategy) for _ in range(2)]
    steps = [
        tmg.make_train_step(model, model.optimizer, None, strategy, forward=forward)
        for model in models
    ]
    chain = tmg.chain_steps(*steps, names=("a", "b"))
    for run in ({"train_step": steps[0]}, {"model": models[0], "optimizer": models[0].optimizer}):
        callback = tmg.Checkpoints(tmp_path, **run).callback()
        with pytest.raises(
            CheckpointError, match=r"variables .*for several models.*train_step=step\)"
        ):
            tmg.fit(models[0], data(), step=chain, callbacks=[callback], verbose=0)


def test_a_checkpoint_of_steps_with_other_names_is_refused(tmp_path: Any) -> None:
    strategy = strategy_of(2)

    def checkpoints(*names: str) -> tmg.Checkpoints:
        models = [autoencoder(strategy) for _ in names]
        steps = [
            tmg.make_train_step(model, model.optimizer, None, strategy, forward=forward)
            for model in models
        ]
        return tmg.Checkpoints(tmp_path, train_step=tmg.chain_steps(*steps, names=names))

    checkpoints("a", "b").save()
    assert checkpoints("a", "b").restore() == 0
    with pytest.raises(CheckpointError, match=r"Received: 'c', and .*step-0+\.npz with \['b'\]\."):
        checkpoints("a", "c").restore()


def test_one_optimizer_built_for_the_models_of_two_steps() -> None:
    found = []
    for replicas in (1, 2):
        strategy = strategy_of(replicas)
        models = [autoencoder(strategy, compiled=False) for _ in range(2)]
        with strategy.scope():
            optimizer = keras.optimizers.Adam(0.1)
            optimizer.build([one for model in models for one in model.trainable_variables])
        steps = [
            tmg.make_train_step(model, optimizer, None, strategy, forward=forward)
            for model in models
        ]
        tmg.fit(models[0], data(), step=tmg.chain_steps(*steps), epochs=2, verbose=0)
        assert int(optimizer.iterations.numpy()) == 2 * 2 * len(batches())
        found.append([one.numpy() for model in models for one in model.weights])
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(two, one, atol=1e-6)


def test_a_forward_that_adds_the_losses_of_the_model_is_told() -> None:
    model = autoencoder(strategy_of(2))  # With a regularizer.

    def adds(model: Any, batch: Any, training: bool) -> Any:
        loss = tmg.loss_sum("mse", batch, model(batch, training=training))
        rows = tf.cast(tf.shape(batch)[0], tf.float32)
        return tmg.LossSum(loss.sum + rows * sum(model.losses), loss.weight)

    with pytest.warns(UserWarning, match=r"Leave out sum\(model\.losses\)") as told:
        tmg.fit(model, data(), forward=adds, verbose=0)
    assert {one.filename for one in told if "losses" in str(one.message)} == {__file__}


def test_a_value_that_is_no_sum_is_told_so() -> None:
    model = autoencoder(strategy_of(2))

    def mean(model: Any, batch: Any, training: bool) -> Any:
        output = model(batch, training=training)
        return tmg.loss_sum("mse", batch, output), {"m": (tf.reduce_mean(output), tf.size(output))}

    with pytest.warns(tmg.errors.ReplicaDependenceWarning, match=r"tf\.reduce_sum\(values\), tf"):
        tmg.fit(model, data(), forward=mean, verbose=0)


def test_a_model_that_is_trained_with_a_forward_can_be_forgotten() -> None:
    def train() -> Any:
        model = autoencoder(strategy_of(1))

        def own(_: Any, batch: Any, training: bool) -> Any:
            return forward(model, batch, training)

        tmg.fit(model, data(), forward=own, verbose=0)
        return weakref.ref(model)

    gone = train()
    gc.collect()
    assert gone() is None


def test_keras_names_of_the_data() -> None:
    model = autoencoder(strategy_of(1), compiled=False)
    model.compile("sgd", "mse")
    calls: list[dict[str, Any]] = [
        {"data": (ROWS, ROWS)},
        {"data": ROWS, "y": ROWS},
        {"x": ROWS, "y": ROWS},
        {"x": data().map(lambda x: (x, x)), "batch_size": None, "shuffle": True},
    ]
    start = [variable.numpy() for variable in model.variables]
    losses = []
    for call in calls:
        for variable, value in zip(model.variables, start, strict=True):
            variable.assign(value)
        given = {"batch_size": BATCH, "shuffle": False, **call}
        losses.append(tmg.fit(model, **given, verbose=0).history["loss"])
    assert losses == [losses[0]] * len(calls)
    with pytest.raises(TypeError, match=r"Received: none\. Write tmg\.fit\(model, data\)"):
        tmg.fit(model)
    with pytest.raises(DataError, match=r"a tuple of 2 beside y\. Write tmg\.fit\(model, \(x, y\)"):
        tmg.fit(model, (ROWS, ROWS), ROWS)
    with pytest.raises(TypeError, match="Received: data beside x"):
        tmg.fit(model, ROWS, x=ROWS)


def test_arguments_that_exclude_each_other() -> None:
    strategy = strategy_of(2)
    model = autoencoder(strategy, compiled=False)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(model, optimizer, None, strategy, forward=forward)
    with pytest.raises(ValueError, match="Received: forward beside step"):
        tmg.fit(model, data(), forward=forward, step=step)
    with pytest.raises(ValueError, match=r"Received: clip_norm=1\.0 beside step"):
        tmg.fit(model, data(), step=step, clip_norm=1.0)
    with pytest.raises(ValueError, match="Received: eval_forward beside eval_step"):
        tmg.fit(model, data(), step=step, eval_step=step, eval_forward=forward)
    with pytest.raises(TypeError, match=r"Received: TrainStep\."):
        tmg.fit(model, data(), step=step, eval_step=step)
    with pytest.raises(TypeError, match=r"list of train steps\. Received: Sequential"):
        tmg.fit(model, data(), step=model)
    with pytest.raises(ValueError, match="Received: eval_forward and no validation_data"):
        tmg.fit(model, data(), step=step, eval_forward=forward)
    with pytest.raises(LossError, match="nothing to validate with"):
        tmg.fit(model, data(), step=step, validation_data=data())
    with pytest.raises(LossError, match="so it has no optimizer"):
        tmg.fit(model, data(), forward=forward)
    with strategy.scope():
        model.compile("sgd", "mse", metrics=["mae"])
    with pytest.raises(LossError, match="compiled with loss and metrics"):
        tmg.fit(model, data(), forward=forward)
    other = autoencoder(strategy_of(3), compiled=False)
    with pytest.raises(ScopeError, match="made for another strategy"):
        tmg.fit(other, data(), step=step)


def test_a_value_without_weight_in_a_batch_keeps_its_sum() -> None:
    replicas = 2
    model = autoencoder(strategy_of(replicas))
    model.optimizer.learning_rate = 0.0
    objects = np.array([1] * BATCH + [0] * (len(ROWS) - BATCH), "float32")

    def counting(model: Any, batch: Any, training: bool) -> Any:
        x, there = batch
        found = (tf.cast(tf.shape(x)[0], tf.float32), tf.reduce_sum(there))
        return tmg.loss_sum("mse", x, model(x, training=training)), {"per_object": found}

    given = tf.data.Dataset.from_tensor_slices((ROWS, objects)).batch(BATCH)
    history = tmg.fit(model, given, forward=counting, validation_data=given, verbose=0).history
    assert history["per_object"] == history["val_per_object"] == [len(ROWS) / BATCH]
    step = tmg.make_train_step(
        model, model.optimizer, None, strategy_of(replicas), forward=counting
    )
    for train in (step, tmg.chain_steps(step, names=["a"]), tmg.chain_steps(step, times=[2])):
        logs = train.run(iter(tmg.distribute_dataset(given, strategy_of(replicas))), 9)
        (name,) = [name for name in logs if name.endswith("per_object")]
        assert float(logs[name]) == len(ROWS) / BATCH


def test_metrics_of_the_validation_are_its_own() -> None:
    model = autoencoder(strategy_of(2))
    model.optimizer.learning_rate = 0.0

    def tracking(model: Any, batch: Any, training: bool) -> Any:
        output = model(batch, training=False)
        model.tracker.update_state(batch, output)
        return tmg.loss_sum("mse", batch, output)

    history = tmg.fit(
        model, data(), forward=tracking, validation_data=100 * ROWS, epochs=2, verbose=0
    ).history
    for name, rows in (("mae", ROWS), ("val_mae", 100 * ROWS)):
        expected = np.abs(rows - model(rows).numpy()).mean()
        np.testing.assert_allclose(history[name], [expected] * 2, rtol=1e-5, err_msg=name)


def test_names_of_metrics_do_not_hide_each_other_or_a_loss() -> None:
    strategy = strategy_of(2)
    models = [autoencoder(strategy) for _ in range(2)]
    with strategy.scope():
        metrics = [keras.metrics.MeanAbsoluteError() for _ in models]
    labels = tf.data.Dataset.zip(data(), data())
    steps = [
        tmg.make_train_step(model, model.optimizer, "mse", strategy, metrics=[metric])
        for model, metric in zip(models, metrics, strict=True)
    ]
    chain = tmg.chain_steps(*steps, names=("a", "b"))
    history = tmg.fit(models[0], labels, step=chain, verbose=0).history
    assert set(history) == {
        "a_loss",
        "b_loss",
        "a_mean_absolute_error",
        "b_mean_absolute_error",
    }
    with pytest.raises(LossError, match=r"TerminateOnNaN with steps \['a', 'b'\].*'a_loss'"):
        tmg.fit(models[0], labels, step=chain, callbacks=[keras.callbacks.TerminateOnNaN()])

    for name in ("loss", "big"):
        model = autoencoder(strategy)
        with strategy.scope():
            model.extra = keras.metrics.Mean(name=name)

        def hiding(model: Any, batch: Any, training: bool) -> Any:
            model.extra.update_state(tf.reduce_mean(batch, -1))
            return forward(model, batch, training)

        with pytest.raises(ValueError, match=rf"Received: \['{name}'\]\. Give the metric another"):
            tmg.fit(model, data(), forward=hiding, verbose=0)


def test_a_weight_is_counted_beside_a_sum_in_half_precision() -> None:
    rows = np.ones((1029, 4), "float32")
    norms = []
    for replicas in (1, 3):
        strategy = strategy_of(replicas)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")]
            )
            model.compile(optimizer=keras.optimizers.SGD(0.0))

        def half(model: Any, batch: Any, training: bool) -> Any:
            output = tf.cast(model(batch, training=training), tf.bfloat16)
            return tmg.LossSum(tf.reduce_sum(output), tf.shape(batch)[0])

        options = {"forward": half, "verify": False}
        step = tmg.make_train_step(model, model.optimizer, None, strategy, **options)
        logs = step(rows)
        assert float(logs["weight"]) == 1029
        norms.append(float(logs["gradient_norm"]))
    np.testing.assert_allclose(norms, norms[0], rtol=1e-2)
