"""What may change between two calls of a step: layers, settings and kinds of batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases.case import Case, on_one_device
from law.model import Training
from law.pair import assert_replicas_agree
from law.plain import train_once
from one_device import SEED, cut, difference, step_on
from problems import network, networks, normal_rows

import tfmultigpu as tmg

L, optimizers = keras.layers, keras.optimizers
schedules = keras.optimizers.schedules
X, Y = normal_rows(16, 4, 2, seed=8)
BATCHES = cut((X, Y), (5, 1, 3, 7))
SQUARES = keras.losses.MeanSquaredError()


small = networks(4, lambda: L.Dense(3, "tanh"), lambda: L.Dense(2))
sgd = functools.partial(optimizers.SGD, 0.1)


def counting(traces: list[Any]) -> Callable[..., Any]:
    """A loss that notes for each replica that it is traced."""

    def loss(y_true: Any, y_pred: Any) -> Any:
        traces.append(y_pred)
        return tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)

    return loss


# Batches ------------------------------------------------------------------------------------------


# Fails if a batch with sample weights, or of other types, is taken for one that was traced before.
def test_each_kind_of_batch_has_a_trace_of_its_own() -> None:
    step = step_on(2, small, sgd, "mse")
    expected = on_one_device(Case("", lambda: Training(small(), sgd(), SQUARES), 2 * BATCHES)).end
    for x, y in BATCHES:
        step((x, y, np.ones(len(x), "float32")) if len(x) == 1 else (x, y))
    for x, y in BATCHES:
        step((x.astype("float64"), y.astype("float64")))
    assert difference(step.model.get_weights(), [*expected.values()][:4]) <= 1e-6


# Layers -------------------------------------------------------------------------------------------


# Fails if a frozen layer moves, a thawed one stays, frozen statistics go on, or a
# set of frozen layers is traced a second time.
def test_layers_are_frozen_and_thawed_and_each_set_is_traced_once() -> None:
    traces: list[Any] = []

    def build() -> keras.Model:
        norm = L.BatchNormalization(scale=False, center=False, synchronized=True)
        return network(4, norm, L.Dense(3), L.Dense(2))

    step = step_on(3, build, sgd, counting(traces), verify=False)
    norm, dense, _ = step.model.layers
    for frozen in (False, True, False, True):
        dense.trainable = norm.trainable = not frozen  # The norm has no weight, but statistics.
        before = dense.kernel.numpy(), norm.moving_mean.numpy()
        step(BATCHES[3])
        assert np.array_equal(dense.kernel.numpy(), before[0]) == frozen
        assert np.array_equal(norm.moving_mean.numpy(), before[1]) == frozen
    assert len(traces) == 2 * 3
    kernel = dense.kernel.numpy()
    data = tmg.distribute_dataset((X, Y), step.strategy, batch_size=7)
    assert int(step.run(iter(data), 10)["steps"]) == 3
    np.testing.assert_array_equal(dense.kernel.numpy(), kernel)


def test_a_layer_thawed_after_the_optimizer_was_built_is_named() -> None:
    late = lambda: L.Dense(2, name="late", trainable=False)  # noqa: E731
    build = networks(4, late, lambda: L.Dense(2))
    step = step_on(2, build, sgd, "mse")
    step(BATCHES[0])
    step.model.layers[0].trainable = True
    with pytest.raises(tmg.ScopeError, match=r"built for other variables.*late/kernel"):
        step(BATCHES[0])


# Settings of the optimizer ------------------------------------------------------------------------


def set_to(**values: Any) -> Callable[[Any], None]:
    def change(optimizer: Any) -> None:
        for name, value in values.items():
            setattr(optimizer, name, value)

    return change


def scaled_and_clipped(optimizer: Any) -> None:
    optimizer.dynamic_growth_steps = 3
    optimizer.inner_optimizer.clipnorm = 0.01


CHANGES: dict[str, tuple[int, Callable[[], Any], Callable[[Any], None]]] = {
    "number to schedule": (1, sgd, set_to(learning_rate=schedules.ExponentialDecay(0.5, 1, 0.7))),
    "what is not decayed": (
        -2, lambda: optimizers.AdamW(0.1, weight_decay=0.5),
        lambda o: o.exclude_from_weight_decay(var_names=["kernel"]),
    ),
    "averages": (
        -2, lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
        set_to(ema_momentum=0.9, ema_overwrite_frequency=1),
    ),
    "of loss scaling and inside it": (
        2, lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1)), scaled_and_clipped,
    ),
}  # fmt: skip


def variables_of(model: Any, optimizer: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in (*model.variables, *optimizer.variables)]


def train(step: Callable[[Any], Any], optimizer: Any, change: Callable[[Any], None]) -> None:
    """Two steps, the change, two more."""
    for i, batch in enumerate(BATCHES):
        if i == 2:
            change(optimizer)
        step(batch)


# Fails if a step goes on with a setting that its trace has taken in. Minus is with owners.
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_acts_from_the_next_step_on(name: str) -> None:
    replicas, make, change = CHANGES[name]

    def on_one_device(change: Callable[[Any], None]) -> list[np.ndarray]:
        """Eagerly, so that Keras asks for its settings in each step."""
        keras.utils.set_random_seed(SEED)
        alone = Training(small(), make(), SQUARES)
        alone.optimizer.build(alone.model.trainable_variables)
        train(functools.partial(train_once, alone), alone.optimizer, change)
        return alone.values()

    expected = on_one_device(change)
    unchanged = on_one_device(lambda _: None)
    assert difference(unchanged[:4], expected[:4]) > 1e-4
    step = step_on(abs(replicas), small, make, "mse", shard_update=replicas < 0, verify=False)
    train(step, step.optimizer, change)
    assert difference(variables_of(step.model, step.optimizer), expected) <= 2e-6
    trained = [*step.model.trainable_variables, *step.optimizer.variables]
    assert_replicas_agree(step.strategy, trained)


# Fails if a setting that cannot act is silent, changes something, or is told once only; or if the
# factor of a loss scale does not act at once.
@pytest.mark.parametrize(
    ("replicas", "setting", "text"),
    [
        # Keras creates state when it builds, and says no more than that there is none.
        (1, {"use_ema": True}, "moving_average"),
        (-2, {"momentum": 0.9}, "momentums|index out of range"),
        (2, {"gradient_accumulation_steps": 2}, "steps=2.*micro_batches=2"),
    ],
)
def test_what_cannot_act_is_an_error_at_each_step(
    replicas: int, setting: dict[str, Any], text: str
) -> None:
    step = step_on(abs(replicas), small, sgd, "mse", shard_update=replicas < 0)
    assert float(step(BATCHES[0])["loss_scale"]) == 1.0
    before = variables_of(step.model, step.optimizer)
    as_it_was = {name: getattr(step.optimizer, name) for name in setting}
    set_to(**setting)(step.optimizer)
    for _ in range(2):
        with pytest.raises((tmg.TfMultiGpuError, AttributeError, IndexError), match=text):
            step(BATCHES[2])
    assert difference(before, variables_of(step.model, step.optimizer)) == 0.0
    set_to(**as_it_was, loss_scale_factor=8.0)(step.optimizer)
    assert float(step(BATCHES[2])["loss_scale"]) == 8.0
    assert int(step.optimizer.iterations.numpy()) == 2


class Counts(optimizers.SGD):
    """Counts its traces, as an optimizer of one's own may, and numbers its calls."""

    calls = 0

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.calls += 1
        super().update_step(gradient, variable, learning_rate)


# Fails if a number for the learning rate, a counter, an equal setting, what a trace itself counts,
# or another step of the same optimizer makes a trace anew.
def test_nothing_is_traced_again_for_what_no_trace_holds() -> None:
    traces: list[Any] = []
    step = step_on(2, small, lambda: Counts(0.1), counting(traces), verify=False)
    other = tmg.make_train_step(step.model, step.optimizer, "mse", step.strategy, verify=False)

    def both() -> None:
        step(BATCHES[0])
        other(BATCHES[0])
        step.run(iter(tmg.distribute_dataset((X, Y), step.strategy, batch_size=4)), 2)

    for _ in range(2):
        both()
    once = len(traces)
    for rate in (0.5, 0.25):
        step.optimizer.learning_rate = rate
        step.optimizer.iterations.assign(3)
        step.optimizer.clipnorm = None
        step.optimizer.momentum = float("0.0")
        both()
    assert len(traces) == once
    step.optimizer.clipnorm = 1.0
    step(BATCHES[0])
    assert len(traces) > once
