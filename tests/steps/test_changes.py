"""What may change between two calls of a step: layers and settings.

Kinds of batches: tests/parity/test_features.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import ByHand, Replicated, cut, difference
from problems import network, networks, normal_rows

import tfmultigpu as tmg

L, optimizers = keras.layers, keras.optimizers
schedules = keras.optimizers.schedules
X, Y = normal_rows(16, 4, 2, seed=8)
BATCHES = cut((X, Y), (5, 1, 3, 7))


small = networks(4, lambda: L.Dense(3, "tanh"), lambda: L.Dense(2))
sgd = functools.partial(optimizers.SGD, 0.1)


def counting(traces: list[Any]) -> Callable[..., Any]:
    """A loss that notes for each replica that it is traced."""

    def loss(y_true: Any, y_pred: Any) -> Any:
        traces.append(y_pred)
        return tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)

    return loss


# Layers -------------------------------------------------------------------------------------------


# Fails if a frozen layer moves, a thawed one stays, frozen statistics go on, or a
# set of frozen layers is traced a second time.
def test_layers_are_frozen_and_thawed_and_each_set_is_traced_once() -> None:
    traces: list[Any] = []

    def build() -> keras.Model:
        norm = L.BatchNormalization(scale=False, center=False, synchronized=True)
        return network(4, norm, L.Dense(3), L.Dense(2))

    run = Replicated(3, build, sgd, counting(traces), verify=False)
    norm, dense, _ = run.model.layers
    for frozen in (False, True, False, True):
        dense.trainable = norm.trainable = not frozen  # The norm has no weight, but statistics.
        before = dense.kernel.numpy(), norm.moving_mean.numpy()
        run.step(BATCHES[3])
        assert np.array_equal(dense.kernel.numpy(), before[0]) == frozen
        assert np.array_equal(norm.moving_mean.numpy(), before[1]) == frozen
    assert len(traces) == 2 * 3
    kernel = dense.kernel.numpy()
    data = tmg.distribute_dataset((X, Y), run.strategy, batch_size=7)
    assert int(run.step.run(iter(data), 10)["steps"]) == 3
    np.testing.assert_array_equal(dense.kernel.numpy(), kernel)


def test_a_layer_thawed_after_the_optimizer_was_built_is_named() -> None:
    late = lambda: L.Dense(2, name="late", trainable=False)  # noqa: E731
    build = networks(4, late, lambda: L.Dense(2))
    run = Replicated(2, build, sgd, "mse")
    run.step(BATCHES[0])
    run.model.layers[0].trainable = True
    with pytest.raises(tmg.ScopeError, match=r"built for other variables.*late/kernel"):
        run.step(BATCHES[0])


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


def train(run: Any, step: Callable[[Any], Any], change: Callable[[Any], None]) -> list[np.ndarray]:
    """Two steps, the change, two more; all that model and optimizer hold then."""
    for i, batch in enumerate(BATCHES):
        if i == 2:
            change(run.optimizer)
        step(batch)
    return [variable.numpy() for variable in run.variables()]


# Fails if a step goes on with a setting that its trace has taken in. Minus is with owners.
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_acts_from_the_next_step_on(name: str) -> None:
    replicas, make, change = CHANGES[name]

    def on_one_device(change: Callable[[Any], None]) -> list[np.ndarray]:
        """Eagerly, so that Keras asks for its settings in each step."""
        device = ByHand(small, make, keras.losses.MeanSquaredError())
        device.optimizer.build(device.model.trainable_variables)
        return train(device, device.step, change)

    expected = on_one_device(change)
    unchanged = on_one_device(lambda _: None)
    assert difference(unchanged[:4], expected[:4]) > 1e-4
    run = Replicated(abs(replicas), small, make, "mse", shard_update=replicas < 0, verify=False)
    assert difference(train(run, run.step, change), expected) <= 2e-6
    run.assert_replicas_agree()


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
    run = Replicated(abs(replicas), small, sgd, "mse", shard_update=replicas < 0)
    assert float(run.step(BATCHES[0])["loss_scale"]) == 1.0
    before = [v.numpy() for v in run.variables()]
    as_it_was = {name: getattr(run.optimizer, name) for name in setting}
    set_to(**setting)(run.optimizer)
    for _ in range(2):
        with pytest.raises((tmg.TfMultiGpuError, AttributeError, IndexError), match=text):
            run.step(BATCHES[2])
    assert difference(before, [v.numpy() for v in run.variables()]) == 0.0
    set_to(**as_it_was, loss_scale_factor=8.0)(run.optimizer)
    assert float(run.step(BATCHES[2])["loss_scale"]) == 8.0
    assert int(run.optimizer.iterations.numpy()) == 2


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
    run = Replicated(2, small, lambda: Counts(0.1), counting(traces), verify=False)
    other = tmg.make_train_step(run.model, run.optimizer, "mse", run.strategy, verify=False)

    def both() -> None:
        run.step(BATCHES[0])
        other(BATCHES[0])
        run.step.run(iter(tmg.distribute_dataset((X, Y), run.strategy, batch_size=4)), 2)

    for _ in range(2):
        both()
    once = len(traces)
    for rate in (0.5, 0.25):
        run.optimizer.learning_rate = rate
        run.optimizer.iterations.assign(3)
        run.optimizer.clipnorm = None
        run.optimizer.momentum = float("0.0")
        both()
    assert len(traces) == once
    run.optimizer.clipnorm = 1.0
    run.step(BATCHES[0])
    assert len(traces) > once
