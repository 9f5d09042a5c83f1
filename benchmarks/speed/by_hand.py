"""The loops a careful person writes without this library, and Keras ``fit``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from speed.contenders import STEPS_PER_CALL, Contender, make_optimizer, timed
from speed.workloads import Workload

__all__ = ["fit", "on_one_device", "under_strategy"]


def on_one_device(workload: Workload) -> Iterator[Contender]:
    """A step as a ``tf.function``, without a strategy."""

    def make() -> tuple[Any, Callable[[Any], Any]]:
        model = workload.model()
        optimizer = make_optimizer(model)

        def step(batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                losses = _losses(model, x, y)
                loss = tf.reduce_mean(losses)
            optimizer.apply(tape.gradient(loss, model.trainable_variables))
            return loss

        return model, step

    yield from _three_loops("one_device", make, lambda: iter(workload.dataset()))


def under_strategy(
    name: str, workload: Workload, strategy: tf.distribute.Strategy
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
            optimizer.apply([gradient / rows for gradient in gradients])
            return loss / rows

        def step(batch: Any) -> Any:
            loss = strategy.run(replica_step, args=(batch,))
            return strategy.experimental_local_results(loss)[0]

        return model, step

    def data() -> Any:
        return iter(strategy.experimental_distribute_dataset(workload.dataset()))

    yield from _three_loops(name, make, data)


def fit(workload: Workload, strategy: tf.distribute.Strategy) -> Contender:
    """Keras ``fit`` without a progress bar."""
    import keras

    with strategy.scope():
        model = workload.model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss)

    class Clock(keras.callbacks.Callback):
        """Notes the end of each step: what ``fit`` sets up before the first is left out."""

        def __init__(self) -> None:
            super().__init__()
            self.ends: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())

    def train(steps: int) -> float:
        clock = Clock()
        model.fit(
            workload.dataset(), steps_per_epoch=steps, verbose=0, shuffle=False, callbacks=[clock]
        )
        return (clock.ends[-1] - clock.ends[0]) / (steps - 1)

    return Contender("fit", model, train)


def _losses(model: Any, x: Any, y: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))


def _three_loops(
    name: str, make: Callable[[], tuple[Any, Callable[[Any], Any]]], data: Callable[[], Any]
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

    yield with_batch()
    yield with_iterator()
    yield many_steps()
