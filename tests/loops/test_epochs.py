"""Epochs, passes and hooks of fit, held to Keras' fit on one device; what callbacks may do."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from fit_pairs import BATCHES, FIT, SIZE, WEIGHT, X, assert_same, hold, known, pair, regression
from one_device import as_dataset, cut, strategy_of

import tfmultigpu as tmg
from tfmultigpu.addons.loops.array_batches import shard_arrays
from tfmultigpu.addons.loops.hooks import every_batches
from tfmultigpu.data.sources import tensors_of_arrays
from tfmultigpu.steps import pace

# NumPy 2 about TensorFlow's variables on replicas, which Keras reads as arrays.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


VALID = X[:11], SIZE[:11]
callbacks = keras.callbacks


class Notes(callbacks.Callback):
    """Notes when it is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        vars(self).update(attributes)
        self.calls: list[tuple[str, int]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("begin", batch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("end", batch))

    @property
    def ends(self) -> list[int]:
        return [batch for what, batch in self.calls if what == "end"]


@pytest.fixture(scope="module")
def two_lines() -> tuple[Any, Any]:
    return pair(2)


@pytest.fixture
def lines(two_lines: tuple[Any, Any]) -> tuple[Any, Any]:
    """A model on two replicas and on one device, as if never trained."""
    weights = [np.linspace(-0.5, 0.5, 5, dtype="float32")[:, None], np.zeros(1, "float32")]
    for model in two_lines:
        model.set_weights(weights)
        model.optimizer.iterations.assign(0)
    return two_lines


def test_an_epoch_continues_the_pass_of_the_one_before(lines: Any) -> None:
    (told,) = hold(lines, known, epochs=5, steps_per_epoch=3)
    assert "an epoch of 3 batches ends after 1, and the next one starts a new pass" in told
    assert not hold(lines, lambda: as_dataset(BATCHES).repeat(), epochs=3, steps_per_epoch=4)
    assert not hold(lines, known, epochs=2)


@pytest.mark.filterwarnings("error")
def test_data_of_unknown_length(lines: Any) -> None:
    """Keras alone would count one step more, or begin a pass too late."""
    model, truth = lines
    notes = Notes()
    expected = truth.fit(known(), epochs=2, shuffle=False, verbose=0)
    history = tmg.fit(model, as_dataset(BATCHES), epochs=2, verbose=0, callbacks=[notes])
    assert_same(model, truth, history, expected)
    assert notes.ends == list(range(len(BATCHES))) * 2
    assert history.params["steps"] is None
    # Each pass ends exactly with an epoch, which nobody knows before.
    options = {"steps_per_epoch": 7, "epochs": 2, "shuffle": False, "verbose": 0}
    expected = truth.fit(as_dataset(BATCHES).repeat(), **options)
    history = tmg.fit(model, as_dataset(BATCHES), **options)
    assert_same(model, truth, history, expected)


def test_data_of_unknown_length_that_ends_within_an_epoch(lines: Any) -> None:
    told = hold(lines, lambda: as_dataset(BATCHES), known, epochs=5, steps_per_epoch=3)
    assert len(told) == 1


# Arrays -------------------------------------------------------------------------------------------


def order_of(x: Any, passes: int = 3, replicas: int = 2, **options: Any) -> list[list[float]]:
    """Returns the rows of each pass as the replicas see them."""
    strategy = strategy_of(replicas)
    keep: Any = lambda key, make: make()  # noqa: E731
    data = shard_arrays(x, 5, strategy, keep, shuffle=True, **options)
    iterator, rows = iter(data), []
    for _ in range(passes * -(-len(x) // 5)):
        local = strategy.experimental_local_results(next(iterator))
        rows += np.concatenate([shard.numpy() for shard in local]).tolist()
    return [rows[i * len(x) : (i + 1) * len(x)] for i in range(passes)]


def test_arrays_are_held_and_read_in_the_memory_of_the_host() -> None:
    with tf.device("CPU:1"):  # As if it were a GPU, which TensorFlow prefers.
        x = tensors_of_arrays(np.zeros((4, 2), "float32"))
        data = shard_arrays(x, 5, strategy_of(1), lambda key, make: make())
    for tensor in (x, data.batches._variant_tensor):
        assert tensor.device.endswith("CPU:0")


def test_each_pass_has_every_row_once_in_an_order_of_the_seed_and_its_number() -> None:
    x = tf.range(23, dtype=tf.float32)
    found = order_of(x, seed=7)
    assert [sorted(rows) for rows in found] == [list(range(23))] * 3
    assert found[0] != found[1] != found[2]
    assert order_of(x, seed=7, first_batch=5)[0] == found[1]
    assert order_of(x, seed=7, replicas=3) == found
    assert order_of(x, seed=8)[0] != found[0]


def test_every_validation_begins_at_the_first_row(lines: Any, subtests: pytest.Subtests) -> None:
    """Also after one that a callback ended: all validations of arrays read one iterator."""
    model, _ = lines
    valid = X[:23], SIZE[:23]

    class StopSecond(keras.callbacks.Callback):
        epoch = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_evaluating = self.epoch == 1

    rate = float(model.optimizer.learning_rate.numpy())
    model.optimizer.learning_rate = 0.0
    options = {**FIT, "epochs": 3, "validation_data": valid}
    for steps, callbacks in ((None, [StopSecond()]), (1, []), (9, [])):
        with subtests.test(steps=steps):
            rows = 8 if steps == 1 else 23
            ends = {"verbose": 0, "return_dict": True}
            whole = tmg.evaluate(model, (valid[0][:rows], valid[1][:rows]), **ends)
            first = tmg.evaluate(model, (valid[0][:8], valid[1][:8]), **ends)
            wanted = [whole, first if callbacks else whole, whole]
            history = tmg.fit(
                model, (X, SIZE), validation_steps=steps, callbacks=callbacks, **options
            ).history
            for name in ("loss", "mae"):
                values = [logs[name] for logs in wanted]
                np.testing.assert_allclose(history[f"val_{name}"], values, rtol=1e-6)
    model.optimizer.learning_rate = rate


# Fails if the counts of an epoch stay in the next: such metrics make their variables in a step.
def test_metrics_that_make_variables_late_begin_anew_in_each_epoch() -> None:
    def compiled() -> dict[str, Any]:
        return regression(metrics=[keras.metrics.F1Score(threshold=0.5)])

    batches = cut((X, (SIZE > 0).astype("float32")), (8, 8, 8, 8, 5))
    hold(pair(2, compiled=compiled), lambda: known(batches), epochs=3)


# Callbacks ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def warm() -> Any:
    """A model of which a call would take many batches."""
    model, _ = pair(2)
    with pytest.MonkeyPatch.context() as patch:
        # As if a call took no time: else one takes fewer batches on a busy machine. The length of
        # later calls is that of these.
        clock = SimpleNamespace(perf_counter=lambda: 0.0, monotonic=time.monotonic)
        patch.setattr(pace, "time", clock)
        tmg.fit(model, (X, SIZE), **{**FIT, "epochs": 9})
    return model


# steps_per_execution: tests/promises/test_fit.py.
def test_callbacks_get_each_batch_or_what_they_ask_for(warm: Any) -> None:
    each, third, rarely = Notes(), Notes(every_batches=3), Notes(every_batches=None)
    tmg.fit(warm, (X, SIZE), callbacks=[each, rarely], **FIT)
    assert each.calls == [(what, n) for n in range(5) for what in ("begin", "end")] * 2
    tmg.fit(warm, (X, SIZE), callbacks=[third], **{**FIT, "epochs": 3})
    # After each third of all batches, and at the end of each epoch.
    assert third.ends == [2, 4, 0, 3, 4, 1, 4]
    rarely.calls.clear()
    tmg.fit(warm, (X, SIZE), callbacks=[rarely], **FIT)
    assert rarely.calls == [("begin", 0), ("end", 4)] * 2
    each.calls.clear()
    tmg.fit(warm, (X, SIZE), callbacks=[each], steps_per_call=3, **{**FIT, "epochs": 1})
    assert each.calls == [("begin", 0), ("end", 2), ("begin", 3), ("end", 4)]


def test_which_callbacks_do_not_slow_training_down(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    path = str(tmp_path / "best.weights.h5")
    save = callbacks.ModelCheckpoint(path, save_weights_only=True)
    for callback, every in (
        (callbacks.ProgbarLogger(), None),
        (callbacks.EarlyStopping("loss"), None),
        (save, None),
        (callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=4), 1),
        (callbacks.TensorBoard(tmp_path), None),
        (callbacks.TensorBoard(tmp_path, update_freq=5), 1),
        (callbacks.TensorBoard(tmp_path, profile_batch=(3, 4)), 1),
        (callbacks.TerminateOnNaN(), 1),
        (callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None), 1),
        (type("Own", (callbacks.ProgbarLogger,), {"on_batch_end": lambda *_: None})(), 1),
    ):
        with subtests.test(callback=callback):
            assert every_batches(callback, "train") == every, callback
    assert every_batches(save, "test") is None
    with pytest.raises(ValueError, match="every_batches must be a whole number, at least 1"):
        every_batches(Notes(every_batches=0), "train")


# What a callback may do ---------------------------------------------------------------------------


def test_training_is_stopped_before_it_begins_and_after_a_batch(warm: Any) -> None:
    class Stop(callbacks.Callback):
        def __init__(self, epoch: int, batch: int | None) -> None:
            super().__init__()
            self.epoch, self.batch, self.now = epoch, batch, 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.now = epoch
            self.model.stop_training = self.batch is None and epoch == self.epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (self.now, batch) == (self.epoch, self.batch):
                self.model.stop_training = True

    for batch in (None, 2):
        models = pair(2)
        model, truth = models
        options = {**FIT, "epochs": 4}
        expected = truth.fit(X, SIZE, callbacks=[Stop(1, batch)], **options)
        history = tmg.fit(model, (X, SIZE), callbacks=[Stop(1, batch)], **options)
        assert_same(model, truth, history, expected)
        assert history.epoch == [0, 1]


def test_nan_ends_training_at_its_batch() -> None:
    model, truth = pair(2)
    x = X.copy()
    x[13] = np.nan  # In the second batch.
    notes = Notes()
    expected = truth.fit(x, SIZE, callbacks=[callbacks.TerminateOnNaN()], **FIT)
    history = tmg.fit(model, (x, SIZE), callbacks=[callbacks.TerminateOnNaN(), notes], **FIT)
    assert notes.ends == [0, 1]
    assert history.epoch == expected.epoch == [0]
    assert all(math.isnan(value) for value in history.history["loss"])


@pytest.mark.parametrize(("on_epoch", "shard_update"), [(False, False), (True, True)])
def test_averaged_weights_are_swapped_in(on_epoch: bool, shard_update: bool) -> None:
    def compiled() -> dict[str, Any]:
        return regression(optimizer=keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.7))

    model, truth = pair(2, compiled=compiled)
    options = {**FIT, "epochs": 3, "validation_data": VALID}
    swap = [callbacks.SwapEMAWeights(swap_on_epoch=on_epoch) for _ in range(2)]
    expected = truth.fit(X, SIZE, callbacks=swap[:1], **options)
    history = tmg.fit(model, (X, SIZE), callbacks=swap[1:], shard_update=shard_update, **options)
    assert_same(model, truth, history, expected)


class Evaluating(callbacks.Callback):
    """Evaluates and predicts within an epoch, as other people's callbacks do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            options = {"sample_weight": WEIGHT[:7], "batch_size": 4, "verbose": 0}
            logs = self.model.evaluate(X[:7], SIZE[:7], **options, return_dict=True)
            self.seen.append((logs, self.model.predict(X[:7], batch_size=4, verbose=0)))


@pytest.mark.parametrize("validation_data", [None, VALID])
def test_an_evaluation_in_an_epoch_is_that_of_one_device_and_leaves_its_metrics_alone(
    validation_data: Any,
) -> None:
    options = {**FIT, "validation_data": validation_data}
    seen, histories = [], []
    for replicas, looks in ((1, True), (3, True), (3, False)):
        model, _ = pair(replicas)
        callback = Evaluating()
        given = [callback] if looks else []
        histories.append(tmg.fit(model, (X, SIZE), callbacks=given, **options).history)
        seen.append(callback.seen)
    assert histories[1] == histories[2]
    assert len(seen[0]) == 2
    for (logs, predicted), (ours, ours_predicted) in zip(seen[0], seen[1], strict=True):
        assert ours == pytest.approx(logs, rel=1e-5)
        np.testing.assert_allclose(ours_predicted, predicted, atol=1e-6)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_test_batch_begin", "on_epoch_end"])
def test_no_error_of_a_callback_ends_an_epoch_silently(hook: str) -> None:
    model, _ = pair(2)
    for error in (StopIteration("no"), tf.errors.OutOfRangeError(None, None, "no")):

        def fails(*_: Any, error: Exception = error) -> None:
            raise error

        callback = type("Fails", (callbacks.Callback,), {hook: fails})()
        with pytest.raises((RuntimeError, type(error))) as told:
            tmg.fit(model, (X, SIZE), validation_data=VALID, callbacks=[callback], **FIT)
        assert error in (told.value, told.value.__cause__)


# Fails if a reset in an epoch forgets the metrics and not the loss, so that both are of other rows.
def test_metrics_that_a_callback_resets_begin_anew_as_in_keras() -> None:
    class Resets(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                self.model.reset_metrics()

    hold(pair(2), known, epochs=2, callbacks=[Resets()])


# Fails if a call that is for one batch, or begins another training, goes on inside of this one.
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda model: model.fit(X, SIZE, verbose=0), ""),
        (lambda model: model.compile("sgd", "mse"), "compile in a callback"),
        (lambda model: model.train_on_batch(X[:6], SIZE[:6]), "self.model.eval"),
        (lambda model: model.test_on_batch(X[:6], SIZE[:6]), "self.model.eval"),
        (lambda model: model.predict_on_batch(X[:6]), "self.model.eval"),
    ],
)
def test_what_a_callback_cannot_call(call: Any, words: str) -> None:
    class Calls(callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            call(self.model)

    model, _ = pair(2)
    with pytest.raises((RuntimeError, TypeError, tmg.errors.LossError)) as told:
        tmg.fit(model, (X, SIZE), callbacks=[Calls()], **FIT)
    assert words in str(told.value)


@pytest.mark.parametrize("verbose", [0, 1, 2, "auto"])
def test_the_bar_of_keras_shows_the_logs_of_history(warm: Any, capsys: Any, verbose: Any) -> None:
    capsys.readouterr()
    given = [callbacks.ProgbarLogger()] if verbose == 1 else []  # Not shown twice.
    history = tmg.fit(warm, (X, SIZE), callbacks=given, **{**FIT, "verbose": verbose}).history
    printed = capsys.readouterr().out
    assert printed.count("Epoch 2/2") == (verbose != 0)
    if verbose:
        last = printed.rstrip().splitlines()[-1].split("\r")[-1]
        for name, values in history.items():
            assert f"{name}: {values[-1]:.4f}" in last.replace("\x08", ""), name


def test_the_table_of_the_guide_names_every_callback_of_keras() -> None:
    page = (Path(__file__).parents[2] / "docs" / "contributing" / "loops.md").read_text()
    names = [
        name
        for name, kind in vars(callbacks).items()
        if isinstance(kind, type) and issubclass(kind, callbacks.Callback)
    ]
    assert {name for name in names if f"`{name}`" not in page} <= {"Callback", "CallbackList"}
