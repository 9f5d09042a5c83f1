"""fit on replicas against Keras' own fit on one device, outside of every scope."""

from __future__ import annotations

import gc
import itertools
import signal
import warnings
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import as_dataset, cut, strategy_of

import tfmultigpu as tmg
from tfmultigpu.loops.training_data import make_epoch_iterator

ROWS = 37
_random = np.random.default_rng(41)
X = _random.normal(size=(ROWS, 5)).astype("float32")
KIND = _random.integers(0, 3, ROWS)
SIZE = _random.normal(size=(ROWS, 1)).astype("float32")
W = _random.uniform(0.2, 2.0, ROWS).astype("float32")


def classifier():
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(6, "tanh", kernel_regularizer="l2"),
            keras.layers.Dropout(0.3, seed=4),
            keras.layers.Dense(3, "softmax"),
        ]
    )


def line():
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])


def classification(**more):
    return {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
        **more,
    }


def regression(**more):
    return {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", **more}


def made(replicas, build, compiled):
    """The same model under a strategy and on one device."""
    keras.utils.set_random_seed(3)
    truth = build()
    truth.compile(**compiled())
    keras.utils.set_random_seed(3)
    with strategy_of(replicas).scope():
        model = build()
        model.compile(**compiled())
    model.set_weights(truth.get_weights())
    return model, truth


def steps_of(model):
    return int(model.optimizer.iterations.numpy())


def by_keras(truth, data, **options):
    """Keras' fit, quietly: it warns of the end of data whose length it does not know."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return truth.fit(data, shuffle=False, verbose=0, **options)


def of_known_length(batches):
    """Where Keras does not know it, its optimizer counts the step that finds the end."""
    return as_dataset(batches).apply(tf.data.experimental.assert_cardinality(len(batches)))


def assert_same(model, truth, history, expected, *, but=()):
    """Weights, steps and History of Keras' fit on one device."""
    for one, other in zip(model.get_weights(), truth.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    assert steps_of(model) == steps_of(truth)
    assert list(history.history) == list(expected.history)
    assert history.epoch == expected.epoch
    assert history is model.history
    for name, values in expected.history.items():
        if name not in but:
            np.testing.assert_allclose(
                history.history[name], values, rtol=2e-6, atol=1e-6, err_msg=name
            )
            assert all(isinstance(value, float) for value in history.history[name])


# What one device gives ----------------------------------------------------------------------------


def test_arrays_with_weights_and_a_part_to_validate_with():
    def compiled():
        return classification(optimizer=keras.optimizers.Adam(0.01), weighted_metrics=["accuracy"])

    model, truth = made(3, classifier, compiled)
    options = {"epochs": 3, "batch_size": 8, "shuffle": False, "validation_split": 0.2}
    expected = truth.fit(X, KIND, sample_weight=W, verbose=0, **options)
    history = tmg.fit(model, (X, KIND), sample_weight=W, verbose=0, **options)
    assert_same(model, truth, history, expected)
    assert set(history.history) > {"loss", "accuracy", "weighted_accuracy", "val_loss"}
    # And on: other epochs, other rows, weights inside the data, each batch shown.
    options = {"initial_epoch": 3, "epochs": 5, "batch_size": 5, "shuffle": False, "verbose": 0}
    expected = truth.fit(X[:13], KIND[:13], sample_weight=W[:13], **options)
    seen = Seen()
    again = tmg.fit(model, (X[:13], KIND[:13], W[:13]), callbacks=[seen], **options)
    assert_same(model, truth, again, expected)
    assert again.epoch == [3, 4]
    assert seen.ends == [(0, 5), (1, 10), (2, 13)] * 2


class Seen(keras.callbacks.Callback):
    """Notes each batch, and how many rows the metrics had seen by then."""

    def __init__(self):
        super().__init__()
        self.begins, self.ends, self.logs = [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.begins.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        (metric,) = self.model.metrics[1].metrics[:1]
        self.ends.append((batch, int(metric.count.numpy())))
        self.logs.append(logs)


def two_heads():
    left, right = keras.Input((2,), name="left"), keras.Input((3,), name="right")
    hidden = keras.layers.Concatenate()([left, right])
    regularized = keras.layers.Dense(1, kernel_regularizer="l2", name="size")(hidden)
    kind = keras.layers.Dense(3, "softmax", name="kind")(hidden)
    return keras.Model({"left": left, "right": right}, {"size": regularized, "kind": kind})


def two_losses():
    return {
        "optimizer": keras.optimizers.SGD(0.1),
        "loss": {"kind": "sparse_categorical_crossentropy", "size": keras.losses.Huber()},
        "loss_weights": {"kind": 2.0, "size": 0.5},
        "metrics": {"kind": "accuracy", "size": ["mae"]},
    }


def test_several_inputs_and_outputs_and_callbacks_that_look_at_each_batch():
    features = {"left": X[:, :2], "right": X[:, 2:]}
    labels = {"kind": KIND, "size": SIZE}
    model, truth = made(2, two_heads, two_losses)
    ours, theirs = [], []

    def note(notes):
        return keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: notes.append((batch, dict(logs)))
        )

    options = {"batch_size": 9, "epochs": 2, "shuffle": False, "verbose": 0}
    expected = truth.fit(features, labels, callbacks=[note(theirs)], **options)
    history = tmg.fit(model, (features, labels), callbacks=note(ours), **options)
    # Keras' loss of an output is a plain mean over batches, in which a row of a small one weighs
    # more; ours are by rows, as "loss" is everywhere.
    assert_same(model, truth, history, expected, but=("kind_loss", "size_loss"))
    assert [batch for batch, _ in ours] == [batch for batch, _ in theirs] == [0, 1, 2, 3, 4] * 2
    for (_, one), (batch, other) in zip(ours, theirs, strict=True):
        assert list(one) == list(other)
        for name in one:
            if batch % 5 < 4 or not name.endswith("_loss"):
                assert one[name] == pytest.approx(other[name], rel=2e-6, abs=1e-6), (batch, name)
    plain = history.history
    regularisation = np.subtract(
        plain["loss"], 2.0 * np.array(plain["kind_loss"]) + 0.5 * np.array(plain["size_loss"])
    )
    assert (regularisation > 0.01).all()
    assert (regularisation < 0.2).all()


def masked():
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(9, 3, mask_zero=True),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )


def test_losses_divided_by_what_a_mask_and_weights_leave():
    random = np.random.default_rng(6)
    tokens = np.where(
        np.arange(4) < random.integers(1, 5, (ROWS, 1)), random.integers(1, 9, (ROWS, 4)), 0
    )
    tags, weights = random.integers(0, 3, (ROWS, 4)), np.repeat(W[:, None], 4, 1)

    def compiled():
        reduction = "mean_with_sample_weight"
        loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
        return {"optimizer": keras.optimizers.SGD(0.5), "loss": loss, "metrics": ["accuracy"]}

    model, truth = made(3, masked, compiled)
    data = of_known_length(cut((tokens, tags, weights), (7, 2, 16, 12)))
    expected = by_keras(truth, data, epochs=2)
    history = tmg.fit(model, data, epochs=2, verbose=0)
    assert_same(model, truth, history, expected)


# Epochs and passes --------------------------------------------------------------------------------

BATCHES = cut((X, SIZE), (7, 2, 9, 1, 8, 6, 4))


def with_known_length():
    return of_known_length(BATCHES)


@pytest.fixture(scope="module")
def two_lines():
    return made(2, line, regression)


@pytest.fixture
def lines(two_lines):
    """A model on two replicas and on one device, as if never trained."""
    weights = [np.linspace(-0.5, 0.5, 5, dtype="float32")[:, None], np.zeros(1, "float32")]
    for one in two_lines:
        one.set_weights(weights)
        one.optimizer.iterations.assign(0)
    return two_lines


def fitted(lines, data, **options):
    """The same call of both, with what they warned of."""
    model, truth = lines
    with warnings.catch_warnings(record=True) as theirs:
        warnings.simplefilter("always")
        expected = truth.fit(data(), shuffle=False, verbose=0, **options)
    with warnings.catch_warnings(record=True) as ours:
        warnings.simplefilter("always")
        history = tmg.fit(model, data(), verbose=0, **options)
    assert_same(model, truth, history, expected)
    return [
        [str(one.message) for one in found if "ran out of data" in str(one.message)]
        for found in (ours, theirs)
    ]


def test_an_epoch_goes_on_where_the_one_before_stopped(lines):
    ours, theirs = fitted(lines, with_known_length, epochs=5, steps_per_epoch=3)
    assert len(ours) == len(theirs) == 1
    assert "an epoch of 3 batches ends after 1, and the next one starts a new pass" in ours[0]
    assert "steps_per_epoch * epochs" in ours[0]
    assert fitted(lines, lambda: as_dataset(BATCHES).repeat(), epochs=3, steps_per_epoch=4) == [
        [],
        [],
    ]
    assert fitted(lines, with_known_length, epochs=2) == [[], []]


def test_data_of_unknown_length(lines):
    model, truth = lines
    expected = by_keras(truth, with_known_length(), epochs=2)  # Keras warns otherwise.
    seen = []
    each = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    history = tmg.fit(model, as_dataset(BATCHES), epochs=2, verbose=0, callbacks=[each])
    assert_same(model, truth, history, expected)
    assert seen == list(range(len(BATCHES))) * 2
    expected = by_keras(truth, as_dataset(BATCHES).repeat(), steps_per_epoch=7, epochs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Two epochs are two passes, which nobody knew before.
        history = tmg.fit(model, as_dataset(BATCHES), steps_per_epoch=7, epochs=2, verbose=0)
    assert_same(model, truth, history, expected)


def test_arrays_and_steps(lines):
    arrays = X, SIZE
    model, truth = lines
    with pytest.warns(UserWarning, match="ran out of data"):
        expected = truth.fit(
            *arrays, batch_size=8, steps_per_epoch=3, epochs=3, shuffle=False, verbose=0
        )
    with pytest.warns(UserWarning, match="ends after 2"):
        history = tmg.fit(
            model, arrays, batch_size=8, steps_per_epoch=3, epochs=3, shuffle=False, verbose=0
        )
    assert_same(model, truth, history, expected)
    # Without a batch size, steps say how large batches are.
    truth.fit(*arrays, steps_per_epoch=3, shuffle=False, batch_size=13, verbose=0)
    tmg.fit(model, arrays, steps_per_epoch=3, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], truth.get_weights()[0], atol=1e-6)


def test_validation_data(lines):
    held_out = X[:11], SIZE[:11]
    options = {"epochs": 4, "validation_data": held_out, "validation_batch_size": 4}
    fitted(lines, with_known_length, validation_freq=2, **options)
    fitted(lines, with_known_length, validation_freq=[1, 4], validation_steps=2, **options)
    options["validation_data"] = as_dataset(BATCHES[:4])
    options["validation_batch_size"] = None
    fitted(lines, with_known_length, **options)


def rows_in_order(replicas, seed, passes=2, **options):
    """The rows of each pass, as the replicas see them."""
    strategy, numbers = strategy_of(replicas), np.arange(ROWS)
    options = {"batch_size": 8, "steps_per_epoch": None, "shuffle": True, **options}
    options |= {"class_weight": None, "shares": None, "first_pass": 0}
    feed, _ = make_epoch_iterator(keras.Model(), (numbers, None), strategy, seed=seed, **options)
    found = []
    for _ in range(passes):
        feed.begin_epoch()
        while (steps := feed.most(2)) and feed.took(steps, steps):
            found += [next(feed.iterator)[0] for _ in range(steps)]
        found += [next(feed.iterator)[0] for _ in range(steps)]
    shards = [np.concatenate(strategy.experimental_local_results(batch)) for batch in found]
    return np.concatenate(shards).reshape(passes, ROWS)


def test_order_of_arrays_follows_the_seed_and_the_pass_alone():
    order = rows_in_order(1, seed=5)
    assert (np.sort(order, axis=1) == np.arange(ROWS)).all()
    assert (order[0] != order[1]).any()
    assert (order != rows_in_order(1, seed=6)).any()
    np.testing.assert_array_equal(order, rows_in_order(2, seed=5))
    np.testing.assert_array_equal(rows_in_order(2, 5, shuffle=False), [np.arange(ROWS)] * 2)


def test_arrays_of_other_kinds():
    dense = np.where(np.arange(5) % 2, X, 0.0)
    kinds = {
        "sparse": tf.sparse.from_dense(dense),
        "ragged": tf.RaggedTensor.from_tensor(dense, padding=0.0),
        "none": (dense, None),
    }
    options = {"steps_per_epoch": None, "class_weight": None, "shares": None, "first_pass": 0}
    for (kind, x), shuffle in itertools.product(kinds.items(), (False, True)):
        feed, _ = make_epoch_iterator(
            keras.Model(),
            (x, np.arange(ROWS)),
            strategy_of(1),
            batch_size=8,
            shuffle=shuffle,
            seed=1,
            **options,
        )
        feed.begin_epoch()
        seen = []
        for _ in range(5):
            part, numbers = next(feed.iterator)
            seen += numbers.numpy().tolist()
            part = part[0] if kind == "none" else part
            part = tf.sparse.to_dense(part) if kind == "sparse" else part
            part = part.to_tensor(shape=[None, 5]) if kind == "ragged" else part
            expected = dense if kind != "ragged" else x.to_tensor(shape=[None, 5]).numpy()
            np.testing.assert_array_equal(part, expected[numbers.numpy()])
        assert sorted(seen) == list(range(ROWS))
        assert (seen == sorted(seen)) is not shuffle


@pytest.mark.parametrize("hot", [False, True])
def test_class_weights(hot):
    y = np.eye(3, dtype="float32")[KIND] if hot else KIND
    loss = "categorical_crossentropy" if hot else "sparse_categorical_crossentropy"
    model, truth = made(
        2, classifier, lambda: {**classification(weighted_metrics=["accuracy"]), "loss": loss}
    )
    options = {"class_weight": {0: 0.5, 2: 3.0}, "epochs": 2, "verbose": 0, "shuffle": False}
    if hot:
        expected = truth.fit(X, y, batch_size=8, **options)
        history = tmg.fit(model, (X, y), batch_size=8, **options)
    else:
        data = tf.data.Dataset.from_tensor_slices((X, y)).batch(8)
        expected = truth.fit(data, **options)
        history = tmg.fit(model, data, **options)
    assert_same(model, truth, history, expected)


# Options of a step --------------------------------------------------------------------------------


def test_micro_batches_clipping_shares_and_xla():
    model, _ = made(2, line, lambda: regression(jit_compile=True))
    clipping = keras.optimizers.SGD(0.1, global_clipnorm=0.3)
    truth = line()
    truth.compile(**regression(optimizer=clipping))
    truth.set_weights(model.get_weights())
    data = tf.data.Dataset.from_tensor_slices((X, SIZE)).batch(9)
    expected = by_keras(truth, data, epochs=2)
    history = tmg.fit(
        model, data, epochs=2, verbose=0, micro_batches=2, clip_norm=0.3, shares=(3, 1)
    )
    assert_same(model, truth, history, expected)


def test_float16_scales_its_loss_and_skips_what_overflows():
    def build():
        return keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        )

    keras.config.set_dtype_policy("mixed_float16")
    try:
        model, _ = made(2, build, regression)
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    broken = X.copy()
    broken[20] = np.inf
    before = model.get_weights()
    history = tmg.fit(model, (broken, SIZE), batch_size=8, shuffle=False, epochs=2, verbose=0)
    assert not np.isfinite(history.history["loss"]).all()
    assert steps_of(model) == 2 * 4  # Of five batches one is not finite.
    assert float(model.optimizer.dynamic_scale.numpy()) == 2.0**13
    assert all(np.isfinite(one).all() for one in model.get_weights())
    assert any((one != other).any() for one, other in zip(before, model.get_weights(), strict=True))
    history = tmg.fit(model, (X, SIZE), batch_size=8, epochs=5, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]


# Calling again ------------------------------------------------------------------------------------


def counting(calls):
    class Count(keras.layers.Layer):
        def call(self, inputs):
            calls.append(1)
            return inputs

    def build():
        return keras.Sequential(
            [
                keras.Input((None,)),
                Count(),
                keras.layers.Lambda(lambda x: x[:, :5], output_shape=(5,)),
                keras.layers.Dense(4, "tanh"),
                keras.layers.Dense(1),
            ]
        )

    return build


def test_a_second_call_traces_nothing_that_was_traced_and_sees_what_changed():
    calls = []
    model, truth = made(2, counting(calls), regression)

    def both(rows=ROWS, **more):
        options = {"batch_size": 8, "shuffle": False, "verbose": 0, **more}
        expected = truth.fit(X[:rows], SIZE[:rows], **options)
        before = len(calls)
        history = tmg.fit(model, (X[:rows], SIZE[:rows]), **options)
        assert_same(model, truth, history, expected)
        return len(calls) - before

    assert both(validation_split=0.3) > 0
    assert both(9, batch_size=4, epochs=2, validation_split=0.3) == 0
    for one in (model, truth):  # Through the optimizer, and the weights themselves.
        one.optimizer.learning_rate = 0.01
        one.set_weights([2.0 * weight for weight in one.get_weights()])
    assert both() == 0
    for one in (model, truth):
        one.layers[-2].trainable = False
        one.compile(keras.optimizers.SGD(0.05) if one is truth else _in_scope(0.05), "mae")
    assert both() > 0
    frozen = model.get_weights()[0]
    for one in (model, truth):
        one.layers[-2].trainable = True
        one.compile(keras.optimizers.SGD(0.05) if one is truth else _in_scope(0.05), "mae")
    assert both() > 0
    assert (model.get_weights()[0] != frozen).any()
    wide = np.concatenate([X, X], axis=1)  # Another shape of data.
    assert tmg.fit(model, (wide, SIZE), batch_size=8, verbose=0).history["loss"][0] > 0
    model.set_weights(truth.get_weights())
    model.optimizer.iterations.assign(truth.optimizer.iterations)
    assert both() == 0


def _in_scope(rate):
    with strategy_of(2).scope():
        return keras.optimizers.SGD(rate)


def test_models_can_be_freed():
    model, _ = made(2, line, regression)
    tmg.fit(model, (X, SIZE), validation_split=0.5, verbose=0)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_leaves_the_model_as_after_a_step(lines):
    model, truth = lines
    truth.set_weights(model.get_weights())
    before = steps_of(model)

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        tmg.fit(model, with_known_length(), callbacks=[Interrupt()], verbose=0)
    assert steps_of(model) == before + 3
    by_keras(truth, as_dataset(BATCHES[:3]))
    np.testing.assert_allclose(model.get_weights()[0], truth.get_weights()[0], atol=1e-6)
    truth.optimizer.iterations.assign(model.optimizer.iterations)
    fitted(lines, with_known_length)


# What is refused ----------------------------------------------------------------------------------


def test_callbacks_may_come_from_a_generator(lines):
    model, _ = lines
    seen = []
    watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    tmg.fit(model, (X, SIZE), callbacks=(one for one in [watch]), verbose=0)
    assert seen == [0]


def test_arguments_that_do_not_fit(lines):
    model, _ = lines
    arrays = X, SIZE

    def refused(error, text, data=arrays, **options):
        with pytest.raises(error, match=text):
            tmg.fit(model, data, verbose=0, **options)

    endless = as_dataset(BATCHES).repeat()
    refused(tmg.errors.DataError, r"has no end, so a pass.*steps_per_epoch=100, or leave", endless)
    refused(
        tmg.errors.DataError,
        r"has no end.*validation_steps=None.*validation_steps=100",
        validation_data=endless,
    )
    refused(tmg.errors.DataError, "has no batches", (X[:0], SIZE[:0]))
    refused(tmg.errors.DataError, "has no batches", as_dataset(BATCHES).take(0))
    refused(tmg.errors.DataError, "but the data has no labels", X)
    refused(tmg.errors.DataError, "shuffle must be True or False", shuffle="batch")
    refused(
        tmg.errors.DataError,
        "validation_split works only for arrays",
        endless,
        validation_split=0.5,
    )
    refused(tmg.errors.DataError, "37 examples are too few to split", validation_split=0.999)
    refused(ValueError, "between 0 and 1. Received: validation_split=2", validation_split=2)
    refused(ValueError, "between 0 and 1. Received: validation_split='a'", validation_split="a")
    refused(TypeError, r"epochs must be a whole number.*Received: epochs=1\.5", epochs=1.5)
    refused(TypeError, "initial_epoch must be a whole number.*=None", initial_epoch=None)
    refused(TypeError, "must be a whole number.*or 'auto'.*=None", steps_per_call=None)
    refused(tmg.errors.DataError, "class_weight must be a dict", class_weight={"a": 1.0})
    run = tmg.Checkpoints("unused", model, model.optimizer)
    refused(
        TypeError, "A callback must be a keras.*Received: 3 in", callbacks=iter([run.callback(), 3])
    )
    refused(ValueError, "validation_freq must be", validation_data=arrays, validation_freq=0)
    refused(tmg.errors.DataError, "class_weight must be a dict", class_weight=[1.0, 2.0])
    refused(
        tmg.errors.DataError,
        "Class weights and sample weights",
        (*arrays, W),
        class_weight={0: 2.0},
    )
    refused(tmg.errors.DataError, "for one output", ({"x": X}, (SIZE, SIZE)), class_weight={0: 2.0})
    refused(ValueError, "steps_per_call must be a whole number.*or 'auto'", steps_per_call=0)
    refused(ValueError, "steps_per_epoch must be a whole number", steps_per_epoch=-1)
    refused(TypeError, "A callback must be a keras.callbacks.Callback. Received: 3", callbacks=[3])
    sharded = tmg.distribute_dataset(as_dataset(BATCHES), strategy_of(2))
    refused(tmg.errors.DataError, "so shares cannot be applied", sharded, shares=(1, 2))
    with (
        strategy_of(3).scope(),
        pytest.raises(tmg.ScopeError, match=r"scope of another strategy.*fit outside the scope"),
    ):
        tmg.fit(model, arrays)
    with pytest.raises(ValueError, match="verbose must be 0, 1, 2 or 'auto'"):
        tmg.fit(model, arrays, verbose=3)
    with pytest.raises(TypeError, match=r"fit needs a compiled keras\.Model\. Received: Dense"):
        tmg.fit(keras.layers.Dense(1), arrays)
    model = line()
    with pytest.raises(tmg.errors.LossError, match=r"is not compiled.*model\.compile\("):
        tmg.fit(model, arrays)
    with strategy_of(2).scope():
        model = line()
    model.compile("sgd", "mse")
    with pytest.raises(tmg.ScopeError, match="The optimizer was created outside the scope"):
        tmg.fit(model, arrays)


@pytest.mark.parametrize("kind", ["distributed", "generator function"])
def test_sources(lines, kind):
    model, truth = lines
    data = {
        "distributed": lambda: tmg.distribute_dataset(
            with_known_length(), strategy_of(2), shares=(1, 4)
        ),
        "generator function": lambda: lambda: iter(BATCHES),
    }[kind]()
    expected = by_keras(truth, with_known_length(), epochs=2)
    history = tmg.fit(model, data, epochs=2, verbose=0)
    assert_same(model, truth, history, expected)
    assert history.params["steps"] == (None if kind == "generator function" else len(BATCHES))
