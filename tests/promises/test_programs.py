"""A compiled step is used while all that it holds is as it was, and for where it was made."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmultigpu as tmg

L, schedules = keras.layers, keras.optimizers.schedules
X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")


@pytest.fixture
def one_device() -> Iterator[None]:
    """Enters the strategy of one device: other files of this process keep theirs."""
    with tmg.create_strategy(prefer="one_device").scope():
        yield


def model_of(*layers: Any) -> Any:
    return keras.Sequential([keras.Input((3,)), *layers])


class Times(schedules.LearningRateSchedule):
    """A schedule in a schedule, times the items of a list."""

    def __init__(self) -> None:
        self.inner, self.factors = schedules.ExponentialDecay(0.1, 1, 1.0), [1.0]

    def __call__(self, step: Any) -> Any:
        return self.inner(step) * self.factors[0]


def halve_item(schedule: Times) -> None:
    schedule.factors[0] = 0.5


def halve_inner(schedule: Times) -> None:
    schedule.inner.initial_learning_rate = 0.05


# Fails if predictions or an evaluation go on with the variables, or the layers, that were traced.
@pytest.mark.usefixtures("one_device")
def test_each_step_computes_with_the_model_as_it_is() -> None:
    dense, other = L.Dense(3), L.Dense(3)
    other.build((None, 3))

    def beside(model: Any, batch: Any, training: bool) -> Any:
        return tmg.loss_sum(keras.losses.MeanSquaredError(), batch[1], other(model(batch[0])))

    model = model_of(dense)
    predict, evaluate = tmg.make_predict_step(model), tmg.make_eval_step(model, "mse")
    by_forward = tmg.make_eval_step(model, None, forward=beside)
    seen = []
    for change in (None, dense, other):
        if change is not None:
            change.enable_lora(1)
            change.lora_kernel_a.assign(np.ones((3, 1)))
            change.lora_kernel_b.assign(np.ones((1, 3)))
        np.testing.assert_allclose(predict(X), model(X), rtol=1e-5)
        losses = [evaluate((X, X))["loss"], by_forward((X, X))["loss"]]
        expected = [np.mean((outputs - X) ** 2) for outputs in (model(X), other(model(X)))]
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        seen.append(expected[1])
    assert len(set(map(float, seen))) == 3


# Fails if a step goes on with a number of a schedule in a schedule, or an item of a list in it.
@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("change", [halve_item, halve_inner])
def test_a_setting_at_any_depth_acts_from_the_next_step_on(change: Callable[[Any], None]) -> None:
    kernels = []
    for changes in (lambda _: None, change):
        schedule, dense = Times(), L.Dense(3, kernel_initializer="zeros")
        model = model_of(dense)
        step = tmg.make_train_step(model, keras.optimizers.SGD(schedule), "mse", verify=False)
        step((X, X))
        before = dense.kernel.numpy()
        changes(schedule)
        step((X, X))
        kernels.append(dense.kernel.numpy() - before)
    np.testing.assert_allclose(kernels[1], 0.5 * kernels[0], rtol=1e-5)


# Fails if a dataset with other shares is computed with the offsets of the one before.
def test_a_run_has_the_offsets_of_its_own_dataset() -> None:
    strategy = tmg.create_strategy(devices=2)
    rows = np.arange(16, dtype="float32")[:, None]
    batches = tf.data.Dataset.from_tensor_slices((rows, rows)).batch(8, drop_remainder=True)

    def forward(model: Any, batch: Any, training: bool) -> Any:
        values = 0 * model(batch[0])[:, 0] + tf.cast(tmg.rows().first, "float32") ** 2
        return tmg.LossSum(tf.reduce_sum(values), tf.size(values))

    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), L.Dense(1)])
    step = tmg.make_eval_step(model, None, strategy, forward=forward, verify=False)
    for shares, loss in (((3, 1), 6**2 * 2 / 8), ((1, 3), 2**2 * 6 / 8)):
        data = tmg.distribute_dataset(batches, strategy, shares=shares, prefetch_to_device=True)
        assert float(step.run(iter(data), 1)["loss"]) == loss


# Fails if a step that was used in a tf.function, or before one, hangs, or loses an error, there or
# outside.
def test_a_batch_that_fails_leaves_nothing_behind_inside_and_outside() -> None:
    strategy = tmg.create_strategy(devices=2)
    with strategy.scope():
        model = model_of(L.Dense(3))
        optimizer = keras.optimizers.SGD(0.01)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    features = [tmg.steps.OneTrace()]
    step = tmg.make_train_step(model, optimizer, loss, strategy, features=features, verify=False)

    def iterator(label: int) -> Any:
        labels = np.full((8,), label)
        return iter(tmg.distribute_dataset((X, labels), strategy, batch_size=8))

    def outside(label: int) -> Any:
        return step.run(iterator(label), 1)["loss"]

    inside = tf.function(lambda batches: step.run(batches, 1)["loss"])
    ended: list[str] = []

    def calls() -> None:
        for call, label in ((outside, 1), (inside, 1), (inside, 9), (inside, 9), (outside, 1),
                            (outside, 9), (inside, 1)):  # fmt: skip
            try:
                call(iterator(label) if call is inside else label)
                ended.append("loss")
            except Exception as error:
                ended.append(type(error).__name__)

    thread = threading.Thread(target=calls, daemon=True)
    thread.start()
    thread.join(90)
    wrong = "InvalidArgumentError"
    assert ended == ["loss", "loss", wrong, wrong, "loss", wrong, "loss"]


class Watches(tmg.steps.Feature):
    def around_call(self, call: Any) -> Any:
        return lambda batch: call(batch)


# Fails if a watched chain goes on with what one of its steps was traced for by itself.
@pytest.mark.usefixtures("one_device")
def test_a_chain_trains_what_is_trained_now() -> None:
    first = L.Dense(3)
    model, optimizer = model_of(first, L.Dense(3)), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    step = tmg.make_train_step(model, optimizer, "mse", features=[Watches()], verify=False)
    chain = tmg.chain_steps(step)
    chain((X, X))
    first.trainable = False
    step((X, X))
    first.trainable = True
    before = first.kernel.numpy()
    chain((X, X))
    assert np.abs(first.kernel.numpy() - before).max() > 1e-3


# Fails if a program of which one part was never seen is not compared, after a change of a setting.
def test_what_changed_is_compared_after_a_change_of_a_setting() -> None:
    strategy = tmg.create_strategy(devices=2)
    with strategy.scope():
        dense, norm = L.Dense(3), L.BatchNormalization()
        model = model_of(dense, norm, L.Dense(3))
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)
    norm.trainable = False
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    step((X, X))
    dense.trainable = False
    step((X, X))
    optimizer.clipnorm = 1.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step((X, X))
        norm.trainable = True
        step((X, X))
    kind = tmg.ReplicaDependenceWarning
    assert sum(issubclass(each.category, kind) for each in caught) == 1
