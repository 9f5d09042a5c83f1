"""State that is no variable: put back by the check, saved by checkpoints, or reported."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.model import cut
from law.pair import known, strategy_of

import tfmultigpu as tmg

_random = np.random.default_rng(31)
X = _random.normal(size=(24, 3)).astype("float32")
Y = _random.normal(size=(24, 1)).astype("float32")
# Seven rows on two replicas, one on two, and more.
SIZES = (7, 1, 8, 5, 3)
KEY = tf.constant([0], tf.int64)


class Counts(keras.layers.Layer):
    """Counts rows in a table, as an estimate of a frequency does."""

    def __init__(self, by_call: bool = False, scales: bool = False) -> None:
        super().__init__()
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
        self.by_call, self.scales = by_call, scales

    def call(self, x: Any) -> Any:
        rows = tf.ones([], tf.int64) if self.by_call else tf.shape(x, tf.int64)[0]
        count = self.table.lookup(KEY) + rows
        with tf.control_dependencies([self.table.insert(KEY, count)]):
            # What was counted may decide what is trained: a wrong count is a wrong weight.
            scale = tf.cast(count, tf.float32) if self.scales else 1.0
            return tf.ensure_shape(x * (1.0 + 0.01 * scale), x.shape)

    def count(self) -> int:
        return int(self.table.lookup(KEY)[0])


class Calls(keras.layers.Layer):
    """Calls a function on the rows of a replica."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def call(self, x: Any) -> Any:
        return tf.ensure_shape(self.function(x), x.shape)


def model_with(layer: Callable[[], Any], replicas: int) -> tuple[Any, Any]:
    keras.utils.set_random_seed(2)
    with strategy_of(replicas).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), layer()])
        model.add(keras.layers.Dense(1))
        return model, keras.optimizers.SGD(0.01)


def reasons(caught: list[warnings.WarningMessage]) -> list[str]:
    kind = tmg.ReplicaDependenceWarning
    return [str(one.message) for one in caught if issubclass(one.category, kind)]


# Fails if the check of the first step leaves what it wrote to a table: rows are counted three
# times, in a loop of one's own, in fit, in an evaluation and in a prediction.
@pytest.mark.filterwarnings("error::tfmultigpu.ReplicaDependenceWarning")
def test_a_table_counts_each_row_once() -> None:
    model, optimizer = model_with(Counts, 2)
    layer = model.layers[1]
    step = tmg.make_train_step(model, optimizer, "mse", strategy_of(2), micro_batches=2)
    step((X, Y))
    assert step.verification.outcome == "same"
    assert layer.count() == 24
    model.compile(optimizer, "mse")
    tmg.fit(model, X, Y, batch_size=8, shuffle=False, verbose=0)
    assert layer.count() == 48
    tmg.evaluate(model, tf.data.Dataset.from_tensor_slices((X, Y)).batch(10), verbose=0)
    assert layer.count() == 72
    tmg.make_predict_step(model, strategy_of(2))(X)
    assert layer.count() == 96


# Fails if a table that shares its memory with what is read of it is put back to what came after.
@pytest.mark.filterwarnings("error::tfmultigpu.ReplicaDependenceWarning")
def test_a_table_of_keys_that_may_be_deleted_is_put_back() -> None:
    table = dense_table()
    table.insert(KEY, 5 * KEY + 5)

    def counted(x: Any) -> Any:
        count = table.lookup(KEY) + tf.shape(x, tf.int64)[0]
        with tf.control_dependencies([table.insert(KEY, count)]):
            return tf.identity(x)

    model, _ = model_with(lambda: Calls(counted), 2)
    tmg.make_predict_step(model, strategy_of(2))(X[:7])
    assert int(table.lookup(KEY)[0]) == 12


# Fails if a table that replicas fill otherwise than one device does is not reported.
def test_a_table_that_depends_on_the_cut_is_reported() -> None:
    model, optimizer = model_with(lambda: Counts(by_call=True), 2)
    step = tmg.make_train_step(model, optimizer, "mse", strategy_of(2))
    with pytest.warns(tmg.ReplicaDependenceWarning, match="one device"):
        step((X, Y))
    assert step.verification.outcome == "different"
    assert any("table" in one and "1 on one device" in one for one in step.verification.differences)
    assert model.layers[1].count() == 2


# Fails if the check calls Python that may remember something, or fills a queue, once more than the
# step does; if it does not say why nothing was verified; or if what remembers nothing is left out.
def test_what_cannot_be_put_back_is_not_run_twice() -> None:
    calls: list[int] = []
    queue = tf.queue.FIFOQueue(100, [tf.float32], [()])

    def remembering(x: Any) -> Any:
        calls.append(len(x))
        return x

    def queued(x: Any) -> Any:
        with tf.control_dependencies([queue.enqueue(1.0)]):
            return tf.identity(x)

    def pure(x: Any) -> Any:
        return tf.numpy_function(lambda x: 2 * x, [x], tf.float32, stateful=False)

    looped = tf.function(lambda x: tf.cond(tf.size(x) > 0, lambda: counted(x), lambda: x))

    def counted(x: Any) -> Any:
        return tf.py_function(remembering, [x], tf.float32)

    for function, outcome in ((looped, "not verified"), (queued, "not verified"), (pure, "same")):
        model, _ = model_with(functools.partial(Calls, function), 2)
        step = tmg.make_eval_step(model, "mse", strategy_of(2))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step((X[:7], Y[:7]))
        assert step.verification.outcome == outcome
        named = [model.layers[1].name in reason for reason in reasons(caught)]
        assert named == ([] if outcome == "same" else [True])
    assert sorted(calls) == [3, 4]
    assert int(queue.size()) == 2


# Fails if tables that are only read, of Keras' preprocessing, are taken for state.
@pytest.mark.filterwarnings("error::tfmultigpu.ReplicaDependenceWarning")
def test_tables_that_are_only_read_are_verified_and_saved(tmp_path: Path) -> None:
    lookup = keras.layers.StringLookup(vocabulary=["a", "b"])
    with strategy_of(2).scope():
        text = keras.Input((), dtype="string")
        outputs = keras.layers.Dense(1)(keras.layers.Embedding(3, 2)(lookup(text)))
        model, optimizer = keras.Model(text, outputs), keras.optimizers.SGD()
    step = tmg.make_train_step(model, optimizer, "mse", strategy_of(2))
    step((np.array(["a", "b", "c"] * 2), Y[:6]))
    assert step.verification.outcome == "same"
    assert tmg.Checkpoints(tmp_path, train_step=step).save().exists()


class Killed(Exception):
    """The program ends here."""


def dense_table() -> Any:
    return tf.lookup.experimental.DenseHashTable(
        tf.int64, tf.int64, 0, empty_key=-1, deleted_key=-2, initial_num_buckets=16
    )


def trained(directory: Path, kill: int | None = None) -> tuple[int, list[Any]]:
    """Trains two epochs with tables in a layer and in a forward; saves every third step."""
    other = dense_table()
    model, optimizer = model_with(lambda: Counts(scales=True), 2)

    def forward(model: Any, batch: Any, training: bool) -> tmg.LossSum:
        x, y = batch
        seen = other.lookup(KEY) + tf.shape(x, tf.int64)[0]
        with tf.control_dependencies([other.insert(KEY, seen)]):
            return tmg.loss_sum(keras.losses.MeanSquaredError(), y, model(x, training=training))

    strategy = strategy_of(2)
    step = tmg.make_train_step(model, optimizer, None, strategy, forward=forward, verify=False)
    data = known(cut((X, Y), SIZES))
    run = tmg.Checkpoints(directory, train_step=step, data=data, extra={"seen": other})
    run.restore()
    try:
        for _ in run.epochs(2):
            for batch in run.data:
                if run.step == kill:
                    raise Killed
                step(batch)
                run.after_step()
                if run.step % 3 == 0:
                    run.save()
    except Killed:
        return trained(directory)
    counts = model.layers[1].count()
    assert int(other.lookup(KEY)[0]) == counts
    return counts, model.get_weights()


# Fails if a resumed run begins with an empty table, in a layer or among the extra objects.
def test_a_run_with_tables_resumes_as_if_never_interrupted(tmp_path: Path) -> None:
    count, weights = trained(tmp_path / "whole")
    assert count > 2 * 24  # One row on two replicas is computed by both.
    resumed, again = trained(tmp_path / "killed", kill=7)
    assert resumed == count
    for one, other in zip(again, weights, strict=True):
        np.testing.assert_array_equal(one, other)


# Fails if a checkpoint is written that lacks a table, Python code or a place in a queue which the
# training changes, in a loop of one's own or in fit; or if tf.random is not warned of.
def test_state_that_no_checkpoint_holds_is_refused(tmp_path: Path) -> None:
    table = dense_table()

    def foreign(x: Any) -> Any:
        with tf.control_dependencies([table.insert(KEY, KEY)]):
            return tf.identity(x)

    def python(x: Any) -> Any:
        return tf.py_function(lambda x: x, [x], tf.float32)

    for function, word in ((foreign, "extra="), (python, "stateful=False")):
        model, optimizer = model_with(functools.partial(Calls, function), 2)
        step = tmg.make_train_step(model, optimizer, "mse", strategy_of(2), verify=False)
        step((X, Y))
        run = tmg.Checkpoints(tmp_path, train_step=step)
        with pytest.raises(tmg.errors.CheckpointError, match=model.layers[1].name) as refused:
            run.save()
        assert word in str(refused.value)
    assert tmg.Checkpoints(tmp_path, train_step=step, extra={"table": table})

    model, optimizer = model_with(lambda: Calls(foreign), 2)
    model.compile(optimizer, "mse")
    run = tmg.Checkpoints(tmp_path / "fit", model, optimizer)
    with pytest.raises(tmg.errors.CheckpointError, match="table"):
        tmg.fit(model, X, Y, batch_size=8, verify=False, verbose=0, callbacks=[run.callback()])

    model, optimizer = model_with(lambda: Calls(lambda x: x + tf.random.normal([])), 2)
    step = tmg.make_train_step(model, optimizer, "mse", strategy_of(2), verify=False)
    step((X, Y))
    with pytest.warns(UserWarning, match=r"tf\.random"):
        tmg.Checkpoints(tmp_path / "draws", train_step=step).save()


class SumOfLabels(keras.metrics.Metric):
    """Keeps what it adds in a variable of TensorFlow, which Keras does not add over replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.total = tf.Variable(0.0, trainable=False, name="sum_of_labels")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.reduce_sum(tf.abs(y_true)))

    def result(self) -> Any:
        return tf.convert_to_tensor(self.total)


# Fails if a variable that Keras does not know may depend on the cut without a word.
def test_a_variable_of_tensorflow_that_depends_on_the_cut_is_reported() -> None:
    model, _ = model_with(tanh, 3)
    with strategy_of(3).scope():
        metric = SumOfLabels()
    step = tmg.make_eval_step(model, "mse", strategy_of(3), metrics=[metric])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step((X, Y))
    told = reasons(caught)
    assert len(told) == 1
    assert "the tf.Variable 'sum_of_labels" in told[0]
    assert "add_variable of a metric" in told[0]


def tanh() -> Any:
    return keras.layers.Activation("tanh")


# Fails if a checkpoint leaves out, without a word, a variable that a compiled loss counts in.
@pytest.mark.parametrize("kind", [keras.Variable, tf.Variable])
def test_a_variable_of_a_loss_is_held_or_refused(tmp_path: Path, kind: Any) -> None:
    model, optimizer = model_with(tanh, 2)
    with strategy_of(2).scope():
        count = kind(0.0, trainable=False)

        def loss(y_true: Any, y_pred: Any) -> Any:
            count.assign(count + 1.0)
            return tf.reduce_mean((y_true - y_pred) ** 2, -1) * (1.0 + count)

        model.compile(optimizer, loss)
    for extra in ({}, {"count": [count]}):
        data = tmg.distribute_dataset((X, Y), strategy_of(2), batch_size=8)
        folder = tmp_path / str(len(extra))
        checkpoints = tmg.Checkpoints(folder, model, optimizer, data, extra=extra)
        callbacks = [checkpoints.callback(every_steps=2)]
        train = functools.partial(
            tmg.fit, model, checkpoints.data, callbacks=callbacks, verbose=0, verify=False
        )
        if extra:
            train()
        else:
            with pytest.raises(tmg.errors.CheckpointError, match="a variable in"):
                train()
