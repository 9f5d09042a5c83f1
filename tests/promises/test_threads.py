"""Trainings in threads: each gives what it gives alone, however the threads take turns."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.pair import SEED, assert_replicas_agree, strategy_of

import tfmultigpu as tmg

_random = np.random.default_rng(SEED)
X = _random.normal(size=(14, 4)).astype("float32")
Y = _random.normal(size=(14, 1)).astype("float32")
SIZES = (5, 1, 8)  # Fewer rows than replicas, and numbers that do not divide.
LIMIT = 120  # Seconds until a test of threads that wait for each other fails.


class Turns:
    """Has threads run one at a time, and take turns wherever one of them calls ``meet``."""

    def __init__(self, count: int) -> None:
        self._changed, self._turn = threading.Condition(), 0
        self._living = list(range(count))

    def wait(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._turn == number, LIMIT), "nobody goes on"

    def meet(self, number: int) -> None:
        """Lets the next thread run until it meets, or ends, and all others as well."""
        self._pass(number)
        self.wait(number)

    def end(self, number: int) -> None:
        self._pass(number)
        self._living.remove(number)

    def _pass(self, number: int) -> None:
        later = [other for other in self._living if other > number]
        with self._changed:
            self._turn = later[0] if later else self._living[0]
            self._changed.notify_all()


class Meeting:
    """The place of one thread among those that take turns; alone nobody is met."""

    def __init__(self, turns: Turns | None = None, number: int = 0) -> None:
        self._turns, self._number = turns, number

    def __call__(self) -> None:
        if self._turns is not None:
            self._turns.meet(self._number)


class Meets(keras.layers.Layer):
    """Lets others run in the forward pass of a replica."""

    def __init__(self, meeting: Callable[[], None]) -> None:
        super().__init__()
        self.meeting = meeting

    def call(self, inputs: Any) -> Any:
        self.meeting()
        return inputs


def meeting_optimizer(kind: Any, meeting: Meeting) -> Any:
    """Returns an optimizer that lets others run in the update of each variable."""

    class Meeting(kind):  # type: ignore[misc]
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            meeting()
            super().update_step(gradient, variable, learning_rate)
            meeting()

    return Meeting(0.1)


def model_of(meeting: Callable[[], None], units: int, more: int = 0) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((4,)),
            *[keras.layers.Dense(4, kernel_initializer=ones(number)) for number in range(more)],
            keras.layers.Dense(units, "tanh", kernel_initializer=ones(units)),
            Meets(meeting),
            keras.layers.Dropout(0.3, seed=units),
            keras.layers.Dense(1, kernel_initializer=ones(units)),
        ]
    )


def ones(seed: int) -> keras.Initializer:
    """Returns an initializer whose values do not depend on what other threads draw."""
    return keras.initializers.RandomNormal(seed=seed)


def batches() -> Iterator[tuple[Any, Any]]:
    end = 0
    for size in SIZES:
        begin, end = end, end + size
        yield X[begin:end], Y[begin:end]


def dataset() -> tf.data.Dataset:
    specs = tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1])
    return tf.data.Dataset.from_generator(lambda: batches(), output_signature=specs)


Values = list[np.ndarray[Any, Any]]


def state(strategy: tf.distribute.Strategy, model: Any, optimizer: Any) -> Values:
    assert_replicas_agree(strategy, model.trainable_variables)
    return [np.asarray(v.numpy()) for v in (*model.variables, *optimizer.variables)]


def by_fit(meeting: Meeting) -> Values:
    """Trains by ``fit`` on two replicas, each of which owns variables."""
    strategy = strategy_of(2)
    with strategy.scope():
        model = model_of(meeting, 3)
        model.compile(meeting_optimizer(keras.optimizers.Adam, meeting), "mse")
    history = tmg.fit(model, dataset(), epochs=2, shard_update=True, verify=False, verbose=0)
    return [*state(strategy, model, model.optimizer), np.asarray(history.history["loss"])]


def by_steps(meeting: Meeting) -> Values:
    """Trains by a step on the same two replicas; its update, of more variables, ends later."""
    strategy = strategy_of(2)
    with strategy.scope():
        model = model_of(meeting, 5, more=2)
        optimizer = meeting_optimizer(keras.optimizers.Adam, meeting)
    step = tmg.make_train_step(model, optimizer, "mse", strategy, shard_update=True)
    data = tmg.distribute_dataset(dataset(), strategy)
    logs = [step(batch)["loss"].numpy() for batch in data]
    return [*state(strategy, model, optimizer), np.asarray(logs)]


def by_hand(meeting: Meeting) -> Values:
    """Trains on three replicas of another strategy by a loop of one's own."""
    strategy = strategy_of(3)
    with strategy.scope():
        model = model_of(meeting, 4)
        optimizer = meeting_optimizer(keras.optimizers.Adam, meeting)
        window = tmg.GradientAccumulator(model.trainable_variables)

    def replica(batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            pair = tmg.loss_sum(keras.losses.MeanSquaredError(), y, model(x, training=False))
        meeting()
        window.add(tape.gradient(pair.sum, model.trainable_variables), pair.weight)
        return tf.cast(tmg.rows().total, tf.float32)

    @tf.function
    def train(data: Any) -> Any:
        seen = tf.zeros([])
        for batch in data:
            seen += strategy.experimental_local_results(strategy.run(replica, args=(batch,)))[0]
            gradients, _ = window.reduce()
            tmg.apply_reduced_gradients(optimizer, gradients, model.trainable_variables)
        return seen

    seen = train(tmg.distribute_dataset(dataset(), strategy))
    return [*state(strategy, model, optimizer), seen.numpy()]


def in_turns(trainings: Sequence[Callable[[Meeting], Values]]) -> list[Values]:
    """Runs each in a thread of its own; they take turns wherever one meets the others."""
    turns = Turns(len(trainings))

    def run(number: int) -> Values:
        turns.wait(number)
        try:
            return trainings[number](Meeting(turns, number))
        finally:
            turns.end(number)

    with ThreadPoolExecutor(len(trainings)) as pool:
        return list(pool.map(run, range(len(trainings))))


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# Fails if what a call patches, on a strategy or an optimizer, is seen or undone by another thread.
def test_trainings_in_turns_of_threads_are_those_of_one_after_the_other() -> None:
    trainings = [by_fit, by_steps, by_hand]
    with no_warning():
        alone = [train(Meeting()) for train in trainings]
        together = in_turns(trainings)
    for train, expected, values in zip(trainings, alone, together, strict=True):
        for one, other in zip(expected, values, strict=True):
            np.testing.assert_array_equal(other, one, train.__name__)


# Fails if replicas find the rows of the batch that another thread runs at the same time.
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.more), 3])
def test_replicas_of_each_thread_know_their_own_rows(replicas: int, eager: bool) -> None:
    strategy = strategy_of(replicas)

    def rows_of(size: int) -> Callable[[Meeting], Values]:
        def count(meeting: Meeting) -> Values:
            def replica(x: Any) -> Any:
                meeting()
                here = tmg.rows()
                meeting()
                return tf.stack([here.first, here.count, here.total])

            def run(iterator: Any) -> Any:
                found = strategy.run(replica, args=(next(iterator),))
                return strategy.experimental_local_results(found)

            data = tmg.distribute_dataset(X[:size], strategy, batch_size=size)
            return [one.numpy() for one in (run if eager else tf.function(run))(iter(data))]

        return count

    counts = [rows_of(size) for size in (replicas, 7, 14)]
    for expected, found in zip([one(Meeting()) for one in counts], in_turns(counts), strict=True):
        np.testing.assert_array_equal(found, expected)


# Fails if one thread creates its model by the limits that another one has given.
def test_each_thread_shards_by_its_own_limits() -> None:
    strategy = tmg.create_strategy(devices=["CPU:0", "CPU:1"])

    def build(at_least: int) -> Callable[[Meeting], Values]:
        def create(meeting: Meeting) -> Values:
            with strategy.scope(), tmg.sharded_variables(at_least=at_least):
                meeting()
                model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
                meeting()
            model.compile(meeting_optimizer(keras.optimizers.Adam, meeting), "mse")
            copies = strategy.experimental_local_results(model.layers[0].kernel.value)
            return [np.asarray(len(copies))]

        return create

    (large,), (small,), (middle,) = in_turns([build(4096), build(0), build(128)])
    assert (large, small, middle) == (2, 1, 1)


# Fails if calls of one step overlap: copies of a weight would go apart, or a call see half a trace.
def test_one_step_serves_several_threads() -> None:
    strategy, pool = strategy_of(2), ThreadPoolExecutor(4)
    steps: list[Any] = []
    begun: list[Any] = []
    others = threading.Event()

    def meet() -> None:
        """Has others call the step while it is traced for the first time."""
        if steps and not begun:
            begun.extend(pool.submit(steps[0], (X, Y)) for _ in range(11))
            assert not others.wait(2), "a second call is traced meanwhile"
        elif begun:  # Keras has called the layer before, when it built the model.
            others.set()

    with strategy.scope():
        model, optimizer = model_of(meet, 3), keras.optimizers.Adam(0.1)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    start = state(strategy, model, optimizer)
    steps.append(step)
    step((X, Y))
    for call in begun:
        call.result()
    found = state(strategy, model, optimizer)
    for variable, value in zip((*model.variables, *optimizer.variables), start, strict=True):
        variable.assign(value)
    for _ in range(12):
        step((X, Y))
    for one, other in zip(state(strategy, model, optimizer), found, strict=True):
        np.testing.assert_array_equal(other, one)


# Fails if a second loop mixes its metrics with those of the first, waits for ever, or a prediction
# is not that of one thread; or if the filters of warnings of the process are other ones afterwards.
def test_one_model_is_trained_by_one_thread_at_a_time_and_predicts_for_all() -> None:
    strategy, told = strategy_of(2), []
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    alone = tmg.predict(model, X, verbose=0), tmg.evaluate(model, X, Y, verbose=0)

    def meanwhile() -> Any:
        for function in (tmg.evaluate, tmg.fit):
            with pytest.raises(tmg.TfMultiGpuError, match=r"one model at a time.*thread\.join"):
                function(model, X, Y, verbose=0)
            told.append(function)
        return tmg.predict(model, X, verbose=0)

    class Asks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with ThreadPoolExecutor(2) as pool:
                asked = [pool.submit(meanwhile) for _ in range(2)]
            for one in asked:
                np.testing.assert_array_equal(one.result(), alone[0])
            assert tmg.evaluate(model, X, Y, verbose=0) == alone[1]  # This thread may.

    history = tmg.fit(model, X, Y, batch_size=5, verbose=0, callbacks=[Asks()])
    assert len(told) == 4
    assert model.predict_function is None  # Of Keras; nobody else sees that of a loop.
    np.testing.assert_allclose(history.history["mae"][0], alone[1][1], rtol=1e-6)
    assert tmg.evaluate(model, X, Y, verbose=0) == alone[1]


# Fails if loops in threads leave a filter behind that hides warnings of somebody else.
def test_overlapping_loops_leave_the_filters_of_warnings() -> None:
    strategy = strategy_of(1)

    def evaluate(meeting: Meeting) -> Values:
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")

        class Meets(keras.callbacks.Callback):
            def on_test_begin(self, logs: Any = None) -> None:
                meeting()

        tmg.evaluate(model, dataset(), verbose=0, callbacks=[Meets()])
        return []

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        in_turns([evaluate, evaluate])
        warnings.warn("Your input ran out of data; interrupting training", stacklevel=1)
    assert [str(one.message)[:26] for one in shown] == ["Your input ran out of data"]
