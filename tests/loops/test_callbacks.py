"""Every callback of Keras does on replicas what it does in Keras' fit on one device."""

from __future__ import annotations

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu.loops.callbacks import BatchHooks, check_callbacks
from tfmultigpu.loops.steps_per_call import StepsPerCallTuner

# NumPy 2 about TensorFlow's variables on replicas, which Keras reads as arrays.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

_random = np.random.default_rng(3)
X = _random.normal(size=(37, 4)).astype("float32")
Y = X @ _random.normal(size=(4, 1)).astype("float32") + 0.5
HELD_OUT = _random.normal(size=(11, 4)).astype("float32"), np.ones((11, 1), "float32")
BATCHES = 7  # of 6 rows, the last of 1


def build():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def compiled(**options):
    return {"optimizer": keras.optimizers.SGD(0.05), "loss": "mse", "metrics": ["mae"], **options}


@pytest.fixture(scope="module")
def models():
    """One model on two replicas, and on one device."""
    keras.utils.set_random_seed(8)
    truth = build()
    truth.compile(**compiled())
    with strategy_of(2).scope():
        model = build()
        model.compile(**compiled())
    model.set_weights(truth.get_weights())
    return model, truth, truth.get_weights()


@pytest.fixture
def both(models):
    """Trains ours and Keras' from the same weights, each with callbacks of its own."""
    model, truth, begin = models

    def train(make, *, x=X, **options):
        options = {"epochs": 4, "batch_size": 6, "shuffle": False, "verbose": 0, **options}
        made = []
        for one in (truth, model):
            one.set_weights(begin)
            one.optimizer.learning_rate = 0.05
            one.optimizer.iterations.assign(0)
            made.append(make("keras" if one is truth else "ours"))
        expected = truth.fit(x, Y, callbacks=made[0], **options)
        history = tmg.fit(model, (x, Y), callbacks=made[1], **options)
        assert list(history.history) == list(expected.history)
        assert history.epoch == expected.epoch
        for name, values in expected.history.items():
            np.testing.assert_allclose(history.history[name], values, rtol=3e-6, atol=1e-6)
        for one, other in zip(model.get_weights(), truth.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
        return history, made[0], made[1]

    return train


def test_early_stopping_restores_the_best_weights(both):
    # Two steps that help, then a learning rate that makes everything worse.
    def make(which):
        return [
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 if epoch < 2 else 0.7),
            keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True),
        ]

    history, _, _ = both(make, epochs=9)
    assert history.epoch == [0, 1, 2, 3]
    assert history.history["loss"][-1] > history.history["loss"][1]
    np.testing.assert_allclose(history.history["learning_rate"], [0.05, 0.05, 0.7, 0.7])
    after = tmg.evaluate(history.model, (X, Y))["loss"]
    assert after < history.history["loss"][1]


def test_learning_rate_is_reduced_on_a_plateau(both):
    def make(which):
        return [
            keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.1, patience=1, min_delta=5.0)
        ]

    history, theirs, ours = both(make, epochs=6, validation_data=HELD_OUT)
    rates = history.history["learning_rate"]
    assert rates[-1] < rates[0]
    assert theirs[0].wait == ours[0].wait


def test_checkpoints_after_epochs(both, tmp_path):
    def make(which):
        name = "{epoch}-{val_loss:.4f}.keras"
        return [
            keras.callbacks.ModelCheckpoint(tmp_path / which / name),
            keras.callbacks.ModelCheckpoint(
                tmp_path / which / "best.weights.h5", save_best_only=True, save_weights_only=True
            ),
        ]

    history, _, _ = both(make, validation_data=HELD_OUT)
    names = sorted(path.name for path in (tmp_path / "keras").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert len(names) == 5
    last = next(path for path in (tmp_path / "ours").glob("4-*"))
    loaded = keras.models.load_model(last)
    for one, other in zip(loaded.get_weights(), history.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(loaded.optimizer.iterations) == 4 * BATCHES
    best = build()
    best.compile(**compiled())
    best.load_weights(tmp_path / "ours" / "best.weights.h5")
    lowest = min(history.history["val_loss"])
    assert best.evaluate(*HELD_OUT, verbose=0)[0] == pytest.approx(lowest, rel=1e-5)


def test_checkpoints_after_some_batches_whatever_a_call_takes(both, tmp_path):
    def make(which):
        return [
            keras.callbacks.ModelCheckpoint(
                tmp_path / which / "{epoch}-{batch}-{loss:.4f}.weights.h5",
                save_weights_only=True,
                save_freq=3,
            )
        ]

    both(make)
    names = sorted(path.name for path in (tmp_path / "keras").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert len(names) == 4 * BATCHES // 3
    for name in names:
        one, other = build(), build()
        one.load_weights(tmp_path / "keras" / name)
        other.load_weights(tmp_path / "ours" / name)
        np.testing.assert_allclose(one.get_weights()[0], other.get_weights()[0], atol=1e-6)


def test_tensorboard(both, tmp_path):
    pytest.importorskip(
        "tensorboard", reason="needs the package tensorboard, which writes summaries"
    )

    def make(which):
        return [
            keras.callbacks.TensorBoard(
                tmp_path / which, update_freq=2, histogram_freq=1, write_graph=False
            )
        ]

    both(make, epochs=2, validation_data=HELD_OUT)
    theirs, ours = (summaries(tmp_path / which) for which in ("keras", "ours"))
    assert list(theirs) == list(ours)
    names = {name.split("/")[-1] for _, name, _ in theirs}
    assert names >= {"epoch_loss", "epoch_mae", "epoch_learning_rate", "histogram", "batch_loss"}
    for key, value in theirs.items():
        np.testing.assert_allclose(ours[key], value, rtol=3e-6, atol=1e-6, err_msg=str(key))


def test_tensorboard_profiles_the_batches_asked_for(both, tmp_path, monkeypatch):
    pytest.importorskip(
        "tensorboard", reason="needs the package tensorboard, which writes summaries"
    )
    begun, made = [], []
    monkeypatch.setattr(tf.profiler.experimental, "start", lambda *_, **__: None)
    monkeypatch.setattr(tf.profiler.experimental, "stop", lambda *_, **__: None)
    monkeypatch.setattr(tf.summary, "trace_export", lambda *_, **__: None)

    def trace_on(**_):
        active = [one.model for one in made if one.model is not None][-1]
        begun.append(int(active.optimizer.iterations.numpy()))

    monkeypatch.setattr(tf.summary, "trace_on", trace_on)

    def make(which):
        board = keras.callbacks.TensorBoard(
            tmp_path / which, write_graph=False, profile_batch=(3, 4)
        )
        made.append(board)
        return [board]

    both(lambda which: [], epochs=9)  # From here on calls would take more than one batch.
    both(make, epochs=2)
    assert begun == [2, 2]


def summaries(folder):
    """What TensorBoard would show: by folder, name and step."""
    found = {}
    for path in sorted(folder.rglob("events*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                if value.HasField("tensor"):
                    tensor = tf.make_ndarray(value.tensor)
                    name = re.sub(r"sequential\w*|dense\w*", "layer", value.tag)
                    key = path.parent.name, name, event.step
                    if tensor.dtype.kind == "f":
                        found[key] = tensor if "histogram" not in name else tensor[:, 2].sum()
    return dict(sorted(found.items()))


def test_nan_ends_training_at_its_batch(both):
    x = X.copy()
    x[13] = np.nan  # in the third batch

    def make(which):
        seen = []
        each = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: seen.append(b))
        each.seen = seen
        return [keras.callbacks.TerminateOnNaN(), each]

    history, theirs, ours = both(make, x=x)
    assert theirs[1].seen == ours[1].seen == [0, 1, 2]
    assert history.epoch == [0]
    assert np.isnan(history.history["loss"]).all()


@pytest.mark.parametrize(("on_epoch", "shard_update"), [(False, False), (True, True)])
def test_averaged_weights_are_swapped_in(on_epoch, shard_update):
    options = compiled(optimizer=None)
    histories, weights = [], []
    for replicas in (None, 2):
        keras.utils.set_random_seed(8)
        with strategy_of(replicas or 1).scope():
            model = build()
            optimizer = keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.7)
            model.compile(**{**options, "optimizer": optimizer})
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=on_epoch)
        rest = {"batch_size": 6, "shuffle": False, "verbose": 0, "epochs": 3}
        rest |= {"validation_data": HELD_OUT, "callbacks": [swap]}
        if replicas is None:
            histories.append(model.fit(X, Y, **rest).history)
        else:
            histories.append(tmg.fit(model, (X, Y), shard_update=shard_update, **rest).history)
        weights.append(model.get_weights())
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, rtol=3e-6, err_msg=name)
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_backup_and_restore_is_refused_with_the_reason(models, tmp_path):
    callback = keras.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(
        tmg.errors.LossError, match=r"only Keras' own fit.*callbacks=\[tmg\.Checkpoints\("
    ):
        tmg.fit(models[0], (X, Y), callbacks=[callback], verbose=0)


def test_orbax_is_refused_where_it_fails(models):
    if not hasattr(keras.callbacks, "OrbaxCheckpoint"):
        pytest.skip("needs a Keras that has OrbaxCheckpoint")

    class Made(keras.callbacks.OrbaxCheckpoint):
        def __init__(self):  # That of Keras needs the package.
            keras.callbacks.Callback.__init__(self)

    model, truth, _ = models
    with pytest.raises(TypeError, match="MirroredVariable"):
        Made().set_model(model)
    with pytest.raises(
        tmg.errors.LossError, match=r"fails on a strategy.*Received: Made\. Write call"
    ):
        tmg.fit(model, (X, Y), callbacks=[Made()], verbose=0)
    check_callbacks([Made()], truth.optimizer)


# The progress bar ---------------------------------------------------------------------------------


@pytest.mark.parametrize("verbose", [0, 2, "auto"])
def test_what_is_printed(both, capsys, verbose):
    def make(which):
        print(which)
        return [keras.callbacks.ProgbarLogger()] if verbose == "auto" else []

    history, _, _ = both(make, epochs=2, verbose=verbose, validation_data=HELD_OUT)
    printed = capsys.readouterr().out
    theirs, ours = printed_after_make(printed)
    if verbose == 0:
        assert theirs == ours == ""
        return
    for text in (theirs, ours):
        assert "Epoch 2/2" in text
        last = text.rstrip().splitlines()[-1].split("\r")[-1]
        assert last.startswith("7/7")
        for name, values in history.history.items():
            assert f"{name}: {values[-1]:.4f}" in last, (name, text)


def printed_after_make(printed):
    """What Keras printed and what we did: both callbacks are made before either trains."""
    plain = re.sub("\x1b\\[\\d+m|\b", "", printed).split("ours\n", 1)[1]
    half = [match.start() for match in re.finditer("Epoch 1/2", plain)]
    return (plain[: half[1]], plain[half[1] :]) if half else (plain, "")


def test_the_bar_shows_what_all_batches_so_far_give(both, capsys):
    shown = []

    class Bar(keras.callbacks.ProgbarLogger):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            shown.append((self.model, batch, logs))

    history, _, _ = both(lambda which: [Bar()], epochs=1, verbose=1)
    theirs = {batch: logs for model, batch, logs in shown if model is not history.model}
    ours = {batch: logs for model, batch, logs in shown if model is history.model}
    assert sorted(ours) == sorted(theirs) == list(range(BATCHES))  # A subclass gets each.
    for batch, logs in theirs.items():
        assert ours[batch] == pytest.approx(logs, rel=3e-6)
    capsys.readouterr()


# What a callback may ask for ----------------------------------------------------------------------


class Notes(keras.callbacks.Callback):
    """Notes when it is called."""

    def __init__(self, **attributes):
        super().__init__()
        vars(self).update(attributes)
        self.calls = []

    def on_train_batch_begin(self, batch, logs=None):
        self.calls.append(("begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(("end", batch))


def ends(notes):
    return [batch for what, batch in notes.calls if what == "end"]


def test_callbacks_get_each_batch_or_what_they_ask_for(both):
    each, third = Notes(), Notes(every_batches=3)
    both(lambda which: [each] if which == "ours" else [], epochs=2)
    assert each.calls == [(what, b) for b in range(BATCHES) for what in ("begin", "end")] * 2
    both(lambda which: [third] if which == "ours" else [], epochs=3)
    # After each third of all batches, and at the end of each epoch.
    assert ends(third) == [2, 5, 6, 1, 4, 6, 0, 3, 6]
    rarely = Notes(every_batches=None)
    both(lambda which: [rarely] if which == "ours" else [], epochs=3)
    assert ends(rarely).count(BATCHES - 1) == 3
    assert len(rarely.calls) < 6 * BATCHES


def test_a_number_of_steps_per_call_is_kept_to(both):
    notes = Notes()
    both(lambda which: [notes] if which == "ours" else [], epochs=1)
    model = notes.model
    asked = Notes()
    tmg.fit(model, (X, Y), batch_size=6, callbacks=[asked], steps_per_call=3, verbose=0)
    assert asked.calls == [
        *[("begin", 0), ("end", 2), ("begin", 3), ("end", 5), ("begin", 6), ("end", 6)]
    ]


def test_calls_of_a_given_length_are_timed_once_three_of_one_step_were_seen():
    pace = StepsPerCallTuner()
    # Three batches in an epoch, two in a call.
    for _ in range(3):
        for steps in (2, 1):
            pace.note(steps, 0.01 + 0.015 * steps)
    assert (pace.step, pace.call) == (pytest.approx(0.025), 0.0)
    for steps in (2, 1, 2, 1):
        pace.note(steps, 0.01 + 0.015 * steps)
    assert (pace.step, pace.call) == (pytest.approx(0.015), pytest.approx(0.01))


def test_history_is_the_same_to_the_bit_for_any_steps_per_call(models):
    model, _, begin = models
    # A third has no end in binary, so that a sum in float32 rounds at each addition.
    data = X / 3, Y
    found = []
    for steps_per_call in (1, 2, 7):
        model.set_weights(begin)
        model.optimizer.learning_rate = 0.01
        history = tmg.fit(
            model,
            data,
            batch_size=6,
            epochs=6,
            shuffle=False,
            validation_data=HELD_OUT,
            validation_batch_size=3,
            steps_per_call=steps_per_call,
            verbose=0,
        )
        found.append(history.history)
    assert found[0] == found[1] == found[2]


def test_steps_per_execution_is_one(both):
    with strategy_of(1).scope():
        model = build()
        model.compile(**compiled(steps_per_execution=4))
    notes = Notes()
    tmg.fit(model, (X, Y), batch_size=6, callbacks=[notes], verbose=0)
    assert notes.calls == [("begin", 0), ("end", 3), ("begin", 4), ("end", 6)]


def test_training_is_stopped_before_it_begins(both):
    # From here on calls would take more than one batch.
    both(lambda which: [], epochs=20)

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

        def on_test_begin(self, logs=None):
            self.model.stop_evaluating = True

    history, _, _ = both(lambda which: [Stop()], validation_data=HELD_OUT, validation_batch_size=3)
    assert history.epoch == [0, 1]
    steps = int(history.model.optimizer.iterations.numpy())
    assert steps == BATCHES + 1
    # As with steps_per_execution, a call is what is waited for.
    options = {"batch_size": 6, "callbacks": [Stop()], "verbose": 0, "initial_epoch": 1}
    tmg.fit(history.model, (X, Y), epochs=4, steps_per_call=3, **options)
    assert int(history.model.optimizer.iterations.numpy()) == steps + 3


def test_a_callback_says_where_to_go_on(models):
    model, _, begin = models
    options = {"batch_size": 6, "epochs": 5, "verbose": 0, "steps_per_epoch": 3}
    kept = {}

    class Keep(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if (self.epoch, batch) == (1, 0):
                kept["weights"] = self.model.get_weights()

    class Resume(keras.callbacks.Callback):
        resume_at = None

        def on_train_begin(self, logs=None):
            self.model.set_weights(kept["weights"])
            self.resume_at = 1, 1

    def warned(function):
        with pytest.warns(UserWarning, match="ran out of data"):
            return function()

    model.set_weights(begin)
    keras.utils.set_random_seed(4)
    warned(lambda: tmg.fit(model, (X, Y), callbacks=[Keep()], **options))
    expected = model.get_weights()
    model.set_weights(begin)
    keras.utils.set_random_seed(4)
    history = warned(lambda: tmg.fit(model, (X, Y), callbacks=[Resume()], **options))
    assert history.epoch == [1, 2, 3, 4]
    for one, other in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(one, other)


# How many steps a call takes ----------------------------------------------------------------------


def paced(call, step, calls=40, longest=None):
    pace, taken = StepsPerCallTuner(), []
    for _ in range(calls):
        steps = pace.steps if longest is None else min(pace.steps, longest)
        taken.append(steps)
        noise = 1.0 + 0.02 * np.sin(len(taken))
        pace.note(steps, (call + steps * step) * noise + (3.0 if len(taken) == 1 else 0.0))
    return pace, taken


def test_steps_that_hide_what_a_call_costs():
    for call, step, least, most in (
        (1e-3, 1e-3, 14, 26),  # 19 steps make a call that costs as much as a step 5 %.
        (1e-3, 20e-3, 1, 3),
        (1e-3, 1e-5, 64, 64),
        (1e-3, 0.2, 1, 2),
        (5e-3, 30e-3, 3, 16),  # Not longer than half a second.
        (0.0, 2.0, 1, 1),
    ):
        pace, taken = paced(call, step)
        assert pace.known
        assert least <= pace.steps <= most
        assert taken[0] == 1
        assert max(taken) * step <= 0.5 or max(taken) == 1
        assert len(set(taken[8:])) == 1


def test_short_epochs_are_measured_with_what_they_have():
    pace, _ = paced(1e-3, 1e-3, longest=3)
    assert pace.known
    assert 10 <= pace.steps <= 30
    pace, taken = paced(1e-3, 1e-3, longest=1)
    assert set(taken) == {1}
    assert not pace.known


def test_an_evaluation_is_stopped(both):
    class Stop(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = batch == 1

    both(lambda _: [Stop()], validation_data=HELD_OUT, validation_batch_size=3, epochs=2)


def test_hooks_from_time_to_time():
    clock, told = [0.0], []

    class List:
        callbacks = (keras.callbacks.ProgbarLogger(), keras.callbacks.History())

        def on_train_batch_begin(self, batch):
            told.append(("begin", batch))

        def on_train_batch_end(self, batch, logs):
            told.append(("end", batch))

    hooks = BatchHooks(List(), "train", steps_per_call=None, elapsed=lambda: clock[0])
    hooks.begin_epoch()
    for batch in range(0, 100, 10):
        assert hooks.before(batch, 10) == 10
        clock[0] += 0.03
        hooks.ran(10)
        hooks.after(batch + 9, dict)
    hooks.finish(99, {})
    hooks.before(100, 5)
    hooks.after(104, dict)
    hooks.finish(104, {})
    hooks.finish(104, {})
    assert told == [
        *[("begin", 40), ("end", 49), ("begin", 90), ("end", 99), ("begin", 104), ("end", 104)]
    ]


def test_the_table_of_the_guide_names_every_callback_of_keras():
    page = (Path(__file__).parents[2] / "docs" / "loops.md").read_text()
    names = [
        name
        for name, one in vars(keras.callbacks).items()
        if isinstance(one, type) and issubclass(one, keras.callbacks.Callback)
    ]
    missing = [name for name in names if f"`{name}`" not in page]
    assert set(missing) <= {"Callback", "CallbackList"}
