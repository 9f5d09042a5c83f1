"""Owners of variables in steps: where state is, how it is saved, and why there are none.

That the result is that of one device is in tests/promises/test_shard_update.py and test_update.py.
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
from hypothesis import given, strategies as st
from one_device import ByHand, Replicated, cut, difference

import tfmultigpu as tmg
from tfmultigpu.accumulation.replicated import assign_owners
from tfmultigpu.accumulation.update import PAYS_FROM, PAYS_FROM_VARIABLES

optimizers = keras.optimizers
_random = np.random.default_rng(11)
X = _random.normal(size=(64, 6)).astype("float32")
Y = _random.integers(0, 4, 64)
BATCHES = cut((X, Y), [7, 1, 9, 2, 33])
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp(width: int = 5) -> keras.Model:
    norm = keras.constraints.MaxNorm(0.9)
    hidden = keras.layers.Dense(width, "tanh", kernel_regularizer="l2", kernel_constraint=norm)
    return keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dense(4)])


def adam(**options: Any) -> Any:
    return optimizers.Adam(0.01, **options)


def sharded(replicas: int, make: Callable[[], Any] = adam, **options: Any) -> Replicated:
    return Replicated(replicas, mlp, make, LOSS, shard_update=True, **options)


# Fails if state is on every replica, on one alone, or has other names than on one device: then
# checkpoints would not fit.
def test_state_exists_once_and_is_spread_by_size() -> None:
    make = functools.partial(optimizers.AdamW, 0.01, use_ema=True)
    run = sharded(3, make)
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
    for batch in BATCHES[1:]:
        again(batch)
    expected = ByHand(mlp, adam, LOSS).train(BATCHES).weights
    assert difference([v.numpy() for v in run.model.variables], expected) <= 1e-6
    with pytest.raises(tmg.TfMultiGpuError, match="shard_update=False came too late"):
        tmg.make_train_step(run.model, run.optimizer, loss, run.strategy, shard_update=False)
    gone = weakref.ref(run.optimizer)
    assert any(graph() is not None for graph in graphs)  # The verified one is gone with its twin.
    del run, again
    gc.collect()
    gc.collect()
    assert gone() is None
    assert [graph() for graph in graphs] == [None] * len(graphs)


# Fails if it is chosen otherwise than measured, or the reason is not told.
def test_where_it_is_faster_it_is_done() -> None:
    on = f"it is faster from {PAYS_FROM:,} numbers, or {PAYS_FROM_VARIABLES} variables, on"
    large = lambda: mlp(PAYS_FROM // 10)  # noqa: E731

    def deep() -> keras.Model:
        layers = [keras.layers.Dense(1) for _ in range(PAYS_FROM_VARIABLES // 2)]
        return keras.Sequential([keras.Input((1,)), *layers])

    def update(build: Callable[[], Any], replicas: int = 2, **options: Any) -> Any:
        return Replicated(replicas, build, adam, "mse", **options).step.update

    small = update(mlp)
    assert (small.owned, small.reason) == (False, f"59 trained numbers in 4 variables: {on}")
    count = 11 * (PAYS_FROM // 10) + 4
    chosen = update(large)
    assert (chosen.owned, chosen.reason) == (
        True,
        f"{count:,} trained numbers in 4 variables: {on}",
    )
    assert update(deep).owned
    assert not update(large, shard_update=False).owned
    alone = update(large, 1, shard_update=True)
    assert (alone.owned, alone.reason) == (False, "there is one replica")


class Halving(optimizers.schedules.LearningRateSchedule):
    """A schedule with a state of its own, which asking it advances."""

    def __init__(self) -> None:
        self.rate = keras.Variable(1.0)

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        self.rate.assign(self.rate * 0.5)
        return tf.convert_to_tensor(self.rate)


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
