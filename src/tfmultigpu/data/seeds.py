"""Seed of a run, for the order of arrays and for preprocessing."""

from __future__ import annotations

import tensorflow as tf

from tfmultigpu.strategies.worker_exchange import WorkerExchange


def draw_seed(strategy: tf.distribute.Strategy) -> int:
    """Draws a seed that ``keras.utils.set_random_seed`` decides; all workers must call it.

    Draws it from TensorFlow's global seed, as Keras does to shuffle. From ``random`` Keras draws
    the initial weights: a model that is created afterwards would begin with other ones.
    """
    with tf.device("CPU:0"):
        own = int(tf.random.uniform([], maxval=2**31 - 1, dtype=tf.int32))
    return int(WorkerExchange(strategy)("the seed of the data", [own])[0, 0])
