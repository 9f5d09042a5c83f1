"""Each block in a loop written for plain ``tf.distribute`` is as right as what it replaces.

The loops are the users': their own ``strategy.run``, ``GradientTape`` and, if named, ``apply``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.by_hand import apply_once, build, hold, merged, on_one_device, shards_of, windows
from law.model import FLOAT, Batch, regression
from law.pair import strategy_of
from law.plain import PlainLoop

import tfmultigpu as tmg

SIZES = (7, 3, 1)  # The last batch has one row, fewer than there are replicas.


@functools.cache
def trained_by_hand(replicas: int, distribute: str) -> dict[str, Any]:
    """Trains by the loop of a user who divides by the true size, and counts as users do."""
    batches = regression(SIZES)
    strategy = strategy_of(replicas)
    training = build(strategy)
    with strategy.scope():
        metric = keras.metrics.MeanAbsoluteError(**FLOAT)

    def replica(batch: Batch, size: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            outputs = training.model(x, training=True)
            errors = tf.reduce_mean(tf.square(y - outputs), -1)
            loss = tf.reduce_sum(errors) / tf.cast(size, tf.float64)
        variables = training.model.trainable_variables
        training.optimizer.apply(tape.gradient(loss, variables), variables)
        metric.update_state(y, outputs)
        context = tf.distribute.get_replica_context()
        return loss, context.all_reduce("SUM", tf.shape(x)[0]), x

    losses, counts, rows = [], [], []
    for batch, size in zip(shards_of(batches, strategy, distribute), SIZES, strict=True):
        loss, count, x = strategy.run(replica, args=(batch, tf.constant(size)))
        losses.append(float(strategy.reduce("SUM", loss, axis=None)))
        counts.append(int(strategy.experimental_local_results(count)[0]))
        rows += [np.asarray(one) for one in strategy.experimental_local_results(x)]
    return {
        "training": training,
        "losses": losses,
        "counts": counts,
        "metric": float(metric.result()),
        "rows": np.concatenate(rows),
    }


@functools.cache
def expected_by_hand() -> dict[str, Any]:
    """Returns the same of one device."""
    batches = regression(SIZES)
    training = build()
    loop = PlainLoop(training, batches[0])
    metric, losses = keras.metrics.MeanAbsoluteError(**FLOAT), []
    for batch in batches:
        metric.update_state(batch[1], training.model(batch[0]))
        losses.append(loop.step(batch)["loss"])
    return {
        "training": training,
        "losses": losses,
        "counts": list(SIZES),
        "metric": float(metric.result()),
        "rows": np.concatenate([x for x, _ in batches]),
    }


def hold_by_hand(replicas: int, distribute: str, what: str) -> None:
    actual, expected = trained_by_hand(replicas, distribute)[what], expected_by_hand()[what]
    if what == "training":
        hold(actual, expected)
    else:
        assert np.shape(actual) == np.shape(expected), what
        np.testing.assert_allclose(actual, expected, 1e-9, err_msg=what)


# Fails if the factory returns anything but a plain strategy over these devices, or if creating one
# changes what Keras and TensorFlow do in loops that never heard of this library.
@pytest.mark.parametrize("replicas", [2, 3])
def test_the_factory_alone_changes_nothing_in_a_loop_of_tf_distribute(replicas: int) -> None:
    for what in ("training", "losses", "counts", "metric", "rows"):
        hold_by_hand(replicas, "tf", what)


# Fails if a batch smaller than the replicas is anything but a partition in a user's own loop: its
# row would count N times in a sum divided by the true size ("training", "losses"), in a count
# ("counts"), in a metric, or among what is collected ("rows").
@pytest.mark.parametrize("what", ["training", "losses", "counts", "metric", "rows"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_distribute_dataset_alone_is_a_partition(replicas: int, what: str) -> None:
    hold_by_hand(replicas, "tmg", what)


# Fails if batches that are not smaller than the replicas are cut into anything but a partition.
@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.more)])
def test_distribute_dataset_alone_in_a_compiled_loop(replicas: int) -> None:
    batches = regression([7, 5, 3])
    strategy = strategy_of(replicas)
    training = build(strategy)

    def replica(batch: Batch) -> None:
        x, y = batch
        rows = tf.distribute.get_replica_context().all_reduce("SUM", tf.shape(x)[0])
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean(tf.square(y - training.model(x, training=True)), -1)
            loss = tf.reduce_sum(errors) / tf.cast(rows, tf.float64)
        variables = training.model.trainable_variables
        training.optimizer.apply(tape.gradient(loss, variables), variables)

    @tf.function
    def epoch(iterator: Any, steps: Any) -> None:
        for _ in tf.range(steps):
            strategy.run(replica, args=(next(iterator),))

    epoch(shards_of(batches, strategy, "tmg"), tf.constant(3))
    hold(training, on_one_device(batches))


# Fails if a step needs our own strategy or our own data, or if it trains on in silence where
# TensorFlow's own distribution leaves a replica without rows.
@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.more)])
def test_a_step_alone_beside_a_strategy_and_data_of_tensorflow(replicas: int) -> None:
    batches = regression([7, 5, 1])
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    training = build(strategy)
    step = tmg.make_train_step(training.model, training.optimizer, training.loss, strategy)
    truth = build()
    plain = PlainLoop(truth, batches[0])
    *shards, small_batch = shards_of(batches, strategy, "tf")
    for shard, logs in zip(shards, plain.train(batches[:2]), strict=True):
        np.testing.assert_allclose(step(shard)["loss"], logs["loss"], rtol=5e-7)
    hold(training, truth)
    try:
        step(small_batch)
    except tmg.errors.TfMultiGpuError:
        hold(training, truth)  # Told, and nothing has changed.
    else:
        plain.train(batches[2:])
        hold(training, truth)


# Fails if the accumulator divides before the window ends, by the number of micro-batches or of
# replicas, keeps a window for the next, or if the update adds over the replicas once more.
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.more), 2, 3])
def test_the_accumulator_alone_over_uneven_windows(replicas: int) -> None:
    sizes = [(7, 1), (3,), (1, 1, 5), (1,)]
    optimizer = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9, global_clipnorm=0.5)
    expected = on_one_device([merged(window) for window in windows(sizes)], optimizer)
    strategy = strategy_of(replicas)
    training = build(strategy, optimizer)
    variables = training.model.trainable_variables
    with strategy.scope():
        window = tmg.GradientAccumulator(variables)

    def replica(batch: Batch) -> None:
        with tf.GradientTape() as tape:
            pair = tmg.loss_sum(training.loss, batch[1], training.model(batch[0], training=True))
        window.add(tape.gradient(pair.sum, variables), pair.weight)

    for batches in windows(sizes):
        for shard in shards_of(batches, strategy, "tf"):
            strategy.run(replica, args=(shard,))
        assert window.count == len(batches)
        gradients, weight = window.reduce()
        assert float(weight) == sum(len(x) for x, _ in batches)
        assert window.count == 0
        apply_once(strategy, training.optimizer, gradients, variables)
    hold(training, expected)
    assert int(training.optimizer.iterations.numpy()) == len(sizes)


# Fails if a model outside every scope trains, or is evaluated, on one device in silence although
# there is a strategy of several replicas.
CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "fit": lambda model, x, y: tmg.fit(model, x, y, batch_size=4, verbose=0),
    "evaluate": lambda model, x, y: tmg.evaluate(model, x, y, batch_size=4),
    "predict": lambda model, x, y: tmg.predict(model, x, batch_size=4),
    "make_train_step": lambda model, x, y: tmg.make_train_step(model, model.optimizer, "mse"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_model_outside_every_scope_is_refused(call: str) -> None:
    strategy = strategy_of(2)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    before = model.get_weights()
    ((x, y),) = regression([8])
    with pytest.raises(tmg.ScopeError, match="scope"):
        CALLS[call](model, x, y)
    assert strategy.num_replicas_in_sync == 2
    np.testing.assert_equal(before, model.get_weights())
