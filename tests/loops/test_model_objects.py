"""A model object after fit, evaluate, predict and prepare: as before, traced once, free to go."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from typing import Any

import keras
import numpy as np
import pytest
from fit_pairs import FIT, SIZE, X, assert_same, pair
from one_device import strategy_of

import tfmultigpu as tmg


class Fails(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        raise ValueError("enough")

    on_test_end = on_predict_end = on_epoch_end


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_is_as_before_also_after_an_error(replicas: int, subtests: pytest.Subtests) -> None:
    model, _ = pair(replicas)
    tmg.fit(model, (X, SIZE), **FIT)  # Makes the optimizer's variables and History.
    before = dict(vars(model))
    for call in (
        lambda **more: tmg.fit(model, (X, SIZE), validation_split=0.3, verbose=0, **more),
        lambda **more: tmg.evaluate(model, (X, SIZE), verbose=0, **more),
        lambda **more: tmg.predict(model, X, verbose=0, **more),
    ):
        with subtests.test(call=call):
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


class FailsAtEnd(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        raise ValueError("enough")


def test_callbacks_are_as_before_also_after_an_error() -> None:
    with strategy_of(2).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    names = {*vars(swap), "_model", "params"}
    arrays = np.ones((6, 2)), np.ones((6, 1))
    for more in ([], [FailsAtEnd()]):
        with pytest.raises(ValueError, match="enough") if more else contextlib.nullcontext():
            tmg.fit(model, arrays, validation_data=arrays, verbose=0, callbacks=[swap, *more])
        assert set(vars(swap)) <= names
        swap.set_model(None)
        pickle.loads(pickle.dumps(swap))
    tmg.evaluate(model, arrays, verbose=0, callbacks=[swap])
    assert set(vars(swap)) <= names


WHOLE_FLOATS: dict[str, Any] = {
    "fit": lambda model: tmg.fit(
        model, (X, SIZE), steps_per_epoch=2.0, epochs=1.0, validation_data=(X, SIZE),
        validation_steps=1.0, verbose=0,
    ),
    "evaluate": lambda model: tmg.evaluate(model, (X, SIZE), steps=1.0, verbose=0),
    "predict": lambda model: tmg.predict(model, X, steps=1.0, verbose=0),
}  # fmt: skip


def test_whole_numbers_of_any_kind_count(subtests: pytest.Subtests) -> None:
    model, _ = pair(1)
    for name, call in WHOLE_FLOATS.items():
        with subtests.test(name):
            call(model)


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
@pytest.mark.filterwarnings("ignore")  # Keras tells that it marks the model as built.
def test_losses_and_metrics_of_the_model_itself_count(replicas: int) -> None:
    def build() -> Any:
        model = OwnParts()
        model.build((None, 5))
        return model

    model, truth = pair(replicas, build)
    options = {**FIT, "validation_data": (X[:5], SIZE[:5])}
    expected, history = truth.fit(X, SIZE, **options), tmg.fit(model, X, SIZE, **options)
    assert_same(model, truth, history, expected)
    assert tmg.evaluate(model, (X, SIZE), batch_size=8, verbose=0) == pytest.approx(
        truth.evaluate(X, SIZE, batch_size=8, verbose=0), rel=1e-5
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


def test_a_second_call_traces_nothing_that_was_traced_and_sees_what_changed(caplog: Any) -> None:
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
    both(3, batch_size=1)
    assert "A batch of 1 example(s) is smaller than 2 replicas: each computes all" in caplog.text
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


# prepare: fit, evaluate and predict of one object run those of the library ------------------------

NAMES = {"fit", "evaluate", "predict"}


def is_as_before(model: Any) -> bool:
    return not NAMES & set(vars(model))


def test_options_are_those_of_the_last_prepare() -> None:
    model, _ = pair(2)
    with tmg.prepare(model, clip_norm=0.0001):
        with tmg.prepare(model, verify=False):
            model.fit(X, SIZE, **FIT)
        free = model.get_weights()
        model.fit(X, SIZE, **FIT)
    moved = max(np.abs(a - b).max() for a, b in zip(free, model.get_weights(), strict=True))
    assert 0 < moved < 1e-3  # Clipped, which Keras' own fit cannot be told to.


def test_after_errors_and_without_with_all_is_as_before() -> None:
    model, _ = pair(1)
    with pytest.raises(tmg.errors.DataError), tmg.prepare(model):
        model.fit(X[:0], SIZE[:0])
    assert is_as_before(model)
    tmg.prepare(model)  # It lasts, although nobody holds what undoes it.
    assert not is_as_before(model)
    undo = tmg.prepare(model)
    undo.close()
    assert not is_as_before(model)  # As before that one.
    model, _ = pair(1)
    undo = tmg.prepare(model)
    assert set(vars(model)) >= NAMES
    for _ in range(2):
        undo.close()
        assert is_as_before(model)
    mine = vars(model)["fit"] = lambda: "mine"
    with pytest.raises(tmg.errors.LossError, match=r"The model replaces fit of Keras"):
        tmg.prepare(model)
    assert vars(model).pop("fit") is mine


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Of NumPy, in Keras.
def test_nothing_else_is_changed(tmp_path: Any) -> None:
    model, _ = pair(1)
    methods, config = [getattr(keras.Model, name) for name in NAMES], model.get_config()
    tmg.prepare(model)
    assert is_as_before(pair(1)[0])
    assert [getattr(keras.Model, name) for name in NAMES] == methods
    model.save(tmp_path / "model.keras")
    others = [
        keras.models.load_model(tmp_path / "model.keras"),
        keras.models.clone_model(model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ]
    assert all(is_as_before(other) for other in others)
    np.testing.assert_array_equal(others[0].get_weights()[0], model.get_weights()[0])
    assert model.get_config() == config
    model.compile("adam", "mse")
    assert not is_as_before(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_what_cannot_be_prepared() -> None:
    class Own(keras.Sequential):
        def fit(self, *args: Any, **kwargs: Any) -> Any:
            return super().fit(*args, **kwargs)

    model, _ = pair(1)
    with pytest.raises(TypeError, match="clip"):
        tmg.prepare(model, clip=3)
    with pytest.raises(tmg.errors.LossError, match=r"Received: Own\.fit\. Call tmg\.fit inside"):
        tmg.prepare(Own([keras.Input((5,)), keras.layers.Dense(1)]))
    with tmg.prepare(model):
        with pytest.raises(TypeError, match=r"Received: micro_batches=2\. .*Give .*tmg\.prep"):
            model.fit(X, SIZE, micro_batches=2)
        with pytest.raises(TypeError, match="Received: _use_cached_eval_dataset=True"):
            model.evaluate(X, SIZE, _use_cached_eval_dataset=True)
    assert is_as_before(model)
