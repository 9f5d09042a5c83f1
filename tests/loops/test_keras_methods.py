"""Models that replace methods of Keras: as in Keras on one replica, and the lines for several."""

from __future__ import annotations

import contextlib
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu.loops.own_methods import own_methods

ROWS = 37
_random = np.random.default_rng(17)
X = _random.normal(size=(ROWS, 5))  # float64, which Keras casts
Y = _random.normal(size=(ROWS, 1))
W = _random.uniform(0.2, 2.0, ROWS)
FIT = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0}


class Base(keras.Model):
    """Two layers, one of which draws; metrics and optimizers are added by the classes below."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(4, "tanh", kernel_regularizer=keras.regularizers.L2(0.1))
        self.drop = keras.layers.Dropout(0.3, seed=4)
        self.outer = keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.outer(self.drop(self.inner(x), training=training))


class OwnStep(Base):
    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")

    def train_step(self, data):
        x, y, *weight = data
        with tf.GradientTape() as tape:
            values = tf.reduce_mean(tf.square(y - self(x, training=True)), axis=-1)
            loss = tf.reduce_mean(values * weight[0] if weight else values)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.seen.update_state(values)
        return {"loss": loss, "seen": self.seen.result(), "both": {"rows": tf.shape(x)[0]}}

    def test_step(self, data):
        x, y = data[:2]
        self.seen.update_state(tf.abs(y - self(x)))
        return {"seen": self.seen.result(), "each": tf.stack([1.0, self.seen.result()])}


class KerasNames(Base):
    """Logs with the names of the model's metrics, which Keras replaces by the metrics."""

    def train_step(self, data):
        return {"loss": tf.constant(7.0)}


class OwnMetrics(Base):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**results, "largest": tf.reduce_max(y_pred)}


class ScalarLoss(Base):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(tf.square(y - y_pred)) + tf.reduce_mean(x) + sum(self.losses)


class Pair(keras.Model):
    """A model without ``call``, whose parts have an optimizer each, as in a GAN."""

    def __init__(self):
        super().__init__()
        self.first = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        self.second = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, data):
        x, y = data
        logs = {}
        for name, part, optimizer in (
            ("d_loss", self.first, self.d_optimizer),
            ("g_loss", self.second, self.g_optimizer),
        ):
            with tf.GradientTape() as tape:
                logs[name] = tf.reduce_mean(tf.abs(y - part(x)))
            variables = part.trainable_variables
            gradients = tape.gradient(logs[name], variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"d_loss": logs["d_loss"], "g_loss": logs["g_loss"]}


class Parts(Base):
    """A model without ``call``, whose ``train_step`` keeps an average of its own."""

    call = keras.Model.call

    def __init__(self):
        super().__init__()
        self.average = keras.Variable(0.0, trainable=False)

    def train_step(self, rows):
        self.average.assign(0.9 * self.average + 0.1 * tf.reduce_mean(rows[0]))
        return {"loss": self.average}


class Normalized(Base):
    """A loss that divides by what it counts in the whole batch, as a detector does."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        counted = tf.cast(y > 0, y_pred.dtype)
        values = tf.square(y - y_pred) * counted
        return tf.reduce_sum(values) / tf.maximum(tf.reduce_sum(counted), 1.0) + sum(self.losses)


class Whole(Normalized):
    """The lines of the error."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        rows = tf.cast(tf.shape(tf.nest.flatten(x)[0])[0], tf.float32)
        x, y, y_pred = tmg.gather_rows((x, y, y_pred))
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return tmg.LossSum(loss * rows, rows)


def one_replica(kind):
    if kind == "none":
        return contextlib.nullcontext()
    made = {"one": tf.distribute.OneDeviceStrategy("CPU:0")}
    made["mirrored"] = tf.distribute.MirroredStrategy(["CPU:0"])
    return made[kind].scope()


def compiled(kind, **options):
    keras.utils.set_random_seed(3)
    model = kind()
    if kind is Pair:
        model.compile(keras.optimizers.Adam(0.05), keras.optimizers.SGD(0.1, momentum=0.9))
    else:
        # Metrics that are compiled but never updated make Keras' own fit fail.
        if not own_methods(model, "train_step"):
            options["metrics"] = ["mae"]
        model.compile(keras.optimizers.Adam(0.05), "mse", **options)
    return model


def both(kind, scope="none", **options):
    with one_replica(scope):
        model = compiled(kind, **options)
    return model, compiled(kind, **options)


def assert_equal(model, truth, history, expected):
    for one, other in zip(model.get_weights(), truth.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert history.history == expected.history


@pytest.mark.parametrize(
    ("kind", "scope"),
    [(OwnStep, "mirrored"), (OwnMetrics, "none"), (ScalarLoss, "one"), (KerasNames, "none")],
)
def test_fit_is_that_of_keras_to_the_last_bit(kind, scope):
    model, truth = both(kind, scope)
    expected = truth.fit(X, Y, validation_data=(X[:11], Y[:11]), validation_batch_size=4, **FIT)
    history = tmg.fit(model, X, Y, validation_data=(X[:11], Y[:11]), validation_batch_size=4, **FIT)
    for values in (history.history, expected.history):
        arrays = [np.asarray(one) for one in values.pop("val_each", [])]
        assert all(one.shape == (2,) for one in arrays)
    if kind is KerasNames:
        assert history.history["loss"] == [0.0] * 3  # the tracker, which nothing has updated
    if kind is OwnStep:
        assert history.history["rows"] == [5.0] * 3
    assert_equal(model, truth, history, expected)
    assert int(model.optimizer.iterations.numpy()) == int(truth.optimizer.iterations.numpy())


@pytest.mark.parametrize("eager", [False, True])
def test_weights_several_steps_per_call_and_batch_hooks(eager):
    model, truth = both(OwnStep, run_eagerly=eager)
    seen = {id(model): [], id(truth): []}

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen[id(self.model)].append((batch, *sorted(logs.items())))

    expected = truth.fit(X, Y, sample_weight=W, callbacks=[Watch()], **FIT)
    history = tmg.fit(model, X, Y, sample_weight=W, callbacks=[Watch()], **FIT)
    assert_equal(model, truth, history, expected)
    assert seen[id(model)] == seen[id(truth)]
    expected = truth.fit(X, Y, **FIT)
    history = tmg.fit(model, X, Y, steps_per_call=3, **FIT)
    assert_equal(model, truth, history, expected)


def test_evaluate():
    model, truth = both(OwnStep, "one")
    truth.fit(X, Y, **FIT)
    tmg.fit(model, X, Y, **FIT)
    expected = truth.evaluate(X, Y, batch_size=8, return_dict=True, verbose=0)
    logs = tmg.evaluate(model, (X, Y), batch_size=8)
    assert list(logs) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(logs[name], value)


def test_predict():
    class Own(Base):
        def predict_step(self, data):
            return {"doubled": 2 * super().predict_step(data), "row": tf.range(tf.shape(data)[0])}

    model, truth = both(Own)
    truth(X[:1])
    model(X[:1])
    model.set_weights(truth.get_weights())
    expected = truth.predict(X, batch_size=8, verbose=0)
    found = tmg.predict(model, X, batch_size=8)
    assert set(found) == {"doubled", "row"}
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name])


def test_a_second_optimizer_is_not_left_out_of_a_checkpoint(tmp_path):
    model = compiled(Pair)
    checkpoints = tmg.Checkpoints(tmp_path, model=model, optimizer=model.d_optimizer)
    with pytest.raises(tmg.CheckpointError, match="changes variables that the checkpoint would"):
        tmg.fit(model, X, Y, callbacks=[checkpoints.callback(every_epochs=1)], **FIT)


def test_further_optimizers_are_saved_as_extra_states(tmp_path):
    def run(directory, *more):
        model = compiled(Pair)
        model.built = True  # It has no call, by which Keras builds a model.
        model.d_optimizer.build(model.first.trainable_variables)
        model.g_optimizer.build(model.second.trainable_variables)
        checkpoints = tmg.Checkpoints(
            directory,
            model=model,
            optimizer=model.d_optimizer,
            extra={"g": list(model.g_optimizer.variables)},
        )
        step = checkpoints.restore()
        callbacks = [checkpoints.callback(every_steps=3), *more]
        tmg.fit(model, X, Y, callbacks=callbacks, **FIT)
        return step, model

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.d_optimizer.iterations.numpy()) == 8:
                raise KeyboardInterrupt

    _, truth = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", Stop())
    step, model = run(tmp_path / "cut")
    assert step == 6
    for one, other in zip(model.get_weights(), truth.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_counts_and_float64_keep_their_digits():
    class Own(Base):
        def train_step(self, data):
            return {"n": tf.constant(2**24 + 1, tf.int64), "d": tf.constant(0.1, tf.float64)}

    assert tmg.fit(compiled(Own), X, Y, **FIT).history == {"d": [0.1] * 3, "n": [2.0**24 + 1] * 3}


def test_a_loss_per_row_beside_compute_metrics():
    class Own(RowLoss):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            return {"a": 1.0}

    with pytest.raises(
        tmg.errors.LossError, match=r"train on the sum of what compute_loss returns"
    ):
        tmg.fit(compiled(Own), X, Y, **FIT)


def test_options_of_our_step_are_refused():
    model = compiled(OwnStep)
    options = {"micro_batches": 2, "clip_norm": 1.0, "loss_scale": 8, "shard_update": True}
    for name, value in options.items():
        with pytest.raises(ValueError, match=rf"^{name} acts in the step of this library.*OwnStep"):
            tmg.fit(model, X, Y, **{name: value}, **FIT)
    assert not int(model.optimizer.iterations.numpy())


def test_a_loop_of_its_own_is_not_passed_over():
    for purpose in ("train", "test", "predict"):
        name = f"make_{purpose}_function"
        own = type("Own", (Base,), {name: lambda self, force=False: None})
        model = compiled(own)
        calls = {
            "train": lambda one: tmg.fit(one, X, Y, **FIT),
            "test": lambda one: tmg.evaluate(one, X, Y),
            "predict": lambda one: tmg.predict(one, X),
        }
        with pytest.raises(tmg.errors.LossError, match=rf"Own\.{name}\. Write .* {purpose}_step"):
            calls[purpose](model)


def test_metrics_results_of_its_own():
    class Own(Base):
        def get_metrics_result(self):
            return {**super().get_metrics_result(), "one": 1.0}

    model, truth = both(Own)
    assert_equal(model, truth, tmg.fit(model, X, Y, **FIT), truth.fit(X, Y, **FIT))
    with strategy_of(2).scope():
        model = compiled(Own)
    with pytest.raises(tmg.errors.LossError, match=r"Own\.get_metrics_result, and Mirrored"):
        tmg.fit(model, X, Y, **FIT)


def test_long_arrays_in_logs_keep_their_order():
    class Own(Base):
        def train_step(self, data):
            return {"each": tf.range(12.0), "table": tf.reshape(tf.range(6), [2, 3])}

    history = tmg.fit(compiled(Own), X, Y, **FIT).history
    np.testing.assert_array_equal(history["each"][-1], np.arange(12))
    np.testing.assert_array_equal(history["table"][-1], [[0, 1, 2], [3, 4, 5]])


def test_logs_must_be_a_dict_of_numbers():
    for logs, words in (
        (tf.constant(1.0), r"Own\.train_step must return a dict.*Received: \w*Tensor"),
        ({"loss": tf.constant("a")}, "must be a number. Received: string for 'loss' from Own"),
    ):

        class Own(Base):
            def train_step(self, data):
                return logs  # noqa: B023

        with pytest.raises(tmg.errors.LossError, match=words):
            tmg.fit(compiled(Own), X, Y, **FIT)


def test_the_step_is_kept_as_long_as_its_model():
    model = compiled(OwnStep)
    tmg.fit(model, X, Y, **FIT)
    traces = []
    original = OwnStep.train_step

    def counted(self, data):
        traces.append(data)
        return original(self, data)

    OwnStep.train_step = counted
    try:
        tmg.fit(model, X, Y, **FIT)
        assert not traces
        held = weakref.ref(model)
        del model
        gc.collect()
        assert held() is None
    finally:
        OwnStep.train_step = original


# A loss per row -----------------------------------------------------------------------------------


class RowLoss(Base):
    """The mean of it is the loss of ``Plain``, which Keras computes on one device."""

    def __init__(self):
        super().__init__()
        self.own = keras.metrics.Mean(name="own")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        values = tf.reduce_mean(tf.square(y - y_pred), axis=-1) + 0.1 * tf.reduce_sum(x, axis=-1)
        self.own.update_state(values)
        values = values if sample_weight is None else values * sample_weight
        return self.result(values)

    def result(self, values):
        return values + sum(self.losses)


class SumLoss(RowLoss):
    def result(self, values):
        count = tf.cast(tf.size(values), tf.float32)
        return tmg.LossSum(tf.reduce_sum(values) + count * sum(self.losses), count)


class Plain(RowLoss):
    def result(self, values):
        return tf.reduce_mean(values) + sum(self.losses)


@pytest.mark.parametrize(("kind", "replicas"), [(RowLoss, 3), (SumLoss, 2)])
def test_a_loss_per_row_is_that_of_one_device(kind, replicas):
    truth = compiled(Plain)
    with strategy_of(replicas).scope():
        model = compiled(kind)
    options = {**FIT, "batch_size": 7, "sample_weight": W}
    valid = {"validation_data": (X[:11], Y[:11]), "validation_batch_size": 4}
    expected = truth.fit(X, Y, **valid, **options)
    history = tmg.fit(model, X, Y, **valid, **options)
    for one, other in zip(model.get_weights(), truth.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    assert list(history.history) == list(expected.history)
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=3e-6, err_msg=name)
    expected = truth.evaluate(X, Y, sample_weight=W, return_dict=True, verbose=0)
    assert tmg.evaluate(model, (X, Y, W), batch_size=5) == pytest.approx(expected, rel=3e-6)


# Several replicas ---------------------------------------------------------------------------------


LINES = [
    (
        OwnStep,
        r"Received: OwnStep\.train_step, and MirroredStrategy with 2 replica(?s:.*)"
        r'return loss, {"seen": \(tf.reduce_sum\(seen\), tf.size\(seen\)\), "both"(?s:.*)'
        r"model.compile\(optimizer=model.optimizer\)  # Adam(?s:.*)"
        r"tmg.fit\(model, data, forward=forward\)",
    ),
    (
        Pair,
        r'return loss, {"d_loss": (?s:.*)"g_loss"(?s:.*)tmg.chain_steps\((?s:.*)'
        r"model.d_optimizer(?s:.*)Adam(?s:.*)model.g_optimizer(?s:.*)SGD",
    ),
    (OwnMetrics, r"OwnMetrics\.compute_metrics(?s:.*)model.compile\(metrics="),
    (
        ScalarLoss,
        r"ScalarLoss\.compute_loss(?s:.*)return tmg.LossSum\((?s:.*)"
        r"class Whole\(ScalarLoss\)(?s:.*)tmg.gather_rows\(\(x, y, y_pred\)\)",
    ),
    (
        Parts,
        r" rows = batch\n +y_pred = \.\.\.  # (?s:.*)no call, as in Parts\.train_step(?s:.*)"
        r"What it assigns besides, "
        r"self\.average\.assign\(.*\), goes to a callback: in on_train_batch_end",
    ),
]


def test_on_several_replicas_fit_shows_the_lines_for_this_class():
    for kind, lines in LINES:
        with strategy_of(2).scope():
            model = compiled(kind)
        with pytest.raises(tmg.errors.LossError, match=lines):
            tmg.fit(model, X, Y, **FIT)


def test_the_lines_for_a_loss_of_the_whole_batch_are_exact():
    with strategy_of(3).scope():
        model = compiled(Whole)
    truth = compiled(Normalized)
    x, y = X.astype("float32"), Y.astype("float32")
    expected = truth.fit(x, y, **FIT).history
    history = tmg.fit(model, x, y, **FIT).history
    for one, other in zip(model.get_weights(), truth.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)


def test_a_model_without_call_trains_with_a_forward():
    def forward(model, batch, training):
        x, y = batch
        return tmg.loss_sum("mse", y, model.outer(model.drop(model.inner(x), training=training)))

    class Built(Parts):
        train_step = keras.Model.train_step

        def __init__(self):
            super().__init__()
            self.inner.build((None, 5))
            self.outer.build((None, 4))

    kept = []
    for scope in (strategy_of(2), strategy_of(1)):
        with scope.scope():
            keras.utils.set_random_seed(3)
            model = Built()
            model.compile(keras.optimizers.Adam(0.05))
        tmg.fit(model, X.astype("float32"), Y.astype("float32"), forward=forward, **FIT)
        kept.append(model.get_weights())
    for one, other in zip(*kept, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


class Detector(keras.Model):
    """Labels whose names are not those of its outputs."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.square(y["box"][:, 0] - y_pred["first"][:, 0] + y_pred["second"][:, 0])


def test_labels_of_a_structure_that_only_the_loss_reads():
    def made():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((5,))
        outputs = {name: keras.layers.Dense(1)(inputs) for name in ("first", "second")}
        model = Detector(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1))
        return model

    data = tf.data.Dataset.from_tensor_slices((X, {"box": Y.astype("float32")})).batch(8)
    with strategy_of(2).scope():
        model = made()
    truth = made()
    histories = [tmg.fit(one, data, verbose=0).history for one in (model, truth)]
    assert histories[0]["loss"] == pytest.approx(histories[1]["loss"], rel=1e-5)
    for one, other in zip(model.get_weights(), truth.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_on_several_replicas_evaluate_and_predict_too():
    class Own(OwnStep):
        def predict_step(self, data):
            return self(data)

    with strategy_of(2).scope():
        model = compiled(Own)
    with pytest.raises(
        tmg.errors.LossError, match=r"Own\.test_step(?s:.*)make_eval_step\(model, None"
    ):
        tmg.evaluate(model, (X, Y))
    with pytest.raises(
        tmg.errors.LossError, match=r"Move what Own\.predict_step computes to .* call"
    ):
        tmg.predict(model, X)


def test_only_what_is_called_is_refused():
    class Own(Base):
        def test_step(self, data):
            return {}

    with strategy_of(2).scope():
        model, valid = compiled(Own), compiled(OwnStep)
    truth = compiled(Base)
    expected, history = truth.fit(X, Y, **FIT), tmg.fit(model, X, Y, **FIT)
    assert history.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-5)
    with pytest.raises(tmg.errors.LossError, match=r"Own\.test_step"):
        tmg.fit(model, X, Y, validation_data=(X, Y), **FIT)
    assert int(model.optimizer.iterations.numpy()) == 15  # refused before it trains
    with pytest.raises(tmg.errors.LossError, match=r"OwnStep\.test_step"):
        tmg.evaluate(valid, (X, Y))


def test_a_step_without_anything_to_validate_with():
    model = compiled(Pair)
    with pytest.raises(
        tmg.errors.LossError, match="Pair without a compiled loss and without test_step"
    ):
        tmg.fit(model, X, Y, validation_data=(X, Y), **FIT)


def test_a_method_that_only_calls_super_replaces_nothing():
    class Same(Base):
        def train_step(self, data):
            """Says something."""
            return super().train_step(data)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return super().compute_loss(
                x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
            )

    class Other(OwnStep):
        def train_step(self, data):
            return super().train_step(data)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return super().compute_loss(x, y, y_pred, None, training)

    methods = "train_step", "test_step", "compute_loss", "compute_metrics", "predict_step"
    assert own_methods(compiled(Same), *methods) == []
    assert own_methods(compiled(Other), *methods) == ["train_step", "test_step", "compute_loss"]
    with strategy_of(3).scope():
        model = compiled(Same)
    truth = compiled(Base)
    history, expected = tmg.fit(model, X, Y, **FIT), truth.fit(X, Y, **FIT)
    assert history.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-5)
