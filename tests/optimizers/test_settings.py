"""Settings of an optimizer that are changed between steps: they act from the next one on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import ByHand, Replicated, cut, difference

import tfmultigpu as tmg
from tfmultigpu.accumulation.settings import Settings

optimizers = keras.optimizers
schedules = keras.optimizers.schedules
_random = np.random.default_rng(8)
X = _random.normal(size=(16, 4)).astype("float32")
Y = _random.normal(size=(16, 2)).astype("float32")
BATCHES = cut((X, Y), (5, 1, 3, 7))
LOSS = keras.losses.MeanSquaredError()


def small() -> keras.Model:
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)]
    )


def set_to(**values: Any) -> Callable[[Any], None]:
    def change(optimizer: Any) -> None:
        for name, value in values.items():
            setattr(optimizer, name, value)

    return change


def train(run: Any, step: Callable[[Any], Any], change: Callable[[Any], None]) -> list[np.ndarray]:
    """Two steps, the change, two more; all that model and optimizer hold then."""
    for i, batch in enumerate(BATCHES):
        if i == 2:
            change(run.optimizer)
        step(batch)
    return [variable.numpy() for variable in [*run.model.variables, *run.optimizer.variables]]


def on_one_device(make: Callable[[], Any], change: Callable[[Any], None]) -> list[np.ndarray]:
    """Eagerly, so that Keras asks for its settings in each step."""
    device = ByHand(small, make, LOSS)
    device.model(X)
    device.optimizer.build(device.model.trainable_variables)
    return train(device, device._step, change)


def decay() -> Any:
    return optimizers.SGD(schedules.ExponentialDecay(0.5, 1, 0.7))


# Others are seen as these are: test_what_counts_as_changed.
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "number to schedule": (
        lambda: optimizers.SGD(0.1),
        lambda o: setattr(o, "learning_rate", schedules.ExponentialDecay(0.5, 1, 0.7)),
    ),
    "a number of a schedule": (
        decay,
        lambda o: setattr(vars(o)["_learning_rate"], "initial_learning_rate", 0.05),
    ),
    "what is not decayed": (
        lambda: optimizers.AdamW(0.1, weight_decay=0.5),
        lambda o: o.exclude_from_weight_decay(var_names=["kernel"]),
    ),
    "global_clipnorm": (
        lambda: optimizers.SGD(0.1, momentum=0.9),
        set_to(global_clipnorm=0.01),
    ),
    "iterations": (decay, lambda o: o.iterations.assign(7)),
    "averages": (
        lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
        set_to(ema_momentum=0.9, ema_overwrite_frequency=1),
    ),
}


@pytest.mark.parametrize(
    ("name", "replicas", "shard"),
    [(name, (1, 2, 2)[i % 3], i % 3 == 2) for i, name in enumerate(CHANGES)],
)
def test_a_change_acts_from_the_next_step_on(name: str, replicas: int, shard: bool) -> None:
    make, change = CHANGES[name]
    expected = on_one_device(make, change)
    assert difference(on_one_device(make, lambda _: None)[:4], expected[:4]) > 1e-4
    run = Replicated(replicas, small, make, "mse", shard_update=shard)
    assert difference(train(run, run.step, change), expected) <= 2e-6
    run.assert_replicas_agree()


def test_settings_of_an_optimizer_inside_another() -> None:
    def make() -> Any:
        return optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD(0.1)))

    def change(optimizer: Any) -> None:
        optimizer.optimizers[0].clipnorm = 0.01

    run = Replicated(2, small, make, "mse")
    assert difference(train(run, run.step, change), on_one_device(make, change)) <= 2e-6


def test_settings_of_loss_scaling() -> None:
    def make() -> Any:
        return optimizers.LossScaleOptimizer(optimizers.SGD(0.1))

    def change(optimizer: Any) -> None:
        optimizer.dynamic_growth_steps = 3
        optimizer.inner_optimizer.clipnorm = 0.01

    run = Replicated(2, small, make, "mse")
    assert difference(train(run, run.step, change), on_one_device(make, change)) <= 2e-6
    assert float(run.optimizer.dynamic_scale.numpy()) == 2.0**16

    plain = Replicated(2, small, lambda: optimizers.SGD(0.1), "mse")
    assert float(plain.step(BATCHES[0])["loss_scale"]) == 1.0
    plain.optimizer.loss_scale_factor = 8.0
    assert float(plain.step(BATCHES[0])["loss_scale"]) == 8.0


@pytest.mark.parametrize(
    ("replicas", "shard", "kind", "setting", "text"),
    [
        (1, False, "SGD", {"use_ema": True}, r"SGD cannot.*use_ema.*SGD\(\.\.\.\)"),
        (2, True, "SGD", {"momentum": 0.9}, r"momentum.*turned on later"),
        (2, False, "SGD", {"gradient_accumulation_steps": 2}, "steps=2.*micro_batches=2"),
    ],
)
def test_what_cannot_act_is_an_error_at_each_step(
    replicas: int, shard: bool, kind: str, setting: dict[str, Any], text: str
) -> None:
    def make() -> Any:
        return getattr(optimizers, kind)(0.1)

    run = Replicated(replicas, small, make, "mse", shard_update=shard)
    run.step(BATCHES[0])
    before = [v.numpy() for v in [*run.model.variables, *run.optimizer.variables]]
    as_it_was = {name: getattr(run.optimizer, name) for name in setting}
    set_to(**setting)(run.optimizer)
    for _ in range(2):
        with pytest.raises(tmg.TfMultiGpuError, match=text):
            run.step(BATCHES[2])
    after = [v.numpy() for v in [*run.model.variables, *run.optimizer.variables]]
    assert difference(before, after) == 0.0
    set_to(**as_it_was)(run.optimizer)
    run.step(BATCHES[2])
    assert int(run.optimizer.iterations.numpy()) == 2


def counting(traces: list[Any]) -> Callable[..., Any]:
    def loss(y_true: Any, y_pred: Any) -> Any:
        traces.append(y_pred)
        return tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)

    return loss


class Counts(optimizers.SGD):
    """Counts its traces, as an optimizer of one's own may, and numbers its calls."""

    calls = 0

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.calls += 1
        super().update_step(gradient, variable, learning_rate)


def test_nothing_is_traced_again_for_what_no_trace_holds() -> None:
    """Numbers for the learning rate, counters, equal settings, what a trace itself counts."""
    traces: list[Any] = []
    run = Replicated(2, small, lambda: Counts(0.1), counting(traces))
    run.step(BATCHES[0])
    run.step.run(iter(tmg.distribute_dataset((X, Y), run.strategy, batch_size=4)), 2)
    once = len(traces)
    for rate in (0.5, 0.25):
        run.optimizer.learning_rate = rate
        run.optimizer.iterations.assign(3)
        run.optimizer.clipnorm = None
        run.optimizer.momentum = float("0.0")
        run.step(BATCHES[0])
        run.step.run(iter(tmg.distribute_dataset((X, Y), run.strategy, batch_size=4)), 2)
    assert len(traces) == once
    run.optimizer.clipnorm = 1.0
    run.step(BATCHES[0])
    assert len(traces) > once


def test_two_steps_of_one_optimizer_do_not_trace_by_turns() -> None:
    traces: list[Any] = []
    one = Replicated(2, small, lambda: Counts(0.1), counting(traces))
    other = tmg.make_train_step(one.model, one.optimizer, counting(traces), one.strategy)
    for _ in range(2):
        one.step(BATCHES[0])
        other(BATCHES[0])
    once = len(traces)
    for _ in range(2):
        one.step(BATCHES[0])
        other(BATCHES[0])
    assert len(traces) == once


def test_fit_follows_settings_and_another_optimizer() -> None:
    """Keras, too, begins anew with what it is compiled with."""

    def fitted(fit: Callable[..., Any], scope: Callable[[], Any]) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        with scope():
            model = small()
            model.compile(optimizers.SGD(0.1), "mse")
        fit(model, 2)
        with scope():
            model.compile(optimizers.Adam(0.01), "mse")
        fit(model, 1)
        model.optimizer.clipvalue = 0.001
        if fit is by_keras:
            model.make_train_function(force=True)
        fit(model, 2)
        return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]

    def by_keras(model: Any, epochs: int) -> None:
        model.fit(X, Y, batch_size=5, epochs=epochs, shuffle=False, verbose=0)

    def by_us(model: Any, epochs: int) -> None:
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)
        tmg.fit(model, data, epochs=epochs, verbose=0)

    strategy = tmg.create_strategy(devices=["CPU:0", "CPU:1"])
    expected = fitted(by_keras, nullcontext)
    assert difference(fitted(by_us, strategy.scope), expected) <= 2e-6


def test_what_counts_as_changed() -> None:
    optimizer = optimizers.AdamW(0.1)
    settings = Settings()
    assert settings.changed(optimizer)
    settings.note(optimizer)
    assert not settings.changed(optimizer)
    optimizer.learning_rate = 0.5
    optimizer.beta_1 = float("0.9")
    optimizer._self_update_uid = 12345
    assert not settings.changed(optimizer)
    assert settings.changed(optimizers.AdamW(0.1))
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    assert settings.changed(optimizer)
    settings.note(optimizer)
    optimizer.tag = 1
    settings.note(optimizer, traced=True)
    optimizer.tag = 2
    assert not settings.changed(optimizer)
    optimizer.amsgrad = 0  # Equal to False, and another setting for a reader.
    assert settings.changed(optimizer)
