"""A training for jobs of Slurm: ``whole``, or ``broken``, in which one worker fails in a batch."""

import os
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg


class Slow(keras.callbacks.Callback):
    done = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.done += 1
        print("step", self.model.optimizer.iterations.numpy(), flush=True)
        time.sleep(0.5)
        if sys.argv[1] == "broken" and self.done == 3 and os.environ["SLURM_PROCID"] == "1":
            raise RuntimeError("a program that is broken")


strategy = tmg.create_strategy("multi_worker", fallback=False)
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
with strategy.scope():
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3, seed=1)]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
checkpoints = tmg.Checkpoints("checkpoints", model, model.optimizer)
checkpoints.restore()
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)
tmg.fit(model, data, epochs=3, callbacks=[Slow(), checkpoints.callback()], verbose=0)
if os.environ["SLURM_PROCID"] == "0":
    np.savez("weights.npz", *model.get_weights())
