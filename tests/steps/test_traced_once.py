"""One trace of the function of a replica serves all, and gives what a trace for each gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import as_dataset, cut, step_on, strategy_of
from problems import MIXED, X as ROWS, Y as LABELS, crossentropy, networks, sgd

import tfmultigpu as tmg
from tfmultigpu.steps import Feature, OneTrace
from tfmultigpu.strategies.collectives import forcing_addition

L = keras.layers
FLOAT = {"dtype": "float64"}
_random = np.random.default_rng(0)
X = _random.normal(size=(11, 6, 4))
Y = _random.integers(0, 3, size=(11,))
SIZES = [(0, 9), (0, 11), (2, 4), (5, 11)]  # Even, uneven, fewer rows than replicas.


class ForEach(Feature):
    """Has each replica traced: what a feature does to the function of one is its own affair."""

    def around_replica(self, replica: Any) -> Any:
        return replica


class Counts(L.Layer):
    """Keeps a variable of TensorFlow, of which each replica has a copy."""

    def build(self, shape: Any) -> None:
        self.calls = tf.Variable(
            0.0, aggregation=tf.VariableAggregation.SUM,
            synchronization=tf.VariableSynchronization.ON_READ,
        )  # fmt: skip

    def compute_output_spec(self, x: Any) -> Any:
        return x

    def call(self, x: Any) -> Any:
        self.calls.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return x


class AsksForItsNumber(L.Layer):
    def call(self, x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        number = 0 if context is None else context.replica_id_in_sync_group
        return x + 0.0 * tf.cast(number, x.dtype)


def layers_of(kind: str) -> list[Any]:
    made: dict[str, Callable[[], list[Any]]] = {
        "draws and penalties": lambda: [
            L.GaussianNoise(0.1, seed=1, **FLOAT),
            L.Dropout(0.3, **FLOAT),
            L.Dense(5, kernel_regularizer="l2", activity_regularizer="l1", **FLOAT),
        ],
        "statistics": lambda: [L.BatchNormalization(**FLOAT), L.SpectralNormalization(
            L.Dense(5, **FLOAT), **FLOAT)],
        "a recurrent layer": lambda: [L.LSTM(5, dropout=0.2, **FLOAT)],
        "its own variable": lambda: [Counts(**FLOAT)],
        "added moments": lambda: [L.BatchNormalization(synchronized=True, **FLOAT)],
        "its number": lambda: [AsksForItsNumber(**FLOAT)],
        "other draws": lambda: [L.Lambda(lambda x: x + tf.random.normal([], dtype=x.dtype))],
    }  # fmt: skip
    return made[kind]()


def trained(kind: str, features: tuple[Feature, ...], **options: Any) -> tuple[list[Any], str]:
    """Returns the state after some batches, with the logs, and why each replica was traced."""
    strategy = tmg.create_strategy(devices=["CPU:0", "CPU:1", "CPU:2"])
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6, 4), dtype="float64"), *layers_of(kind),
                                  L.Flatten(**FLOAT), L.Dense(3, **FLOAT)])  # fmt: skip
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, **FLOAT)
    step = tmg.make_train_step(
        model, optimizer, loss, strategy, metrics=[accuracy], verify=False, features=features,
        **options,
    )  # fmt: skip
    logs = [step((X[a:b], Y[a:b])) for a, b in SIZES]
    variables = [*model.variables, *optimizer.variables, *accuracy.variables]
    owned = [layer.calls for layer in model.layers if isinstance(layer, Counts)]
    state = [variable.numpy() for variable in (*variables, *owned)]
    return [*state, *[float(value) for each in logs for value in each.values()]], step.why_each


ERRORS = tf.errors.InvalidArgumentError, tmg.errors.TfMultiGpuError

ONE_TRACE = ["draws and penalties", "statistics", "a recurrent layer", "its own variable"]
OPTIONS: list[dict[str, Any]] = [
    {}, {"micro_batches": 2}, {"clip_norm": 0.5, "loss_scale": "dynamic"}, {"shard_update": True},
]  # fmt: skip


# TensorFlow optimizes a function apart from what is around it, so the last bit may differ.
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ONE_TRACE)
def test_one_trace_gives_what_a_trace_for_each_gives(kind: str, options: dict[str, Any]) -> None:
    once, why = trained(kind, (OneTrace(),), **options)
    each, other = trained(kind, (OneTrace(), ForEach()), **options)
    assert why == ""
    assert other == "ForEach changes the function of each replica"
    for one, two in zip(once, each, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("added moments", "replicas add up something"),
        ("its number", "asks for the number of its replica"),
        ("other draws", "draws random numbers by tf.random"),
    ],
)
def test_what_one_trace_cannot_serve_is_traced_for_each(kind: str, why: str) -> None:
    assert why in trained(kind, (OneTrace(),))[1]


# Where it is kept: promises/test_first_step.py.
def test_a_loop_whose_batch_is_not_kept_says_that_an_error_is_lost() -> None:
    """Replicas that share no memory would copy each batch to keep it."""

    def out_of_range(labels: Any, predictions: Any) -> Any:
        return tf.gather(predictions[0], tf.cast(labels[:, 0], tf.int32) + 7) + predictions[:, 0]

    build, options = networks(4, lambda: L.Dense(2)), {"verify": False, "features": [OneTrace()]}
    step = step_on(2, build, keras.optimizers.SGD, out_of_range, **options)
    data = tmg.distribute_dataset((X[:6, 0], Y[:6, None]), step.strategy, batch_size=3)
    with forcing_addition(in_memory=False), pytest.raises(ERRORS) as first:
        step.run(iter(data), 2)
    if not isinstance(first.value, tf.errors.InvalidArgumentError):
        assert "run it again" in str(first.value)


def test_one_trace_is_taken_by_itself_where_it_pays() -> None:
    """That is: of a model of many variables, on CPUs, whose gradients need not be sent."""
    strategy = tmg.create_strategy(devices=2)
    for layers, why in ((3, "fewer than 30 variables"), (20, "")):
        with strategy.scope():
            dense = [L.Dense(4) for _ in range(layers)]
            model = keras.Sequential([keras.Input((4,)), *dense])
            optimizer = keras.optimizers.SGD()
        step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False)
        step((X[:, 0], X[:, 1]))
        assert why in step.why_each
        assert bool(why) == bool(step.why_each)


class AsksAndCatches(L.Layer):
    def call(self, x: Any) -> Any:
        try:
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
        except Exception:  # As code of users has it: the refusal must hold all the same.
            number = 0
        return x + tf.cast(number, x.dtype)


# Fails if one trace serves replicas that it cannot serve, because a layer has caught the refusal.
def test_a_refusal_that_a_layer_catches_holds() -> None:
    x, y = np.zeros((4, 1), "float32"), np.zeros((4, 1), "float32")
    losses: list[float] = []
    for features in ([OneTrace()], [ForEach()]):
        strategy = strategy_of(2)
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), AsksAndCatches()])
            model.add(L.Dense(1, kernel_initializer="ones"))
            optimizer = keras.optimizers.SGD(0.0)
        step = tmg.make_train_step(
            model, optimizer, "mse", strategy, features=features, verify=False
        )
        losses.append(float(step((x, y))["loss"]))
    assert losses == [0.5, 0.5]


# Fails if another size of a batch, number of steps or pass over the data costs a trace.
def test_one_trace_whatever_the_batch_sizes():
    traced = []

    class Counted(keras.layers.Layer):
        def call(self, inputs):
            traced.append(1)
            tf.debugging.assert_positive(tf.shape(inputs)[0])  # No part is without rows.
            return inputs

    build, options = networks(6, Counted, lambda: keras.layers.Dense(4)), {"micro_batches": 2}
    step = step_on(2, build, sgd, crossentropy(), verify=False, **options)
    strategy = step.strategy
    traced.clear()
    batches = cut((ROWS, LABELS), MIXED)
    step(batches[0])
    once = len(traced)
    # A loop over micro-batches may be tried once more when its first guess was wrong.
    assert once in (2, 4)
    for batch in batches:
        step(batch)
    for batch in batches:
        step(tuple(tf.constant(part) for part in batch))
    assert len(traced) == once, "whole batches of other sizes were traced again"
    data = tmg.distribute_dataset(as_dataset(batches), strategy)
    for batch in data:
        step(batch)
    shards = len(traced)
    for batch in tmg.distribute_dataset(as_dataset(batches[::-1]), strategy):
        step(batch)
    assert len(traced) == shards, "shards of other sizes were traced again"
    iterator = iter(data)
    step.run(iterator, 3)
    many = len(traced)
    step.run(iterator, 5)
    step.run(iter(data), 50)
    assert len(traced) == many, "another number of steps, or another pass, was traced again"
