"""evaluate and predict called as those of Keras: x and y, callbacks, progress bar, lists."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from one_device import strategy_of

import tfmultigpu as tmg

ROWS = 37
_random = np.random.default_rng(5)
X = _random.normal(size=(ROWS, 5)).astype("float32")
Y = _random.normal(size=(ROWS, 1)).astype("float32")
W = _random.uniform(0.2, 2.0, ROWS).astype("float32")


def single(metrics=("mae",)):
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=list(metrics))
    return model


def several():
    inputs = [keras.Input((5,), name="left"), keras.Input((5,), name="right")]
    both = keras.layers.Concatenate()(inputs)
    outputs = [keras.layers.Dense(1, name="b")(both), keras.layers.Dense(1, name="a")(both)]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", ["mse", "mae"], metrics=[["mae"], ["mse", "mae"]])
    return model


def both_of(build, replicas):
    keras.utils.set_random_seed(3)
    truth = build()
    with strategy_of(replicas).scope():
        model = build()
    model.set_weights(truth.get_weights())
    return model, truth


class Noted(keras.callbacks.Callback):
    def __init__(self, stop_at=None):
        super().__init__()
        self.calls = []
        self.stop_at = stop_at

    def on_test_begin(self, logs=None):
        self.calls.append("begin")

    def on_test_end(self, logs=None):
        self.calls.append(("end", sorted(logs)))

    def on_test_batch_begin(self, batch, logs=None):
        self.calls.append(("batch", batch))

    def on_test_batch_end(self, batch, logs=None):
        self.calls.append((batch, sorted(logs)))
        self.model.stop_evaluating = batch == self.stop_at

    def on_predict_begin(self, logs=None):
        self.calls.append("begin")

    def on_predict_end(self, logs=None):
        self.calls.append("end")

    def on_predict_batch_begin(self, batch, logs=None):
        self.calls.append(("batch", batch))

    def on_predict_batch_end(self, batch, logs=None):
        self.calls.append((batch, np.asarray(logs["outputs"]).shape))
        self.model.stop_predicting = batch == self.stop_at


def test_evaluate_takes_x_and_y():
    model, truth = both_of(single, 3)
    expected = truth.evaluate(X, Y, sample_weight=W, verbose=0, return_dict=True)
    for found in (
        tmg.evaluate(model, X, Y, sample_weight=W),
        tmg.evaluate(model, x=X, y=Y, sample_weight=W),
        tmg.evaluate(model, (X, Y, W), batch_size=5),
    ):
        assert found == pytest.approx(expected, rel=1e-5)
    with pytest.raises(TypeError, match=r"Received: data beside x\. Write tmg\.evaluate\("):
        tmg.evaluate(model, X, Y, x=X)
    with pytest.raises(TypeError, match=r"Received: none\. Write tmg\.predict\("):
        tmg.predict(model)


@pytest.mark.parametrize("replicas", [1, 2])
def test_lists_are_those_of_keras(replicas):
    model, truth = both_of(several, replicas)
    if replicas == 1:
        model.evaluate([X, X], [Y, Y], verbose=0)  # Keras then tracks the losses of outputs.
    options = {"batch_size": ROWS, "verbose": 0}
    expected = truth.evaluate([X, -X], [Y, 2 * Y], return_dict=False, **options)
    found = tmg.evaluate(model, [X, -X], [Y, 2 * Y], return_dict=False, batch_size=9)
    assert len(found) == 6
    assert found == pytest.approx(expected, rel=1e-5)
    model, truth = both_of(single, replicas)
    expected = truth.evaluate(X, Y, **options)
    assert tmg.evaluate(model, X, Y, return_dict=False) == pytest.approx(expected, rel=1e-5)
    model, truth = both_of(lambda: single(()), replicas)
    found = tmg.evaluate(model, X, Y, return_dict=False)
    assert isinstance(found, float)
    assert found == pytest.approx(truth.evaluate(X, Y, **options), rel=1e-5)


@pytest.mark.parametrize("stop_at", [None, 1])
def test_callbacks_are_called_as_by_keras(stop_at):
    model, truth = both_of(single, 2)
    ours, theirs = Noted(stop_at), Noted(stop_at)
    expected = truth.evaluate(X, Y, batch_size=8, callbacks=[theirs], verbose=0, return_dict=True)
    found = tmg.evaluate(model, X, Y, batch_size=8, callbacks=[ours])
    assert ours.calls == theirs.calls
    assert found == pytest.approx(expected, rel=1e-5)
    ours.calls, theirs.calls = [], []
    expected = truth.predict(X, batch_size=8, callbacks=[theirs], verbose=0)
    found = tmg.predict(model, x=X, batch_size=8, callbacks=ours)
    assert ours.calls == theirs.calls
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert len(found) == (ROWS if stop_at is None else 16)


def test_an_evaluation_in_the_middle_of_an_epoch_leaves_its_metrics_alone():
    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                self.found = tmg.evaluate(self.model, X, Y)

    kept = []
    for callbacks in ([], [Look()]):
        model, _ = both_of(single, 3)
        options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
        kept.append(tmg.fit(model, X, Y, callbacks=callbacks, **options).history)
    assert kept[0] == kept[1]
    assert callbacks[0].found["mae"] != kept[0]["mae"][-1]
