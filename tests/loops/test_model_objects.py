"""A model object after fit, evaluate and predict: as before, traced once, and free to go."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import keras
import numpy as np
import pytest
from fit_pairs import FIT, SIZE, X, assert_same, pair, regression
from one_device import strategy_of

import tfmultigpu as tmg


class Fails(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        raise ValueError("enough")

    on_test_end = on_predict_end = on_epoch_end


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_is_as_before_also_after_an_error(replicas: int) -> None:
    model, _ = pair(replicas)
    tmg.fit(model, (X, SIZE), **FIT)  # Makes the optimizer's variables and History.
    before = dict(vars(model))
    for call in (
        lambda **more: tmg.fit(model, (X, SIZE), validation_split=0.3, verbose=0, **more),
        lambda **more: tmg.evaluate(model, (X, SIZE), verbose=0, **more),
        lambda **more: tmg.predict(model, X, verbose=0, **more),
    ):
        call()
        with pytest.raises(ValueError, match="enough"):
            call(callbacks=[Fails()])
        changed = {n for n, v in vars(model).items() if n not in before or v is not before[n]}
        assert changed <= {"history", "stop_training", "stop_evaluating", "stop_predicting",
                           "_eval_epoch_iterator"}, changed  # fmt: skip
        assert before.keys() <= vars(model).keys()
    # Keras' own functions are made anew and work.
    assert model.train_function is model.test_function is model.predict_function is None
    assert np.isfinite(model.predict(X, verbose=0)).all()


class OwnParts(keras.Model):
    """Adds a loss and updates a metric in its call; Keras builds its layers at the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)
        self.activity = keras.metrics.Mean(name="activity")

    def call(self, x: Any) -> Any:
        hidden = self.hidden(x)
        self.add_loss(0.5 * keras.ops.mean(hidden**2))
        self.activity.update_state(keras.ops.mean(hidden, -1))
        return self.out(hidden)


# Fails if what the model itself adds is lost, or its metric is not in the logs or not reset.
@pytest.mark.parametrize("replicas", [1, 3])
def test_losses_and_metrics_of_the_model_itself_count(replicas: int) -> None:
    keras.utils.set_random_seed(3)
    truth = OwnParts()
    truth.compile(**regression())
    expected = truth.fit(X, SIZE, validation_data=(X[:5], SIZE[:5]), **FIT)
    keras.utils.set_random_seed(3)
    with strategy_of(replicas).scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras tells that it marks the model as built.
        model = OwnParts()
        model.build((None, 5))
        model.compile(**regression())
    history = tmg.fit(model, X, SIZE, validation_data=(X[:5], SIZE[:5]), **FIT)
    assert_same(model, truth, history, expected)
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5, err_msg=name)
    assert tmg.evaluate(model, (X, SIZE), batch_size=8, verbose=0) == pytest.approx(
        truth.evaluate(X, SIZE, batch_size=8, verbose=0, return_dict=True), rel=1e-5
    )


@pytest.mark.parametrize("program", ["compiled", "forward", "evaluate"])
def test_models_can_be_freed(program: str) -> None:
    model, _ = pair(2)
    if program == "forward":
        model.compile(model.optimizer)

        def forward(_: Any, batch: Any, training: bool) -> Any:
            return tmg.loss_sum("mse", batch[1], held()(batch[0], training=training))

        held: Any = weakref.ref(model)
        tmg.fit(model, (X, SIZE), forward=forward, validation_split=0.5, verbose=0)
    elif program == "compiled":
        tmg.fit(model, (X, SIZE), validation_split=0.5, verbose=0)
    else:
        tmg.evaluate(model, (X, SIZE), verbose=0)
        tmg.predict(model, X, verbose=0)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def counting(calls: list[int]) -> Any:
    class Count(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            calls.append(1)
            return inputs

    def build() -> Any:
        dense = keras.layers.Dense
        cut = keras.layers.Lambda(lambda x: x[:, :5], output_shape=(5,))
        layers = [Count(), cut, dense(4, "tanh", kernel_regularizer="l2"), dense(1)]
        return keras.Sequential([keras.Input((None,)), *layers])

    return build


def test_a_second_call_traces_nothing_that_was_traced_and_sees_what_changed() -> None:
    calls: list[int] = []
    models = pair(2, counting(calls))
    model, truth = models

    def both(rows: int = len(X), **more: Any) -> int:
        options = {**FIT, "epochs": 1, **more}
        expected = truth.fit(X[:rows], SIZE[:rows], **options)
        before = len(calls)
        history = tmg.fit(model, (X[:rows], SIZE[:rows]), **options)
        assert_same(model, truth, history, expected)
        return len(calls) - before

    assert both(validation_split=0.3) > 0
    assert both(9, batch_size=4, epochs=2, validation_split=0.3) == 0
    for part in models:  # Through the optimizer, and the weights themselves.
        part.optimizer.learning_rate = 0.01
        part.set_weights([2.0 * weight for weight in part.get_weights()])
    assert both() == 0
    tmg.predict(model, X, verbose=0)
    once = len(calls)
    tmg.predict(model, X[:2], verbose=0)
    tmg.evaluate(model, (X[:9], SIZE[:9]), batch_size=5, verbose=0)
    assert len(calls) == once
    for trainable in (False, True):
        for part in models:
            part.layers[-2].trainable = trainable
            with (strategy_of(2) if part is model else strategy_of(1)).scope():
                part.compile(keras.optimizers.SGD(0.05), "mae", metrics=["mse"])
        assert both() > 0
    wide = np.concatenate([X, X], axis=1)  # Another shape of data.
    assert tmg.fit(model, (wide, SIZE), **FIT).history["loss"][0] > 0


def test_a_fit_trains_on_the_arrays_it_is_given_also_if_they_changed_in_place() -> None:
    x, models = X.copy(), pair(3)
    for _ in range(2):
        expected = models[1].fit(x, SIZE, **FIT)
        history = tmg.fit(models[0], (x, SIZE), **FIT)
        assert_same(*models, history, expected)
        x *= 0.5
