"""The same training through this library."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

import tfmultigpu as tmg
from speed.contenders import STEPS_PER_CALL, Contender, fitting, timed
from speed.workloads import Workload

__all__ = ["default_strategy", "fit", "with_library"]


def with_library(
    name: str, workload: Workload, strategy: tf.distribute.Strategy, **options: Any
) -> Iterator[Contender]:
    """One call per batch, and ten batches per call; ``options`` are for the step."""
    import keras

    def make() -> tuple[Any, Any, Any]:
        with strategy.scope():
            model = workload.model()
            optimizer = keras.optimizers.Adam(1e-3)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        step = tmg.make_train_step(model, optimizer, loss, strategy, **options)
        return model, step, iter(tmg.distribute_dataset(workload.dataset(), strategy))

    def one_call_per_batch() -> Contender:
        model, step, iterator = make()

        def loop(steps: int) -> Any:
            for batch in itertools.islice(iterator, steps):
                logs = step(batch)
            return logs["loss"]

        return Contender(name, model, timed(loop))

    def many_steps() -> Contender:
        model, step, iterator = make()

        def loop(steps: int) -> Any:
            for _ in range(steps // STEPS_PER_CALL):
                logs = step.run(iterator, STEPS_PER_CALL)
            return logs["loss"]

        return Contender(f"{name}10", model, timed(loop))

    yield one_call_per_batch()
    yield many_steps()


def fit(workload: Workload, strategy: tf.distribute.Strategy) -> Contender:
    """``tmg.fit``, with its progress bar and a metric."""
    import keras

    with strategy.scope():
        model = workload.model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    train = functools.partial(tmg.fit, model)
    return fitting("our_fit", model, workload, train, endless=False)


def default_strategy(devices: list[str]) -> tf.distribute.Strategy:
    """Returns the strategy a user of this library gets for these devices."""
    return tmg.create_strategy(devices=devices)
