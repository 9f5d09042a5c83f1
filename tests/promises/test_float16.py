"""float16: a model without a loss scale is told, and a loop by hand skips what the step skips."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.by_hand import merged, shards_of
from law.model import FLOAT, REDUCTIONS, Batch, Training, cut
from law.pair import SEED, strategy_of
from law.plain import PlainLoop, assert_values

import tfmultigpu as tmg

# What is given, and what comes out ----------------------------------------------------------------

SIZES = [(7, 1), (3,), (1, 1, 5), (1,)]
_random = np.random.default_rng(5)
X = _random.normal(size=(19, 3, 2))
X[_random.integers(0, 3, (19, 3)) == 0] = 0.0  # Masked steps, of some rows all.
Y = _random.normal(size=(19, 3, 1))
WEIGHTS = np.linspace(0.0, 2.0, 57).reshape(19, 3)


def masked(reduction: str, strategy: Any = None) -> Training:
    """Returns a model whose loss counts some elements of each row."""
    keras.utils.set_random_seed(SEED)
    with (strategy or tf.distribute.get_strategy()).scope():
        layers = [keras.layers.Masking(**FLOAT), keras.layers.Dense(1, **FLOAT)]
        model = keras.Sequential([keras.Input((3, 2), dtype="float64"), *layers])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
    return Training(model, optimizer, keras.losses.Huber(reduction=reduction, **FLOAT))


def windows() -> list[list[Batch]]:
    batches = iter(cut((X, Y, WEIGHTS), itertools.chain(*SIZES)))
    return [[next(batches) for _ in window] for window in SIZES]


# Fails if a pair that is scaled to the size of a mean is not the sum again in the window: divided
# twice, by the rows of each replica, or by the scale alone; also where its weight stands for it.
@pytest.mark.parametrize(("replicas", "reduction"), list(enumerate(REDUCTIONS, 1)))
def test_a_scaled_pair_is_what_one_device_gives(replicas: int, reduction: str) -> None:
    truth = masked(reduction)
    PlainLoop(truth, windows()[0][0]).train([merged(window) for window in windows()])
    strategy = strategy_of(replicas)
    training = masked(reduction, strategy)
    variables = training.model.trainable_variables
    with strategy.scope():
        window, scale = tmg.GradientAccumulator(variables), tmg.LossScale(1024.0)

    def replica(batch: Batch, alone: bool) -> None:
        x, y, weights = batch
        with tf.GradientTape() as tape:
            pair = tmg.loss_sum(training.loss, y, training.model(x, training=True), weights)
            target = scale.scale_loss(pair)
        window.add(tape.gradient(target, variables), pair.weight if alone else pair)

    for batches in windows():
        for number, shard in enumerate(shards_of(batches, strategy, "tmg")):
            strategy.run(replica, args=(shard, number > 0))
        gradients, finite = scale.unscale(window.reduce()[0])
        tmg.apply_reduced_gradients(training.optimizer, gradients, variables, where=finite)
        scale.update(finite)
    assert_values(training.values(), truth.values(), truth.variables())


# Fails if a pair that is not scaled is multiplied in the window, or one that is scaled is lost on
# the way to it without an error.
def test_a_pair_without_a_scale_and_a_scale_without_a_window() -> None:
    strategy = strategy_of(1)
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
        window, scale = tmg.GradientAccumulator([variable]), tmg.LossScale(8.0)

    def add(scaled: Callable[[Any], Any], given: Callable[[Any], Any]) -> None:
        with tf.GradientTape() as tape:
            pair = tmg.LossSum(tf.reduce_sum(variable * [6.0, 9.0]), tf.constant(3.0))
            target = scaled(pair)
        window.add(tape.gradient(target, [variable]), given(pair))

    def reduced(scaled: Callable[[Any], Any], given: Callable[[Any], Any]) -> Any:
        strategy.run(add, args=(scaled, given))
        gradients, weight = window.reduce()
        assert float(weight) == 3.0
        return gradients

    for given in (lambda pair: pair, lambda pair: pair.weight, lambda pair: 3.0):
        (gradient,) = reduced(lambda pair: pair.sum, given)
        np.testing.assert_allclose(gradient, [2.0, 3.0], rtol=1e-6)
        (gradient,), _ = scale.unscale(reduced(lambda pair: scale.scale_loss(pair.sum), given))
        np.testing.assert_allclose(gradient, [2.0, 3.0], rtol=1e-6)
    # Without its pair a scaled gradient would be too small.
    gradients = reduced(scale.scale_loss, lambda pair: pair.weight * 1.0)
    with pytest.raises(tmg.TfMultiGpuError, match=r"window\.add\(gradients, pair\)"):
        scale.unscale(gradients)
    (gradient,), _ = scale.unscale(reduced(scale.scale_loss, lambda pair: pair))
    np.testing.assert_allclose(gradient, [2.0, 3.0], rtol=1e-6)


# How many updates are skipped ---------------------------------------------------------------------


def half(strategy: Any) -> tuple[Any, Any]:
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        hidden = keras.layers.Dense(8, "tanh", dtype="mixed_float16")
        model = keras.Sequential([keras.Input((16,)), hidden, keras.layers.Dense(1)])
        return model, keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0))


# Fails if by hand the sum of the losses is scaled, or a mean that is larger than that of the step:
# updates are skipped that the step makes with the same scale, of 1 row up to 8,192.
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.more), 3])
def test_by_hand_no_update_is_skipped_that_the_step_makes(replicas: int) -> None:
    strategy = strategy_of(replicas)
    model, optimizer = half(strategy)
    variables = model.trainable_variables
    with strategy.scope():
        window, scale = tmg.GradientAccumulator(variables), tmg.LossScale()
    step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False)

    def replica(batch: Batch) -> None:
        with tf.GradientTape() as tape:
            pair = tmg.loss_sum("mse", batch[1], model(batch[0], training=True))
            target = scale.scale_loss(pair)
        window.add(tape.gradient(target, variables), pair)

    @tf.function(reduce_retracing=True)
    def add(batch: Batch) -> None:
        strategy.run(replica, args=(batch,))

    outcomes = set()
    for rows, batches in [(1, 1), (1, 16), (3, 16), (64, 4), (512, 16), (8192, 1)]:
        x = _random.normal(size=(rows * batches, 16)).astype("float32")
        arrays = x, 3.0 * x[:, :1] + 1.0
        shards = list(tmg.distribute_dataset(arrays, strategy, batch_size=rows))
        (whole,) = tmg.distribute_dataset(arrays, strategy, batch_size=rows * batches)
        step(whole)  # Builds the optimizer.
        for power in (13, 15, 17, 19, 21):
            scale.scale.assign(2.0**power)
            optimizer.dynamic_scale.assign(2.0**power)
            for shard in shards:
                add(shard)
            gradients, finite = scale.unscale(window.reduce()[0])
            logs = step(whole)
            assert float(logs["loss_scale"]) == 2.0**power
            outcomes.add((bool(finite), not float(logs["skipped"])))
            assert finite or float(logs["skipped"]), (rows, batches, power)
            if finite and not float(logs["skipped"]):
                norm = tf.linalg.global_norm(gradients)
                np.testing.assert_allclose(logs["gradient_norm"], norm, rtol=2e-3)
    assert {(True, True), (True, False)} <= outcomes


# What is told -------------------------------------------------------------------------------------


class Nested(keras.Model):
    """Has no layer before its first batch, and its float16 inside another layer."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Dense(3, dtype=dtype)])
        self.outer = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.outer(self.inner(x))


def mapped(_: str) -> Any:
    policies = keras.dtype_policies.DTypePolicyMap()
    policies[".*half"] = keras.dtype_policies.DTypePolicy("mixed_float16")
    layer = keras.layers.Dense(2, name="half", dtype=policies)
    return keras.Sequential([keras.Input((4,)), layer])


ROWS = np.ones((5, 4), "float32"), np.ones((5, 2), "float32")


def train_two_steps(build: Any, dtype: str, optimizer: Any = keras.optimizers.SGD) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model, made = build(dtype), optimizer(0.1)
    step = tmg.make_train_step(model, made, "mse", strategy, verify=False)
    step(ROWS)
    model.layers[-1].trainable = False  # Another trace.
    step(ROWS)


def fit(dtype: str) -> None:
    with strategy_of(2).scope():
        model = Nested(dtype)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    tmg.fit(model, *ROWS, batch_size=3, epochs=2, verbose=0, verify=False)


def evaluate(dtype: str) -> None:
    with strategy_of(2).scope():
        model = Nested(dtype)
    tmg.make_eval_step(model, "mse", strategy_of(2), verify=False)(ROWS)


def wrapped(rate: float) -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate))


# By a name, what trains, and how often it is told.
TRAININGS: dict[str, tuple[Callable[[], None], int]] = {
    "nested": (lambda: train_two_steps(Nested, "mixed_float16"), 1),
    "a map of policies": (lambda: train_two_steps(mapped, ""), 1),
    "fit": (lambda: fit("mixed_float16"), 1),
    "bfloat16": (lambda: train_two_steps(Nested, "mixed_bfloat16"), 0),
    "an optimizer that scales": (lambda: train_two_steps(Nested, "mixed_float16", wrapped), 0),
    "evaluation": (lambda: evaluate("mixed_float16"), 0),
}


# Fails if a float16 model trains without a loss scale in silence, or is told of more than once, or
# if a model that needs none is told of.
@pytest.mark.parametrize("name", TRAININGS)
def test_float16_without_a_loss_scale_is_told_once(name: str) -> None:
    train, times = TRAININGS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    said = [str(one.message) for one in caught if "float16" in str(one.message)]
    assert len(said) == times, said
    assert all('Write loss_scale="dynamic"' in text for text in said)


# Fails if the warning comes after a step has lost its gradient.
def test_it_is_told_before_a_step_is_lost() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model, optimizer = Nested("mixed_float16"), keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    with pytest.raises(UserWarning, match="loss_scale"):  # Warnings are errors here.
        step(ROWS)
    assert int(optimizer.iterations.numpy()) == 0


# What cannot be meant -----------------------------------------------------------------------------


def train_with_a_weight_of_one() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1)

    def forward(model: Any, batch: Any, training: bool) -> Any:
        values = tf.square(batch[1] - model(batch[0], training=training))
        return tmg.LossSum(tf.reduce_sum(values), 1.0)

    tmg.make_train_step(model, optimizer, None, strategy, forward=forward)(ROWS)


def accumulate_outside_the_scope() -> None:
    with strategy_of(2).scope():
        variables = [keras.Variable([1.0])]
    tmg.GradientAccumulator(variables)


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str, str]] = {
    "a scale by its name": (
        lambda: tmg.LossScale("dynamic"), ValueError, "'dynamic'", "tmg.LossScale()"
    ),
    "a scale of 0": (lambda: tmg.LossScale(0), ValueError, "=0", "tmg.LossScale()"),
    "a negative scale": (lambda: tmg.LossScale(-8.0), ValueError, "=-8.0", "tmg.LossScale()"),
    "a scale that is no number": (
        lambda: tmg.LossScale(float("nan")), ValueError, "=nan", "tmg.LossScale()"
    ),
    "no limit": (lambda: tmg.clip_gradients([tf.ones(2)], None), ValueError, "None", "leave"),
    "one limit for all GPUs": (
        lambda: tmg.limit_memory(8e9), TypeError, "8000000000.0", '{"GPU:0": 8 * 1024**3}'
    ),
    "an accumulator outside the scope": (
        accumulate_outside_the_scope, tmg.ScopeError, "The window was created outside",
        "with strategy.scope():\n        window = tmg.GradientAccumulator(variables)",
    ),
    "a weight that is not of rows": (
        train_with_a_weight_of_one, UserWarning, "the number of rows or elements",
        "tmg.LossSum(tf.reduce_sum(values), tf.size(values))",
    ),
}  # fmt: skip


# Fails if the answer does not say what was received, or which line to write.
@pytest.mark.parametrize("name", MISTAKES)
def test_the_line_to_write_is_said(name: str) -> None:
    call, kind, received, line = MISTAKES[name]
    with pytest.raises(kind) as caught:
        call()
    assert received in str(caught.value)
    assert line in str(caught.value)
