"""The stock optimizer, called once for all replicas, does what it does on one device."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from each import each

import tfmultigpu as tmg
from tfmultigpu.accumulation.update import apply_reduced_gradients, choose_update, update_of
from tfmultigpu.strategies.topology import per_replica

optimizers = keras.optimizers
SHAPES = {"a/kernel": (4, 3), "a/bias": (3,), "b/kernel": (3, 5), "b/bias": (5,)}
EMA = {"use_ema": True, "ema_momentum": 0.8}
# Clipping, decay, averages and their overwriting all act in three steps.
EVERYTHING = {"global_clipnorm": 0.3, "weight_decay": 0.1, "ema_overwrite_frequency": 2, **EMA}
TRAINED = ([0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3])  # The second step has one layer frozen.


class Centered(optimizers.SGD):
    """An optimizer of a user: state of its own, no "if built", and tensors in ``apply``."""

    def build(self, variables: Any) -> None:
        self.built = False
        super().build(variables)
        self.calls = self.add_variable((), name="calls")

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.calls.assign_add(1.0)
        super().apply([grad - tf.reduce_mean(grad) for grad in grads], trainable_variables)


def several() -> Any:
    biases = optimizers.SGD(0.1, momentum=0.9, clipnorm=0.3)
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.Adam(0.05), {
        ".*bias": biases
    }))  # fmt: skip


decay = optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
CASES: dict[str, Callable[[], Any]] = {
    "AdamW, schedule, overwriting": lambda: optimizers.AdamW(
        decay, weight_decay=0.1, ema_overwrite_frequency=2, **EMA
    ),
    "SGD, clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.3),
    "Adam, global_clipnorm": lambda: optimizers.Adam(0.05, amsgrad=True, global_clipnorm=0.3),
    "Muon": lambda: optimizers.Muon(0.05),
    "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(optimizers.Lamb(0.05)),
    "MultiOptimizer": several,
    "own class": lambda: Centered(0.05, momentum=0.9),
}
WRAPPERS = {"LossScaleOptimizer", "MultiOptimizer"}
OPTIMIZERS = {
    name: functools.partial(make, 0.05, **EVERYTHING)
    for name, make in vars(optimizers).items()
    if inspect.isclass(make) and issubclass(make, optimizers.Optimizer)
    if name not in {"Optimizer", *WRAPPERS}
}
WAYS = ((2, "owned"), (3, "owned"), (3, "replicated"), (2, "collective"))


def variables_of(optimizer: Any) -> list[Any]:
    variables = []
    for i, (name, shape) in enumerate(SHAPES.items()):
        value = np.random.default_rng(i).normal(size=shape).astype("float32")
        variables.append(keras.Variable(value, name=name.replace("/", "_")))
    variables[2].constraint = keras.constraints.MaxNorm(0.9)
    return variables


def gradients_of(step: int, numbers: list[int]) -> list[tf.Tensor]:
    shapes = list(SHAPES.values())
    return [
        tf.constant(np.random.default_rng([step, i]).normal(size=shapes[i]), tf.float32)
        for i in numbers
    ]


def on_one_device(make: Callable[[], Any]) -> list[np.ndarray]:
    optimizer = make()
    variables = variables_of(optimizer)
    optimizer.build(variables)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    inner.loss_scale_factor = None
    for step, numbers in enumerate(TRAINED):
        pairs = list(zip(gradients_of(step, numbers), [variables[i] for i in numbers], strict=True))
        parts = getattr(inner, "optimizers", None)
        for part in parts or [inner]:
            known = {id(variable) for variable in part._trainable_variables}
            own = [pair for pair in pairs if id(pair[1]) in known]
            part.apply(*map(list, zip(*own, strict=True)))
        if parts:
            inner.iterations.assign_add(1)
    return [variable.numpy() for variable in (*variables, *optimizer.variables)]


def strategy_of(replicas: int) -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def built(strategy: Any, make: Callable[[], Any], shard: Any = "auto") -> tuple[Any, Any, Any]:
    with strategy.scope():
        optimizer = make()
        variables = variables_of(optimizer)
    return optimizer, variables, choose_update(optimizer, variables, strategy, shard)


def assert_copies_agree(strategy: Any, variables: list[Any]) -> None:
    for variable in variables:
        copies = [copy.numpy() for copy in strategy.experimental_local_results(variable.value)]
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0], variable.path)


def on_replicas(make: Callable[[], Any], replicas: int, way: str) -> list[np.ndarray]:
    strategy = strategy_of(replicas)
    optimizer, variables, update = built(strategy, make, way == "owned")
    assert update.owned == (way == "owned")

    @tf.function
    def apply(gradients: Any, numbers: Any, where: Any) -> None:
        trained = [variables[i] for i in numbers]
        if way != "collective":
            apply_reduced_gradients(optimizer, gradients, trained, where=where)
        elif where:  # As a step has them, if replicas share no memory.
            copies = [per_replica(strategy, [tf.identity(g)] * replicas) for g in gradients]
            update.apply(copies, trained)

    for step, numbers in enumerate(TRAINED):
        apply(gradients_of(step, numbers), tuple(numbers), tf.constant(True))
        apply(gradients_of(9, numbers), tuple(numbers), tf.constant(False))
    state = [*variables, *optimizer.variables]
    assert_copies_agree(strategy, state)
    return [variable.numpy() for variable in state]


# Fails if an owner misses an update or another replica repeats it, if per-replica gradients are
# not clipped, a counter counts replicas, or a step that ``where`` forbids changes anything.
@pytest.mark.parametrize("case", CASES)
def test_an_update_is_that_of_one_device(case: str) -> None:
    hold(CASES[case], WAYS)


def hold(make: Callable[[], Any], ways: Sequence[tuple[int, str]]) -> None:
    expected = on_one_device(make)
    for replicas, way in ways:
        actual = on_replicas(make, replicas, way)
        for value, wanted in zip(actual, expected, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=2e-6, atol=1e-6, err_msg=way)


# Fails if an optimizer of Keras, of this version or the next, does what others do not.
@each(("name", "way"), zip(OPTIMIZERS, itertools.cycle(WAYS)))
def test_every_optimizer_of_keras_with_everything_set(name: str, way: tuple[int, str]) -> None:
    hold(OPTIMIZERS[name], [way])


# Fails if averages of owners are read or written where they are not, or not copied.
@pytest.mark.parametrize("shard", [True, False])
def test_methods_of_keras_swap_and_finish_averages(shard: bool) -> None:
    strategy = strategy_of(2)
    optimizer, variables, update = built(strategy, lambda: optimizers.Adam(0.05, **EMA), shard)
    for step in range(2):
        apply_reduced_gradients(optimizer, gradients_of(step, [0, 1, 2, 3]), variables)
    averages = optimizer._model_variables_moving_average
    before = [[one.numpy() for one in group] for group in (variables, averages)]
    callback = keras.callbacks.SwapEMAWeights()
    with update.updating():
        callback._tf_swap_variables(optimizer)
    for group, values in ((averages, before[0]), (variables, before[1])):
        for variable, value in zip(group, values, strict=True):
            np.testing.assert_allclose(variable.numpy(), value, atol=1e-6)
    assert_copies_agree(strategy, variables)
    with update.updating():
        callback._tf_finalize_ema_values(optimizer)
        averages[0].assign_add(averages[0])
        optimizer.finalize_variable_values(variables)
    np.testing.assert_array_equal(variables[0].numpy(), averages[0].numpy())
    np.testing.assert_allclose(variables[0].numpy(), 2 * before[1][0], atol=1e-6)
    assert_copies_agree(strategy, variables)


# Fails if replicas could change a state that exists once, or change it N times in silence.
def test_what_replicas_may_not_call() -> None:
    strategy = strategy_of(2)
    optimizer, variables, _ = built(strategy, several, True)
    gradients = gradients_of(0, [0, 1, 2, 3])
    for part in (optimizer, *optimizer.optimizers):
        with pytest.raises(tmg.TfMultiGpuError, match=r"exists once.*tmg\.apply_reduced_grad"):
            strategy.run(part.apply, args=(gradients, variables))
    with pytest.raises(tmg.TfMultiGpuError, match=r"in a replica.*after\s+strategy.run"):
        strategy.run(apply_reduced_gradients, args=(optimizer, gradients, variables))


# Fails if a second step of an optimizer would move its state.
def test_an_update_is_chosen_once() -> None:
    strategy = strategy_of(2)
    optimizer, variables, update = built(strategy, lambda: optimizers.Adam(0.1), True)
    assert choose_update(optimizer, variables[:1], strategy) is update is update_of(optimizer)
    with pytest.raises(
        tmg.TfMultiGpuError, match=r"shard_update=False came too late.*shard_update=True"
    ):
        choose_update(optimizer, variables, strategy, False)
    other = variables_of(optimizer)
    with pytest.raises(tmg.errors.ScopeError, match=r"built for other variables"):
        choose_update(optimizer, other, strategy)
    with strategy.scope():
        replicated = optimizers.Adam(0.1)
        replicated.build(variables)
    with pytest.raises(tmg.TfMultiGpuError, match=r"shard_update=True.*was built before"):
        choose_update(replicated, variables, strategy, True)
