"""What it costs to cut a batch into shares, beside TensorFlow's even split."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["measure_splitting"]

SHAPE = (64, 64, 64, 3)  # rows, height, width, channels
_UNTIL_THE_PROCESS_ENDS: list[Any] = []  # TensorFlow's iterators are slow to let go of


def measure_splitting(rounds: int, steps: int) -> dict[str, Any]:
    """Times one loop by hand on the same images cut by TensorFlow and by this library.

    Call it in a new process. Everything computes with one thread, so that unequal shares take no
    longer than equal ones, and what is left is the cost of cutting and reading.

    Args:
        rounds: How often each has its turn.
        steps: Steps of a turn.

    Returns:
        For ``"reading"`` (a step that adds the pixels up) and ``"training"`` (forward and backward
        of a small convolution network): milliseconds of a step, by what cut, round by round.
    """
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

    import tfmultigpu as tmg

    strategy = tmg.create_strategy(devices=["CPU:0", "CPU:1"])
    rng = np.random.default_rng(0)
    images = rng.normal(size=SHAPE).astype("float32")
    labels = rng.integers(0, 10, SHAPE[0])
    dataset = tf.data.Dataset.from_tensors((images, labels)).repeat()
    sources = {
        "TensorFlow, even": strategy.experimental_distribute_dataset(dataset),
        "equal shares": tmg.distribute_dataset(dataset, strategy),
        "shares 3 : 1": tmg.distribute_dataset(dataset, strategy, shares=(3, 1)),
    }
    iterators = {name: iter(source) for name, source in sources.items()}
    _UNTIL_THE_PROCESS_ENDS.append((sources, iterators))
    return {
        "shape": list(SHAPE),
        "steps": steps,
        "reading": _timed(_adding(strategy), iterators, rounds, 4 * steps),
        "training": _timed(_training(strategy), iterators, rounds, steps),
    }


def _timed(
    step: Callable[[Any], Any], iterators: dict[str, Any], rounds: int, steps: int
) -> dict[str, list[float]]:
    for iterator in iterators.values():
        for _ in range(3):
            step(next(iterator))
    milliseconds: dict[str, list[float]] = {name: [] for name in iterators}
    names = list(iterators)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            iterator = iterators[name]
            began = time.perf_counter()
            for _ in range(steps):
                result = step(next(iterator))
            float(result)
            milliseconds[name].append(round((time.perf_counter() - began) / steps * 1e3, 4))
    return milliseconds


def _adding(strategy: Any) -> Callable[[Any], Any]:
    import tensorflow as tf

    @tf.function(reduce_retracing=True)
    def step(batch: Any) -> Any:
        totals = strategy.run(lambda images, labels: tf.reduce_sum(images), args=batch)
        return strategy.reduce("SUM", totals, axis=None)

    return step


def _training(strategy: Any) -> Callable[[Any], Any]:
    import keras
    import tensorflow as tf

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input(SHAPE[1:]),
                keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
                keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(10),
            ]
        )

    def replica(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            values = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, model(images, training=True)
            )
            loss = tf.reduce_sum(values) / SHAPE[0]
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        return loss + 1e-30 * tf.add_n([tf.reduce_sum(gradient) for gradient in gradients])

    @tf.function(reduce_retracing=True)
    def step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica, args=batch), axis=None)

    return step
