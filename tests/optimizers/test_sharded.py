"""The update sharded over the replicas: what one device gives, with one handle on its state."""

from __future__ import annotations

import functools
import gc
import re
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, strategies as st
from one_device import (
    ByHand,
    Replicated,
    assert_same,
    cut,
    difference,
    hold,
    strategy_of,
)

import tfmultigpu as tmg
from tfmultigpu.accumulation.owners import assign_owners
from tfmultigpu.accumulation.update import PAYS_FROM, PAYS_FROM_VARIABLES

optimizers = keras.optimizers
_random = np.random.default_rng(11)
X = _random.normal(size=(240, 6)).astype("float32")
Y = _random.integers(0, 4, 240)
BATCHES = cut((X, Y), [7, 1, 9, 2, 33])
TWENTY = cut((X, Y), [7, 1, 9, 2, 33, 64, 3, 4, 5, 8] * 2)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# Clipping, decay, averages and their overwriting all act within five steps.
EVERYTHING: dict[str, Any] = {
    "global_clipnorm": 0.3,
    "weight_decay": 0.1,
    "use_ema": True,
    "ema_momentum": 0.8,
    "ema_overwrite_frequency": 2,
}
SHARDED = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lamb",
    "Lion",
    "LossScaleOptimizer",
    "Muon",
    "RMSprop",
    "SGD",
    "ScheduleFreeAdamW",
)
REPLICATED = ("Adafactor", "MultiOptimizer", "Nadam")


def mlp(width: int = 5) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(
                width,
                "tanh",
                kernel_regularizer="l2",
                kernel_constraint=keras.constraints.MaxNorm(0.9),
            ),
            keras.layers.Dense(4),
        ]
    )


def adam(**options: Any) -> Any:
    return optimizers.Adam(0.01, **options)


def named(name: str, **options: Any) -> Any:
    if name == "LossScaleOptimizer":
        return optimizers.LossScaleOptimizer(adam(**options), initial_scale=4.0)
    if name == "MultiOptimizer":
        kernels, biases = adam(), optimizers.SGD(0.1)
        return optimizers.MultiOptimizer(lambda v: kernels if v.name == "kernel" else biases)
    return getattr(optimizers, name)(0.01, **options)


def sharded(replicas: int, make: Callable[[], Any] = adam, **options: Any) -> Replicated:
    return Replicated(replicas, mlp, make, LOSS, shard_update=True, **options)


def values(optimizer: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in optimizer.variables]


# The same result ----------------------------------------------------------------------------------


def test_twenty_steps_with_everything() -> None:
    """Weights, losses, counters and all that the optimizer remembers; bits on the replicas."""
    make = functools.partial(optimizers.AdamW, 0.01, **EVERYTHING)
    device, run = ByHand(mlp, make, LOSS), sharded(3, make)
    assert_same(run.train(TWENTY), device.train(TWENTY))
    assert difference(values(run.optimizer), values(device.optimizer)) <= 1e-6
    assert run.step.shard_update
    assert run.step.shard_update_reason == "shard_update=True"


@pytest.mark.parametrize("name", ["Adam"])
def test_optimizers_of_keras(name: str) -> None:
    make = functools.partial(named, name, **EVERYTHING)
    hold(2, mlp, make, LOSS, BATCHES, shard_update=True)


def test_the_other_optimizers_of_keras() -> None:
    """Of one layer, in three steps."""

    def small() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])

    shown = {"Adam", "AdamW", "Lion", "RMSprop", "SGD"}  # In tests/promises.
    for name in (one for one in SHARDED if one not in shown):
        make = functools.partial(named, name, **EVERYTHING)
        hold(2, small, make, LOSS, BATCHES[2:], shard_update=True, verify=False)


def test_every_optimizer_of_keras_is_here() -> None:
    found = {
        name
        for name, value in vars(optimizers).items()
        if isinstance(value, type) and issubclass(value, optimizers.Optimizer)
    }
    assert found - {"Optimizer"} == {*SHARDED, *REPLICATED}


def test_more_replicas_than_variables() -> None:
    options = {"micro_batches": 2, "loss_scale": 64.0, "clip_norm": 0.3}
    hold(6, mlp, lambda: adam(clipvalue=0.01), LOSS, BATCHES, shard_update=True, **options)


def test_outputs_divided_by_weights_of_their_own() -> None:
    """A backward pass for each, rows of an embedding, synchronized statistics."""
    ids = _random.integers(0, 6, (24, 3))
    y = _random.normal(size=(24, 2)).astype("float32")
    weights = _random.uniform(0.1, 2.0, (2, 24)).astype("float32")
    batches = [
        tuple({"a": one, "b": two} if isinstance(one, np.ndarray) else one for one, two in pairs)
        for pairs in [
            ((y[i:j], -y[i:j]), (weights[0, i:j], weights[1, i:j]))
            for i, j in ((0, 7), (7, 8), (8, 24))
        ]
    ]
    inputs = [ids[0:7], ids[7:8], ids[8:24]]

    def heads() -> keras.Model:
        words = keras.Input((3,), dtype="int64")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(6, 4)(words))
        hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
        names = ("a", "b")
        return keras.Model(words, {n: keras.layers.Dense(2, name=n)(hidden) for n in names})

    def train(shard: bool) -> list[np.ndarray]:
        error = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        losses = {"a": error, "b": error}
        run = Replicated(3, heads, lambda: optimizers.SGD(0.1), losses, shard_update=shard)
        return run.train([(x, *rest) for x, rest in zip(inputs, batches, strict=True)]).weights

    assert difference(train(True), train(False)) <= 1e-6


# One handle ---------------------------------------------------------------------------------------


def test_state_exists_once_and_is_spread_by_size() -> None:
    run = sharded(3, functools.partial(optimizers.AdamW, 0.01, **EVERYTHING))
    inside = {id(run.optimizer.iterations), id(run.optimizer.learning_rate)}
    slots = [v for v in run.optimizer.variables if id(v) not in inside]
    assert len(slots) == 3 * 4  # Average, momentum and velocity of four variables.
    numbers: Counter[str] = Counter()
    for slot in slots:
        assert len(run.strategy.experimental_local_results(slot.value)) == 1
        numbers[slot.value.device] += int(np.prod(slot.shape))
    # Kernels of 30 and 20, biases of 5 and 4 numbers, three slots each.
    assert sorted(numbers.values()) == [3 * 9, 3 * 20, 3 * 30]
    # The names are those of an optimizer on one device, so that checkpoints fit.
    device = ByHand(mlp, functools.partial(optimizers.AdamW, 0.01, **EVERYTHING), LOSS)
    device.optimizer.build(device.model.trainable_variables)
    of_device, of_run = (
        [re.sub(r"_\d+", "", v.path) for v in one.optimizer.variables] for one in (device, run)
    )
    assert of_device == of_run


# Keras turns mirrored variables into arrays in a way that NumPy 2 warns about.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_saved_on_some_replicas_and_resumed_on_others(tmp_path: Path) -> None:
    """3 replicas, sharded; then 2, sharded; then one device: as if never interrupted."""
    expected = ByHand(mlp, adam, LOSS).train(BATCHES[:4] + BATCHES[1:2])
    states: list[Any] = [tmp_path / "first", tmp_path / "second"]
    runs: list[Any] = [sharded(3), sharded(2), ByHand(mlp, adam, LOSS)]

    def save(run: Any, path: Path) -> Any:
        store: dict[str, Any] = {}
        run.model.compile(optimizer=run.optimizer)
        run.model.save(f"{path}.keras")
        loaded = keras.models.load_model(f"{path}.keras")
        loaded.optimizer.save_own_variables(store)
        assert difference(loaded.get_weights(), run.model.get_weights()) == 0.0
        return run.model.get_weights(), store

    def restore(run: Any, saved: Any) -> None:
        run.model.set_weights(saved[0])
        run.optimizer.load_own_variables(saved[1])

    saved: Any = None
    for i, part in enumerate((BATCHES[:2], BATCHES[2:4], BATCHES[1:2])):
        run = runs[i]
        if isinstance(run, ByHand):
            run.train(part)  # Traces it; what it did is overwritten.
        if i:
            restore(run, saved)
        for batch in part:
            (run._compiled if isinstance(run, ByHand) else run.step)(batch)
        if i < 2:
            run.assert_replicas_agree()
            saved = save(run, states[i])
    assert difference(runs[2].model.get_weights(), expected.weights) <= 1e-6
    assert int(runs[2].optimizer.iterations.numpy()) == 5


def test_averages_at_the_end() -> None:
    """What Keras offers to put the averages into the model reads them through the optimizer."""
    make = functools.partial(adam, use_ema=True, ema_momentum=0.5)
    device, run = ByHand(mlp, make, LOSS), sharded(2, make)
    for one in (device, run):
        one.train(BATCHES)
        one.optimizer.finalize_variable_values(one.model.trainable_variables)
    run.assert_replicas_agree()
    assert difference(run.model.get_weights(), device.model.get_weights()) <= 1e-6


def test_a_second_step_on_the_same_optimizer() -> None:
    """Sharded too, without being asked: its state is where it is."""
    run = sharded(2)
    run.step(BATCHES[0])
    again = tmg.make_train_step(run.model, run.optimizer, LOSS, run.strategy)
    assert again.shard_update
    assert again.shard_update_reason == "an earlier step has sharded the state of this optimizer"
    for batch in BATCHES[1:]:
        again(batch)
    expected = ByHand(mlp, adam, LOSS).train(BATCHES).weights
    assert difference([v.numpy() for v in run.model.variables], expected) <= 1e-6
    with pytest.raises(tmg.TfMultiGpuError, match=r"since an earlier step sharded it\. Received: "):
        tmg.make_train_step(run.model, run.optimizer, LOSS, run.strategy, shard_update=False)


def test_replicas_may_not_apply_it_by_themselves() -> None:
    run = sharded(2)
    before = values(run.optimizer)
    gradients = [tf.ones(variable.shape) for variable in run.model.trainable_variables]
    trained = run.model.trainable_variables
    said = r"would each change it\. .* tmg\.fit\(\.\.\., shard_update=False\) or make_train_step"
    with pytest.raises(tmg.TfMultiGpuError, match=said):
        run.strategy.run(lambda: run.optimizer.apply(gradients, trained))
    pairs = list(zip(gradients, trained, strict=True))
    with pytest.raises(tmg.TfMultiGpuError, match=said):
        run.strategy.run(lambda: run.optimizer.apply_gradients(pairs))
    assert difference(before, values(run.optimizer)) == 0.0


def test_an_optimizer_is_not_kept_alive() -> None:
    run = sharded(2)
    run.step(BATCHES[0])
    gone = weakref.ref(run.optimizer)
    del run
    gc.collect()
    assert gone() is None


def test_no_traced_graph_is_kept_alive() -> None:
    graphs: list[Any] = []

    def loss(labels: Any, outputs: Any) -> Any:
        graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
        return keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)

    run = Replicated(2, mlp, adam, loss, shard_update=True)
    run.step(BATCHES[0])
    assert graphs
    assert graphs[-1]() is not None
    del run
    gc.collect()
    gc.collect()
    assert [graph() for graph in graphs] == [None] * len(graphs)


# Where it is done and where not -------------------------------------------------------------------


class _Own(keras.optimizers.SGD):
    pass


def _built() -> Any:
    optimizer = adam()
    model = mlp()
    optimizer.build(model.trainable_variables)
    return model, optimizer


def _twins() -> keras.Model:
    first, second = (keras.layers.Dense(6, name="twin") for _ in range(2))
    inputs = keras.Input((6,))
    return _Chain([first, second], inputs)


class _Chain(keras.Model):
    def __init__(self, layers: list[Any], inputs: Any) -> None:
        super().__init__()
        self.parts = layers
        self(inputs)

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


OBSTACLES = {
    "Adafactor": (
        lambda: (mlp(), named("Adafactor")),
        "Adafactor keeps state that is not of the shape of a variable",
    ),
    "Nadam": (
        lambda: (mlp(), named("Nadam")),
        "Nadam keeps state that is not of the shape of a variable",
    ),
    "MultiOptimizer": (
        lambda: (mlp(), named("MultiOptimizer")),
        "MultiOptimizer holds several optimizers",
    ),
    "one's own": (
        lambda: (mlp(), _Own(0.1)),
        "_Own is not an optimizer of Keras, so whether it updates each variable by itself is not "
        "known",
    ),
    "built": (
        _built,
        "the optimizer was built before the step was made, with its state on every replica",
    ),
    "paths": (lambda: (_twins(), adam()), "two variables have the same path"),
}


def test_what_cannot_be_sharded_says_so() -> None:
    strategy = strategy_of(2)
    for make, reason in OBSTACLES.values():
        with strategy.scope():
            model, optimizer = make()
        said = f"The update cannot be sharded: {reason}. Received: shard_update=True."
        with pytest.raises(tmg.TfMultiGpuError, match=re.escape(said)):
            tmg.make_train_step(model, optimizer, LOSS, strategy, shard_update=True)
        step = tmg.make_train_step(model, optimizer, LOSS, strategy)
        assert not step.shard_update
        assert step.shard_update_reason == reason


def test_where_it_is_faster_it_is_done() -> None:
    on = f"it is faster from {PAYS_FROM:,} numbers, or {PAYS_FROM_VARIABLES} variables, on"
    small = Replicated(2, mlp, adam, LOSS).step
    assert not small.shard_update
    assert small.shard_update_reason == f"59 trained numbers in 4 variables: {on}"
    large = Replicated(2, lambda: mlp(PAYS_FROM // 10), adam, LOSS).step
    assert large.shard_update
    count = 11 * (PAYS_FROM // 10) + 4
    assert large.shard_update_reason == f"{count:,} trained numbers in 4 variables: {on}"
    never = Replicated(2, lambda: mlp(PAYS_FROM // 10), adam, LOSS, shard_update=False).step
    assert not never.shard_update

    def deep() -> keras.Model:
        layers = [keras.layers.Dense(1) for _ in range(PAYS_FROM_VARIABLES // 2)]
        return keras.Sequential([keras.Input((1,)), *layers])

    assert Replicated(2, deep, adam, "mse").step.shard_update


def test_on_one_device_there_is_nothing_to_share() -> None:
    run = Replicated(1, mlp, adam, LOSS, shard_update=True)
    assert not run.step.shard_update
    assert run.step.shard_update_reason == "there is one replica"
    assert_same(run.train(BATCHES), ByHand(mlp, adam, LOSS).train(BATCHES))


def test_what_shard_update_may_be() -> None:
    with pytest.raises(ValueError, match=r"True, False or 'auto'\. Received: shard_update='yes'"):
        Replicated(2, mlp, adam, LOSS, shard_update="yes")


# Owners -------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_no_owner_has_much_more_than_its_part(sizes: list[int], owners: int) -> None:
    chosen = assign_owners(sizes, owners)
    loads = [sum(s for s, o in zip(sizes, chosen, strict=True) if o == i) for i in range(owners)]
    assert sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / owners + max(sizes, default=0)


def test_owners_are_the_same_each_time() -> None:
    assert assign_owners([5, 5, 5, 5, 1], 2) == (0, 1, 0, 1, 0)
    assert assign_owners([], 3) == ()
