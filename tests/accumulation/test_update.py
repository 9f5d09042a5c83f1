"""The stock optimizer, called once for all replicas, does what it does on one device.

Owners of variables in steps: where state is, how it is saved, and why there are none. Their results
are in tests/promises/test_shard_update.py too.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import re
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, strategies as st
from law.model import regression, small
from law.pair import Pair
from one_device import ByHand, Replicated, cut, unused_strategy
from problems import crossentropy, labelled, network

import tfmultigpu as tmg
from tfmultigpu.accumulation import replicated
from tfmultigpu.accumulation.replicated import assign_owners
from tfmultigpu.accumulation.update import (
    PAYS_FROM,
    PAYS_FROM_VARIABLES,
    apply_reduced_gradients,
    choose_update,
    update_of,
)
from tfmultigpu.strategies.collectives import forcing_addition

optimizers = keras.optimizers
EMA = {"use_ema": True, "ema_momentum": 0.8}
# Clipping, decay, averages and their overwriting all act in three steps.
EVERYTHING = {"global_clipnorm": 0.3, "weight_decay": 0.1, "ema_overwrite_frequency": 2, **EMA}


class Centered(optimizers.SGD):
    """An optimizer of a user: state of its own, no "if built", and tensors in ``apply``."""

    def build(self, variables: Any) -> None:
        self.built = False
        super().build(variables)
        self.calls = self.add_variable((), name="calls")

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.calls.assign_add(1.0)
        super().apply([grad - tf.reduce_mean(grad) for grad in grads], trainable_variables)


class Lookahead(optimizers.Optimizer):
    """An optimizer of a user around another one, of whose every second step it takes half."""

    def __init__(self, inner_optimizer: Any) -> None:
        super().__init__(learning_rate=0.0)
        self.inner_optimizer = inner_optimizer

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.inner_optimizer.build(variables)
        self.slow = [self.add_variable_from_reference(v, name="slow") for v in variables]
        for slow, variable in zip(self.slow, variables, strict=True):
            slow.assign(variable)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if not self.built:
            with tf.init_scope():
                self.build(trainable_variables)
        self.inner_optimizer.apply(grads, trainable_variables)
        self.iterations.assign_add(1)
        for slow, variable in zip(self.slow, trainable_variables, strict=True):
            half = slow + 0.5 * (variable - slow)
            is_second = self.iterations % 2 == 0
            slow.assign(tf.where(is_second, half, slow))
            variable.assign(tf.where(is_second, half, variable))


def several() -> Any:
    kernels, biases = optimizers.Adam(0.05), optimizers.SGD(0.1, momentum=0.9, clipnorm=0.3)
    return optimizers.MultiOptimizer(
        lambda variable: biases if "bias" in variable.name else kernels
    )


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    name: functools.partial(make, 0.05, **EVERYTHING)
    for name, make in vars(optimizers).items()
    if inspect.isclass(make) and issubclass(make, optimizers.Optimizer)
    # Muon, which computes in float32 alone, is in tests/invariance/test_optimizers.py.
    if name not in {"Optimizer", "LossScaleOptimizer", "MultiOptimizer", "Muon"}
} | {
    "a schedule": lambda: optimizers.AdamW(optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)),
    "clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.3),
    "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(optimizers.Lamb(0.05)),
    "MultiOptimizer": several,
    "own class": lambda: Centered(0.05, momentum=0.9),
    "own class, owned": lambda: Centered(0.05, momentum=0.9),
    "own class around another": lambda: Lookahead(optimizers.Adam(0.05)),
    "own class around another, owned": lambda: Lookahead(optimizers.Adam(0.05)),
}
WAYS = ((2, "owned"), (3, "collective"), (3, "owned"), (2, "in memory"))


# Fails if an owner misses an update or another replica repeats it, if per-replica gradients are
# not clipped, a counter counts replicas, or an optimizer of Keras, of this version or the next,
# does what others do not.
@pytest.mark.parametrize(("name", "way"), [*zip(OPTIMIZERS, itertools.cycle(WAYS))], ids=str)
def test_every_optimizer_of_keras_updates_as_on_one_device(name: str, way: tuple[int, str]) -> None:
    replicas, how = way
    batches = regression((7, 1, 5))
    build = lambda: small(OPTIMIZERS[name]())  # noqa: E731
    with forcing_addition(in_memory=how != "collective"):
        pair = Pair(build, batches[0], replicas, shard_update=how == "owned", verify=False)
        pair.plain.train(batches)
        for shards in pair.shards(batches):
            pair.step(shards)
    assert pair.step.update.owned == (how == "owned")
    pair.assert_same()


def built(make: Callable[[], Any], shard: Any = "auto") -> tuple[Any, Any, Any, Any]:
    strategy = unused_strategy(2)
    with strategy.scope():
        optimizer = make()
        variables = [keras.Variable(np.ones(shape, "float32")) for shape in ((4, 3), (3,))]
    return strategy, optimizer, variables, choose_update(optimizer, variables, strategy, shard)


# Fails if replicas could change a state that exists once, or change it N times in silence.
def test_what_replicas_may_not_call() -> None:
    strategy, optimizer, variables, _ = built(several, True)
    gradients = [tf.ones(variable.shape) for variable in variables]
    for part in (optimizer, *optimizer.optimizers):
        with pytest.raises(
            tmg.TfMultiGpuError, match=r"exists once.*tmg\.accumulation\.apply_reduced"
        ):
            strategy.run(part.apply, args=(gradients, variables))
    with pytest.raises(tmg.TfMultiGpuError, match=r"inside strategy\.run.*after\s+strategy.run"):
        strategy.run(apply_reduced_gradients, args=(optimizer, gradients, variables))


# Swapped and finished averages of owners: tests/loops/test_epochs.py. Fails if a second step of an
# optimizer would move its state.
def test_an_update_is_chosen_once() -> None:
    strategy, optimizer, variables, update = built(lambda: optimizers.Adam(0.1), True)
    assert choose_update(optimizer, variables[:1], strategy) is update is update_of(optimizer)
    told = r"shard_update=False came too late.*shard_update=True"
    with pytest.raises(tmg.TfMultiGpuError, match=told):
        choose_update(optimizer, variables, strategy, False)
    with strategy.scope():
        other = [keras.Variable(np.ones(3))]
        replicated = optimizers.Adam(0.1)
        replicated.build(variables)
    with pytest.raises(tmg.errors.ScopeError, match=r"built for other variables"):
        choose_update(optimizer, other, strategy)
    with pytest.raises(tmg.TfMultiGpuError, match=r"shard_update=True.*was built before"):
        choose_update(replicated, variables, strategy, True)


# In steps -----------------------------------------------------------------------------------------

X, Y, _ = labelled(64, 6, 4, seed=11)
BATCHES = cut((X, Y), [7, 33])
LOSS = crossentropy()


def mlp(width: int = 5) -> keras.Model:
    norm = keras.constraints.MaxNorm(0.9)
    hidden = keras.layers.Dense(width, "tanh", kernel_regularizer="l2", kernel_constraint=norm)
    return network(6, hidden, keras.layers.Dense(4))


adam = functools.partial(optimizers.Adam, 0.01)


# Fails if state is on every replica, on one alone, or has other names than on one device: then
# checkpoints would not fit.
def test_state_exists_once_and_is_spread_by_size() -> None:
    make = functools.partial(optimizers.AdamW, 0.01, use_ema=True)
    run = Replicated(3, mlp, make, LOSS, shard_update=True)
    shared = {id(run.optimizer.iterations), id(run.optimizer.learning_rate)}
    slots = [v for v in run.optimizer.variables if id(v) not in shared]
    assert len(slots) == 3 * 4  # Average, momentum and velocity of four variables.
    numbers: Counter[str] = Counter()
    for slot in slots:
        assert len(run.strategy.experimental_local_results(slot.value)) == 1
        numbers[slot.value.device] += int(np.prod(slot.shape))
    # Kernels of 30 and 20, biases of 5 and 4 numbers, three slots each.
    assert sorted(numbers.values()) == [3 * 9, 3 * 20, 3 * 30]
    device = ByHand(mlp, make, LOSS)
    device.optimizer.build(device.model.trainable_variables)
    of_device, of_run = (
        [re.sub(r"_\d+", "", v.path) for v in one.optimizer.variables] for one in (device, run)
    )
    assert of_device == of_run


# Fails if a second step moves state, or a step keeps its optimizer or a graph that it traced alive.
def test_a_second_step_and_the_end_of_both() -> None:
    graphs: list[Any] = []

    def loss(labels: Any, outputs: Any) -> Any:
        graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
        return keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)

    run = Replicated(2, mlp, adam, loss, shard_update=True)
    run.step(BATCHES[0])
    again = tmg.make_train_step(run.model, run.optimizer, loss, run.strategy)
    assert again.update is run.step.update
    assert again.update.owned
    again(BATCHES[1])
    gone = weakref.ref(run.optimizer)
    assert any(graph() is not None for graph in graphs)  # The verified one is gone with its twin.
    del run, again
    gc.collect()
    gc.collect()
    assert gone() is None
    assert [graph() for graph in graphs] == [None] * len(graphs)


class Counts(optimizers.SGD):
    def __init__(self) -> None:
        super().__init__(0.1)
        self.updates = self.add_variable((), name="updates")


# Fails if an owner alone changes a variable that all replicas have: their copies then differ.
def test_no_owners_for_an_optimizer_with_variables_of_its_own() -> None:
    strategy = tmg.create_strategy(devices=2)
    with strategy.scope():
        model, optimizer = small().model, Counts()
    with pytest.raises(tmg.TfMultiGpuError, match="update_step may change 'updates'"):
        choose_update(optimizer, model.trainable_variables, strategy, shard_update=True)
    assert not choose_update(optimizer, model.trainable_variables, strategy).owned


# Fails if it is chosen otherwise than measured, or the reason is not told.
def test_where_it_is_faster_it_is_done() -> None:
    on = f"it is faster from {PAYS_FROM:,} numbers, or {PAYS_FROM_VARIABLES} variables, on"
    large = lambda: mlp(PAYS_FROM // 10)  # noqa: E731

    def deep() -> keras.Model:
        return network(1, *[keras.layers.Dense(1) for _ in range(PAYS_FROM_VARIABLES // 2)])

    def update(build: Callable[[], Any], replicas: int = 2, **options: Any) -> Any:
        return Replicated(replicas, build, adam, "mse", **options).step.update

    small, chosen, alone = update(mlp), update(large), update(large, 1, shard_update=True)
    count = 11 * (PAYS_FROM // 10) + 4
    assert (small.owned, small.reason) == (False, f"59 trained numbers in 4 variables: {on}")
    assert (chosen.owned, chosen.reason) == (
        True,
        f"{count:,} trained numbers in 4 variables: {on}",
    )
    assert update(deep).owned
    assert not update(large, shard_update=False).owned
    assert (alone.owned, alone.reason) == (False, "there is one replica")


class Halving(optimizers.schedules.LearningRateSchedule):
    """A schedule with a state of its own, which asking it advances."""

    def __init__(self) -> None:
        self.rate = keras.Variable(1.0)

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        self.rate.assign(self.rate * 0.5)
        return tf.convert_to_tensor(self.rate)


class CountsUpdates(optimizers.Adam):
    """Counts how often the update of a variable is traced."""

    updates = 0

    def update_step(self, *args: Any) -> None:
        self.updates += 1
        super().update_step(*args)


# Fails if an update is traced for each replica whose optimizer was built before, with its state on
# all of them; or if the copies of a variable are updated otherwise than the first.
@pytest.mark.parametrize("loss_scale", [None, "dynamic"])
def test_an_optimizer_that_was_built_before_is_traced_once(
    loss_scale: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated, "PAYS_FROM_VARIABLES", 4)
    traced: dict[int, int] = {}

    def train(strategy: tf.distribute.Strategy) -> Any:
        with strategy.scope():
            keras.utils.set_random_seed(2)
            constraint = keras.constraints.MaxNorm(1.0)
            hidden = keras.layers.Dense(4, "tanh", kernel_constraint=constraint)
            model = network(6, hidden, keras.layers.Dense(4))
            rate = optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
            optimizer = CountsUpdates(rate, **EVERYTHING)
            optimizer.build(model.trainable_variables)
        step = tmg.make_train_step(
            model, optimizer, crossentropy(), strategy, loss_scale=loss_scale, verify=False
        )
        x, y, _ = labelled(12, 6, 4)
        for rows in (12, 7, 2):
            step((x[:rows], y[:rows]))
        traced[strategy.num_replicas_in_sync] = optimizer.updates
        state: list[Any] = [*model.variables, *optimizer.variables]
        for variable in state:
            first, *others = strategy.experimental_local_results(variable.value)
            for copy in others:
                np.testing.assert_array_equal(copy, first)
        return [variable.numpy() for variable in state]

    tmg.testing.assert_replica_invariant(train, replicas=(2, 3))
    assert len(set(traced.values())) == 1


def test_a_learning_rate_with_a_state_is_asked_once_per_update() -> None:
    for as_function in (False, True):
        weight, rate = keras.Variable([1.0]), Halving()
        optimizer = optimizers.SGD((lambda rate=rate: rate(None)) if as_function else rate)
        optimizer.build([weight])
        for _ in range(2):
            tmg.apply_reduced_gradients(optimizer, [tf.constant([0.5])], [weight])
        assert float(rate.rate.numpy()) == 0.25
        assert float(weight.numpy()[0]) == 1.0 - 0.5 * (0.5 + 0.25)


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_no_owner_has_much_more_than_its_part(sizes: list[int], owners: int) -> None:
    chosen = assign_owners(sizes, owners)
    loads = [sum(s for s, o in zip(sizes, chosen, strict=True) if o == i) for i in range(owners)]
    assert sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / owners + max(sizes, default=0)
    assert assign_owners([5, 5, 5, 5, 1], 2) == (0, 1, 0, 1, 0)
