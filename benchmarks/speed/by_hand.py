"""The loops a careful person writes without this library, and Keras ``fit``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from speed.contenders import STEPS_PER_CALL, Contender, fitting, make_optimizer, timed
from speed.workloads import Workload

__all__ = ["fit", "on_one_device", "under_strategy"]


def on_one_device(workload: Workload, *loops: str) -> Iterator[Contender]:
    """A step as a ``tf.function``, without a strategy, in these loops or the workload's."""

    def make() -> tuple[Any, Callable[[Any], Any]]:
        model = workload.model()
        optimizer = make_optimizer(model)

        def step(batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                losses = _losses(model, x, y)
                loss = tf.reduce_mean(losses)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply([tf.convert_to_tensor(gradient) for gradient in gradients])
            return loss

        return model, step

    yield from _loops("one_device", make, lambda: iter(workload.dataset()), loops or workload.forms)


def under_strategy(
    name: str, workload: Workload, strategy: tf.distribute.Strategy, *loops: str
) -> Iterator[Contender]:
    """The best loop on a strategy that is right for every batch.

    Model and optimizer are built in scope, and what the loss is divided by is the true number of
    rows, summed over the replicas together with the loss. (A constant global batch size would save
    nothing but that sum's second number, and be wrong for a partial batch.)
    """

    def make() -> tuple[Any, Callable[[Any], Any]]:
        with strategy.scope():
            model = workload.model()
            optimizer = make_optimizer(model)

        def replica_step(batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                losses = _losses(model, x, y)
                loss = tf.reduce_sum(losses)
            gradients = tape.gradient(loss, model.trainable_variables)
            context = tf.distribute.get_replica_context()
            local = tf.stack([loss, tf.cast(tf.size(losses), tf.float32)])
            loss, rows = tf.unstack(context.all_reduce("SUM", local))
            # Dense: optimizers would square the rows of a token that occurs twice one by one.
            optimizer.apply([tf.convert_to_tensor(gradient) / rows for gradient in gradients])
            return loss / rows

        def step(batch: Any) -> Any:
            loss = strategy.run(replica_step, args=(batch,))
            return strategy.experimental_local_results(loss)[0]

        return model, step

    def data() -> Any:
        return iter(strategy.experimental_distribute_dataset(workload.dataset()))

    yield from _loops(name, make, data, loops or workload.forms)


def fit(
    workload: Workload, strategy: tf.distribute.Strategy, *, endless: bool = False
) -> Contender:
    """Keras ``fit``, with its progress bar and a metric."""
    import keras

    with strategy.scope():
        model = workload.model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    train = functools.partial(model.fit, shuffle=False)
    name = "fit_endless" if endless else "fit"
    return fitting(name, model, workload, train, endless)


def _losses(model: Any, x: Any, y: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))


def _loops(
    name: str,
    make: Callable[[], tuple[Any, Callable[[Any], Any]]],
    data: Callable[[], Any],
    loops: tuple[str, ...],
) -> Iterator[Contender]:
    """The same step called with a batch, called with the iterator, and ten times in one call."""

    def with_batch() -> Contender:
        model, step = make()
        function, iterator = tf.function(step), data()

        def loop(steps: int) -> Any:
            for batch in itertools.islice(iterator, steps):
                loss = function(batch)
            return loss

        return Contender(f"{name}:batch", model, timed(loop))

    def with_iterator() -> Contender:
        model, step = make()
        iterator = data()

        @tf.function
        def function(iterator: Any) -> Any:
            return step(next(iterator))

        def loop(steps: int) -> Any:
            for _ in range(steps):
                loss = function(iterator)
            return loss

        return Contender(f"{name}:iterator", model, timed(loop))

    def many_steps() -> Contender:
        model, step = make()
        iterator = data()

        @tf.function
        def function(iterator: Any) -> Any:
            loss = tf.zeros([])
            for _ in tf.range(STEPS_PER_CALL):
                loss = step(next(iterator))
            return loss

        def loop(steps: int) -> Any:
            for _ in range(steps // STEPS_PER_CALL):
                loss = function(iterator)
            return loss

        return Contender(f"{name}10", model, timed(loop))

    if "batch" in loops:
        yield with_batch()
    if "iterator" in loops:
        yield with_iterator()
    yield many_steps()
