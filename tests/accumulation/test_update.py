"""The stock optimizer, called once for all replicas, does what it does on one device.

Owners of variables in steps: where state is, how it is saved, and why there are none. What each
optimizer gives is in tests/cases/optimizers.py, and in tests/promises/test_shard_update.py.
"""

from __future__ import annotations

import functools
import gc
import re
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases.optimizers import EVERYTHING, several
from hypothesis import given, strategies as st
from law.model import small
from one_device import cut, step_on, unused_strategy
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

optimizers = keras.optimizers


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
    step = step_on(3, mlp, make, LOSS, shard_update=True)
    shared = {id(step.optimizer.iterations), id(step.optimizer.learning_rate)}
    slots = [v for v in step.optimizer.variables if id(v) not in shared]
    assert len(slots) == 3 * 4  # Average, momentum and velocity of four variables.
    numbers: Counter[str] = Counter()
    for slot in slots:
        assert len(step.strategy.experimental_local_results(slot.value)) == 1
        numbers[slot.value.device] += int(np.prod(slot.shape))
    # Kernels of 30 and 20, biases of 5 and 4 numbers, three slots each.
    assert sorted(numbers.values()) == [3 * 9, 3 * 20, 3 * 30]
    alone = make()
    alone.build(mlp().trainable_variables)
    of_device, of_step = (
        [re.sub(r"_\d+", "", v.path) for v in one.variables] for one in (alone, step.optimizer)
    )
    assert of_device == of_step


# Fails if a second step moves state, or a step keeps its optimizer or a graph that it traced alive.
def test_a_second_step_and_the_end_of_both() -> None:
    graphs: list[Any] = []

    def loss(labels: Any, outputs: Any) -> Any:
        graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
        return keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)

    step = step_on(2, mlp, adam, loss, shard_update=True)
    step(BATCHES[0])
    again = tmg.make_train_step(step.model, step.optimizer, loss, step.strategy)
    assert again.update is step.update
    assert again.update.owned
    again(BATCHES[1])
    gone = weakref.ref(step.optimizer)
    assert any(graph() is not None for graph in graphs)  # The verified one is gone with its twin.
    del step, again
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
        return step_on(replicas, build, adam, "mse", **options).update

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


# Fails if the sums of micro-batches that Keras would add up are added a second time.
@pytest.mark.parametrize("inner", ["SGD", "LossScaleOptimizer", "MultiOptimizer"])
def test_accumulation_inside_an_optimizer_is_refused(inner: str) -> None:
    sgd = functools.partial(optimizers.SGD, 0.1, gradient_accumulation_steps=4)
    kinds: dict[str, Callable[[], Any]] = {
        "SGD": sgd,
        "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(sgd()),
        "MultiOptimizer": lambda: several(gradient_accumulation_steps=4),
    }
    says = r"make_train_step\(\.\.\., micro_batches=4\)"
    with pytest.raises(tmg.TfMultiGpuError, match=says):
        step_on(2, mlp, kinds[inner], LOSS)


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
