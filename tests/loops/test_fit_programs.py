"""fit with a forward, a step or a chain of steps, held to loops of steps on one device."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.model import Training
from law.plain import train_once
from one_device import SEED, strategy_of
from problems import network

import tfmultigpu as tmg
from tfmultigpu import _compat
from tfmultigpu.addons.loops.compiled import EpochMetrics
from tfmultigpu.errors import LossError, ScopeError

# NumPy 2 about TensorFlow's variables on replicas, which Keras reads as arrays.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
EPOCHS = 3
ROWS = np.random.default_rng(8).normal(size=(11, 4)).astype("float32")
BATCHES = np.split(ROWS, [4, 8])


def data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(ROWS).batch(4)


def autoencoder(replicas: int = 2, compiled: bool = True) -> Any:
    keras.utils.set_random_seed(SEED)
    layers = keras.layers
    with strategy_of(replicas).scope():
        hidden = [layers.Dense(3, "tanh", kernel_regularizer="l2"), layers.Dropout(0.3, seed=2)]
        model = network(4, *hidden, layers.Dense(4))
        model.tracker = keras.metrics.MeanAbsoluteError(name="mae")
        model.big = keras.metrics.Mean(name="big")
        model.unused = keras.metrics.Mean(name="never updated")
        if compiled:
            model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    return model


def forward(model: Any, batch: Any, training: bool) -> Any:
    output = model(batch, training=training)
    if training:
        model.tracker.update_state(batch, output)
    model.big.update_state(tf.abs(output) > 1)
    return tmg.loss_sum("mse", batch, output)


def made_step(model: Any, momentum: float = 0.0) -> Any:
    """Returns a train step of a model by ``forward``, with an optimizer of its own."""
    strategy = model.distribute_strategy or strategy_of(1)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1, momentum=momentum)
    return tmg.make_train_step(model, optimizer, None, strategy, forward=forward)


@functools.cache
def by_hand() -> tuple[dict[str, list[float]], list[np.ndarray]]:
    """Returns the history and the weights of a loop for one device without code of ours."""
    model, outputs = autoencoder(1), []
    loss = keras.losses.MeanSquaredError()

    def noting(y: Any, z: Any, sample_weight: Any = None) -> Any:
        outputs.append(z.numpy())
        return loss(y, z)

    training = Training(model, model.optimizer, noting)
    names = ("loss", "mae", "big", "val_loss", "val_big")
    history: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(EPOCHS):
        outputs.clear()
        losses = [float(train_once(training, (batch, batch))["loss"]) for batch in BATCHES]
        every = np.concatenate(outputs)
        history["loss"].append(np.average(losses, weights=[len(batch) for batch in BATCHES]))
        history["mae"].append(np.abs(ROWS - every).mean())
        history["big"].append((np.abs(every) > 1).mean())
        output = model(ROWS[:5])
        history["val_loss"].append(float(loss(ROWS[:5], output) + tf.add_n(model.losses)))
        history["val_big"].append(np.mean(np.abs(output) > 1))
    return history, [variable.numpy() for variable in model.trainable_variables]


def assert_same(model: Any, history: Any) -> None:
    expected, weights = by_hand()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    for own, other in zip(model.trainable_variables, weights, strict=True):
        np.testing.assert_allclose(own.numpy(), other, rtol=1e-5, atol=1e-6)


def test_a_forward_has_history_values_metrics_and_validation() -> None:
    model = autoencoder(3)
    valid = tf.data.Dataset.from_tensor_slices(ROWS[:5]).batch(2)
    options = {"epochs": EPOCHS, "validation_data": valid, "verbose": 0}
    history = tmg.fit(model, data(), forward=forward, **options).history
    assert set(history) == set(by_hand()[0])
    assert_same(model, history)


def test_a_step_that_was_made_trains_a_model_that_it_compiles() -> None:
    model = autoencoder(compiled=False)
    step = made_step(model, momentum=0.9)
    evaluate = tmg.make_eval_step(model, None, strategy_of(2), forward=forward)
    same = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate)
    options = {"step": step, "eval_step": evaluate, "validation_data": ROWS[:5], "verbose": 0}
    first = tmg.fit(model, data(), epochs=2, callbacks=[same], **options).history
    assert model.optimizer is step.optimizer
    again = tmg.fit(model, data(), epochs=EPOCHS, initial_epoch=2, **options).history
    assert first.pop("learning_rate") == [pytest.approx(0.1)] * 2
    assert_same(model, {name: [*first[name], *again[name]] for name in first})


def test_metrics_of_the_validation_are_its_own() -> None:
    model = autoencoder()
    model.optimizer.learning_rate = 0.0

    def tracking(model: Any, batch: Any, training: bool) -> Any:
        output = model(batch, training=False)
        model.tracker.update_state(batch, output)
        return tmg.loss_sum("mse", batch, output)

    options = {"validation_data": 100 * ROWS, "epochs": 2, "verbose": 0}
    history = tmg.fit(model, data(), forward=tracking, **options).history
    for name, rows in (("mae", ROWS), ("val_mae", 100 * ROWS)):
        expected = np.abs(rows - model(rows).numpy()).mean()
        np.testing.assert_allclose(history[name], [expected] * 2, rtol=1e-5, err_msg=name)


def test_names_of_metrics_do_not_hide_each_other() -> None:
    models, steps = [autoencoder(), autoencoder(compiled=False)], []
    for model in models:
        with strategy_of(2).scope():
            metrics, optimizer = [keras.metrics.MeanAbsoluteError()], keras.optimizers.SGD(0.1)
        steps.append(tmg.make_train_step(model, optimizer, "mse", strategy_of(2), metrics=metrics))
    chain = tmg.chain_steps(*steps, names=("a", "b"))
    labels = tf.data.Dataset.zip(data(), data())
    history = tmg.fit(models[1], labels, step=chain, verbose=0).history
    assert models[1].optimizer is steps[1].optimizer
    name = "mean_absolute_error"
    assert set(history) == {"a_loss", "b_loss", f"a_{name}", f"b_{name}"}

    for model in models:  # As after a restart: restored, but no step was traced.
        model.tracker.update_state([1.0], [3.0])
    steps = [made_step(model) for model in models]
    resumed = EpochMetrics([m.tracker for m in models], None, dict(zip("ab", steps, strict=True)))
    assert set(resumed.results()) == {"a_mae", "b_mae"}


# Fails if a metric that is reset is read, which several workers add: TensorFlow keeps each of them.
def test_a_reset_of_metrics_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with strategy_of(2).scope():
        metric = keras.metrics.Mean()
        metric.update_state([3.0])
        assert float(metric.result()) == 3.0
    with monkeypatch.context() as patched:
        patched.setattr(_compat.variables_summed_when_read(), "read_value", None)
        EpochMetrics([metric]).reset()
    assert [float(variable.value.read_value()) for variable in metric.variables] == [0.0, 0.0]


# What is told and refused -------------------------------------------------------------------------


def test_a_forward_that_adds_the_losses_of_the_model_or_a_mean_is_told() -> None:
    def adds(model: Any, batch: Any, training: bool) -> Any:
        loss = tmg.loss_sum("mse", batch, model(batch, training=training))
        rows = tf.cast(tf.shape(batch)[0], tf.float32)
        return tmg.LossSum(loss.sum + rows * sum(model.losses), loss.weight)

    def mean(model: Any, batch: Any, training: bool) -> Any:
        output = model(batch, training=training)
        model.big.update_state(tf.reduce_mean(output))
        return tmg.loss_sum("mse", batch, output)

    with pytest.warns(UserWarning, match=r"Leave out sum\(model\.losses\)") as told:
        tmg.fit(autoencoder(), data(), forward=adds, verbose=0)
    assert {w.filename for w in told if "losses" in str(w.message)} == {__file__}
    with pytest.warns(tmg.errors.ReplicaDependenceWarning, match="big/total"):
        tmg.fit(autoencoder(), data(), forward=mean, verbose=0)


def test_programs_that_exclude_each_other(subtests: pytest.Subtests) -> None:
    model, other = autoencoder(), autoencoder(3)
    unknown, differs = autoencoder(compiled=False), autoencoder(compiled=False)
    foreign = tmg.make_eval_step(other, None, strategy_of(3), forward=forward)
    step = made_step(model)
    with strategy_of(2).scope():
        differs.compile(keras.optimizers.Adam(name="other"), "mse")
    every: list[tuple[Any, str, Any, dict[str, Any]]] = [
        (TypeError, r"Received: eval_step=TrainStep\.", model, {"step": step, "eval_step": step}),
        (TypeError, r"first, second\).*Received: step=list", model, {"step": [step, step]}),
        (LossError, r"is not compiled.*model\.compile\(", unknown, {"forward": forward}),
        (ScopeError, "made for another strategy", model, {"step": step, "eval_step": foreign}),
    ]  # fmt: skip
    # Callbacks that would not find the optimizer of the step.
    every += [
        (LossError, rf"{type(callback).__name__}, and model .* optimizer 'other'\. In the sc",
         differs, {"step": made_step(differs), "callbacks": [callback]})
        for callback in (
            keras.callbacks.ReduceLROnPlateau(),
            keras.callbacks.SwapEMAWeights(),
            keras.callbacks.TensorBoard(),
        )
    ]  # fmt: skip
    for error, words, trained, options in every:
        with subtests.test(words), pytest.raises(error, match=words):
            tmg.fit(trained, data(), verbose=0, **options)
    assert not int(step.optimizer.iterations.numpy())


class Swaps(keras.optimizers.SGD):
    """At the end weights and their averages change places: twice would be nothing."""

    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self.averages = [self.add_variable_from_reference(v, "average") for v in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate)
        average = self.averages[self._get_variable_index(variable)]
        average.assign(0.9 * average + 0.1 * variable)

    def finalize_variable_values(self, var_list: Any) -> None:
        for variable in var_list:
            average = self.averages[self._get_variable_index(variable)]
            before = keras.ops.copy(variable)
            variable.assign(average)
            average.assign(before)


# Fails if the end of a training is told to an optimizer of the user twice, or if labels that are
# true or false have no class weight.
def test_an_optimizer_with_an_end_and_boolean_labels_train_as_in_keras() -> None:
    def trained(replicas: int, fit: Any) -> Any:
        keras.utils.set_random_seed(SEED)
        with strategy_of(replicas).scope():
            model = network(4, keras.layers.Dense(1, "sigmoid"))
            model.compile(Swaps(0.1), "binary_crossentropy")
            model.optimizer.build(model.trainable_variables)
        options = {"class_weight": {0: 1.0, 1: 3.0}, "batch_size": 4, "shuffle": False}
        losses = fit(model, ROWS, ROWS[:, 0] > 0, epochs=2, verbose=0, **options).history["loss"]
        return losses, *model.get_weights(), *map(np.asarray, model.optimizer.averages)

    expected = trained(1, keras.Model.fit)
    for replicas in (1, 2):
        for value, other in zip(trained(replicas, tmg.fit), expected, strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)
