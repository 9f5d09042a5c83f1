"""Trains or evaluates on data that comes slowly, until something happens to one of the workers."""

from __future__ import annotations

import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

event = sys.argv[1]
strategy = tmg.create_strategy()
me = tmg.workers.cluster_from_environment().index
x = np.ones((8, 2), "float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")


class Hook(keras.callbacks.Callback):
    """Says when training is under way, and fails if that is the event."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 4:
            print("READY", flush=True)
        if batch == 6 and me == 1 and event == "error":
            raise ValueError("my own")


def slowly():
    while True:
        time.sleep(0.2)
        yield x, x[:, :1]


if event == "freeze":
    tmg.evaluate(model, (x, x[:, :1]), batch_size=4)
    print("READY", flush=True)
    while True:
        tmg.evaluate(model, (x, x[:, :1]), batch_size=4)
specs = tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1])
data = tf.data.Dataset.from_generator(slowly, output_signature=specs)
tmg.fit(model, data, steps_per_epoch=10**6, callbacks=[Hook()], verbose=0)
