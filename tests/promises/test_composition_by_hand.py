"""Composition by hand: inside ``strategy.run`` loss_sum and add; the rest outside, and once.

What a user writes otherwise is right, or the library tells: it is never silently different.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.by_hand import apply_once, build, hold, merged, on_one_device, shards_of, windows
from law.model import Batch, Training, regression
from law.pair import SEED, strategy_of

import tfmultigpu as tmg

# The gradients of the windows below have norms of 2.0, none, 4.0 and 1.7: one of them is clipped.
LIMIT = 3.0
CLIPS = {
    "clip_gradients": {},
    "clipnorm": {"clipnorm": 1.2},
    "global_clipnorm": {"global_clipnorm": LIMIT},
    "clipvalue": {"clipvalue": 0.9},
}
TIGHT = {
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.2},
    "clipvalue": {"clipvalue": 0.05},
}
WINDOWS = [(7, 1), (3,), (1, 2), (1,)]
INFINITE = 9  # This row has an infinite weight: the second window is skipped, by all replicas.


def weighted_windows() -> Iterator[list[Batch]]:
    first = 0
    for batches in windows(WINDOWS):
        weighted = []
        for x, y in batches:
            weights = np.linspace(0.5, 2.0, len(x))
            weights[np.arange(first, first + len(x)) == INFINITE] = np.inf
            weighted.append((x, y, weights))
            first += len(x)
        yield weighted


def scaled_on_one_device(clip: str) -> tuple[Training, list[float]]:
    """Returns what NumPy's own rule of a dynamic scale gives on one device, and its scales."""
    training = build(optimizer=functools.partial(keras.optimizers.SGD, 0.1, **CLIPS[clip]))
    variables, scales, scale = training.model.trainable_variables, [], 1024.0
    for batches in weighted_windows():
        x, y, weights = merged(batches)
        with tf.GradientTape() as tape:
            loss = training.loss(y, training.model(x, training=True), sample_weight=weights)
        gradients = tape.gradient(loss, variables)
        finite = all(np.isfinite(gradient).all() for gradient in gradients)
        if clip == "clip_gradients":
            gradients, _ = tf.clip_by_global_norm(gradients, LIMIT)
        if finite:
            training.optimizer.apply(gradients, variables)
        scale = scale if finite else scale / 2
        scales.append(scale)
    return training, scales


def hold_the_rule(replicas: int, clip: str, update: Callable[..., None]) -> None:
    """Trains by the twenty lines of DESIGN, with ``update(strategy, ...)`` as the last but one."""
    strategy = strategy_of(replicas)
    training = build(strategy, functools.partial(keras.optimizers.SGD, 0.1, **CLIPS[clip]))
    variables = training.model.trainable_variables
    with strategy.scope():
        window = tmg.GradientAccumulator(variables)
        scale = tmg.LossScale(1024.0)

    def replica(batch: Batch) -> None:
        x, y, weights = batch
        with tf.GradientTape() as tape:
            outputs = training.model(x, training=True)
            pair = tmg.loss_sum(training.loss, y, outputs, weights)
            target = scale.scale_loss(pair.sum)
        window.add(tape.gradient(target, variables), pair.weight)

    scales = []
    for batches in weighted_windows():
        for shard in shards_of(batches, strategy, "tf"):
            strategy.run(replica, args=(shard,))
        gradients, finite = scale.unscale(window.reduce()[0])
        if clip == "clip_gradients":
            gradients, _ = tmg.clip_gradients(gradients, LIMIT)
        update(strategy, training.optimizer, gradients, variables, finite)
        scale.update(finite)
        scales.append(float(scale.value()))
    truth, expected = scaled_on_one_device(clip)
    assert scales == expected
    assert expected[1] == 512.0
    hold(training, truth)


# Fails if a replica decides by its own part whether, or how far, to clip or to skip; if the scale
# is not taken out again; or if an infinite window leaves something in the next one.
@pytest.mark.parametrize(("replicas", "clip"), [(2, "global_clipnorm"), (3, "clip_gradients")])
def test_loss_scale_and_clipping_alone_decide_once(replicas: int, clip: str) -> None:
    def update(strategy: Any, optimizer: Any, gradients: Any, variables: Any, finite: Any) -> None:
        if finite:
            apply_once(strategy, optimizer, gradients, variables)

    hold_the_rule(replicas, clip, update)


# Fails if ``where=`` updates, counts a step or moves a slot although a gradient is not finite, or
# if clipping set on the optimizer clips each replica's part.
@pytest.mark.parametrize(
    ("replicas", "clip"),
    [(1, "clip_gradients"), (2, "clipnorm"), (3, "global_clipnorm"), (2, "clipvalue")],
)
def test_the_one_rule_of_composition(replicas: int, clip: str) -> None:
    def update(strategy: Any, optimizer: Any, gradients: Any, variables: Any, finite: Any) -> None:
        tmg.apply_reduced_gradients(optimizer, gradients, variables, where=finite)

    hold_the_rule(replicas, clip, update)


# Fails if the one call clips before it unscales, or by the part of a replica; if it updates where
# a gradient is not finite; or if it leaves the scale as it is.
def test_apply_does_all_of_it_in_the_right_order() -> None:
    strategy = strategy_of(2)
    training = build(strategy, functools.partial(keras.optimizers.SGD, 0.1))
    variables = training.model.trainable_variables
    with strategy.scope():
        window = tmg.GradientAccumulator(variables)
        scale = tmg.LossScale(1024.0)

    def replica(batch: Batch) -> None:
        x, y, weights = batch
        with tf.GradientTape() as tape:
            outputs = training.model(x, training=True)
            pair = tmg.loss_sum(training.loss, y, outputs, weights)
            target = scale.scale_loss(pair)
        window.add(tape.gradient(target, variables), pair)

    @tf.function
    def update() -> Any:
        return window.apply(training.optimizer, scale=scale, clip_norm=LIMIT)

    scales, valid, clipped = [], [], []
    for batches in weighted_windows():
        for shard in shards_of(batches, strategy, "tf"):
            strategy.run(replica, args=(shard,))
        norm, updated = update()
        valid.append(bool(updated))
        clipped.append(bool(norm > LIMIT) and bool(updated))
        scales.append(float(scale.value()))
    truth, expected = scaled_on_one_device("clip_gradients")
    assert scales == expected
    assert valid == [True, False, True, True]
    assert sum(clipped) == 1  # The norm is of the gradient before.
    hold(training, truth)


def differently(window: Any, scale: Any, optimizer: Any) -> dict[str, Callable[[], object]]:
    """Returns what somebody may write after ``strategy.run`` whose losses carry a scale."""

    def update(gradients: Any) -> None:
        tmg.apply_reduced_gradients(optimizer, gradients, window.variables)

    return {
        "no unscale": lambda: update(window.reduce()[0]),
        "apply without the scale": lambda: window.apply(optimizer),
        "clip first": lambda: tmg.clip_gradients(window.reduce()[0], 1.0),
        "unscale twice": lambda: scale.unscale(scale.unscale(window.reduce()[0])[0]),
        "reduce twice": lambda: (window.reduce(), update(scale.unscale(window.reduce()[0])[0])),
        "apply in a replica": lambda: strategy_of(2).run(window.apply, args=(optimizer,)),
    }


# Fails if a scaled gradient is applied, clipped before it is unscaled, or unscaled twice, in
# silence; if an empty window moves weights; or if it is not seen that a loss was not scaled at all,
# or was by the optimizer.
def test_a_wrong_order_by_hand_is_told() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        weight = keras.Variable([1.0])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        wrapped = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        window, scale = tmg.GradientAccumulator([weight]), tmg.LossScale(8.0)

    def add(target_of: Any, variable: Any = weight) -> None:
        def replica() -> None:
            with tf.GradientTape() as tape:
                pair = tmg.loss_sum("mse", tf.constant([[2.0]]), variable.value[None])
                target = target_of(pair)
            window.add(tape.gradient(target, [weight.value]), pair)

        strategy.run(replica)

    for wrong in differently(window, scale, optimizer):
        add(scale.scale_loss)
        with pytest.raises(tmg.TfMultiGpuError):
            differently(window, scale, optimizer)[wrong]()
        window.reduce()
    add(lambda pair: pair.sum)
    with pytest.raises(tmg.TfMultiGpuError, match="scale_loss"):
        window.apply(optimizer, scale=scale)
    add(lambda pair: wrapped.scale_loss(pair.sum))
    with pytest.raises(tmg.TfMultiGpuError, match="scale_loss"):
        window.apply(wrapped)
    with pytest.raises(tmg.errors.LossError, match="No gradient"):
        add(lambda pair: pair.sum, keras.Variable([1.0]))
    assert float(weight[0]) == 1.0
    add(scale.scale_loss)
    _, valid = window.apply(wrapped, scale=scale)
    assert valid
    np.testing.assert_allclose(weight[0], 1.2, rtol=1e-6)


def float16_model(strategy: Any) -> tuple[Any, Any]:
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, dtype="mixed_float16")])
        optimizer = keras.optimizers.SGD(0.125)
        optimizer.build(model.trainable_variables)
    return model, optimizer


def float16_on_one_device(batches: list[Batch]) -> list[list[np.ndarray]]:
    """Returns the weights after each batch: scaled by 1024, halved and skipped at an overflow."""
    model, optimizer = float16_model(tf.distribute.get_strategy())
    weights, scale = [], 1024.0
    for x, y in batches:
        with tf.GradientTape() as tape:
            outputs = tf.cast(model(x, training=True), tf.float32)
            loss = scale * tf.reduce_mean(tf.square(y - outputs))
        gradients = tape.gradient(loss, model.trainable_variables)
        if all(np.isfinite(gradient).all() for gradient in gradients):
            optimizer.apply([one / scale for one in gradients], model.trainable_variables)
        else:
            scale /= 2
        weights.append(model.get_weights())
    return weights


# Fails if an overflow of float16 on one replica alone changes a weight on any, or is not counted.
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_float16_overflow_on_one_replica_skips_the_step_on_all(replicas: int) -> None:
    batches = [tuple(part.astype("float32") for part in one) for one in regression([6, 3, 5])]
    batches[1][1][2] = 3e4  # Times 1024 its gradient is beyond float16; on the last replica only.
    strategy = strategy_of(replicas)
    model, optimizer = float16_model(strategy)
    variables = model.trainable_variables
    with strategy.scope():
        window = tmg.GradientAccumulator(variables)
        scale = tmg.LossScale(1024.0)

    def replica(batch: Batch) -> None:
        with tf.GradientTape() as tape:
            pair = tmg.loss_sum("mse", batch[1], model(batch[0], training=True))
            target = scale.scale_loss(pair.sum)
        window.add(tape.gradient(target, variables), pair.weight)

    @tf.function
    def update() -> Any:
        gradients, finite = scale.unscale(window.reduce()[0])
        tmg.apply_reduced_gradients(optimizer, gradients, variables, where=finite)
        scale.update(finite)
        return finite

    finite, weights = [], []
    for shard in shards_of(batches, strategy, "tf"):
        strategy.run(replica, args=(shard,))
        finite.append(bool(update()))
        weights.append(model.get_weights())
    assert finite == [True, False, True]
    assert float(scale.value()) == 512.0
    assert int(optimizer.iterations.numpy()) == 2
    np.testing.assert_equal(weights[0], weights[1])
    # float16 has three digits.
    for one, other in zip(weights, float16_on_one_device(batches), strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)


def is_told(train: Callable[[], None]) -> bool:
    """Returns whether an error or a warning of the library came while something trained."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train()
        except tmg.errors.TfMultiGpuError:
            return True
    return any(
        one.category.__module__.startswith("tfmultigpu") or "tmg." in str(one.message)
        for one in caught
    )


def apply_by_hand(training: Training, strategy: Any, gradients_of: Any) -> None:
    variables = training.model.trainable_variables

    def replica(batch: Batch) -> None:
        training.optimizer.apply(gradients_of(batch, variables), variables)

    for shard in shards_of(regression([7, 5]), strategy, "tmg"):
        strategy.run(replica, args=(shard,))


# Fails if clipping set on the optimizer clips each replica's part in silence.
@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm", "clipvalue"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_global_mean_and_a_clipping_optimizer_is_right_or_told(replicas: int, clip: str) -> None:
    optimizer = functools.partial(keras.optimizers.SGD, 0.1, **TIGHT[clip])
    strategy = strategy_of(replicas)
    training = build(strategy, optimizer)

    def gradients_of(batch: Batch, variables: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = training.model(batch[0], training=True)
            loss = tmg.global_mean(tmg.loss_sum(training.loss, batch[1], outputs))
        return tape.gradient(loss, variables)

    if not is_told(lambda: apply_by_hand(training, strategy, gradients_of)):
        hold(training, on_one_device(regression([7, 5]), optimizer))


# Fails if the optimizer adds reduced gradients over the replicas once more in silence.
@pytest.mark.parametrize("replicas", [2, 3])
def test_reduce_and_the_optimizers_own_apply_is_right_or_told(replicas: int) -> None:
    strategy = strategy_of(replicas)
    training = build(strategy)
    with strategy.scope():
        window = tmg.GradientAccumulator(training.model.trainable_variables)

    def gradients_of(batch: Batch, variables: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = training.model(batch[0], training=True)
            pair = tmg.loss_sum(training.loss, batch[1], outputs)
        window.add(tape.gradient(pair.sum, variables), pair.weight)
        return window.reduce()[0]

    if not is_told(lambda: apply_by_hand(training, strategy, gradients_of)):
        hold(training, on_one_device(regression([7, 5])))
