"""A training for jobs of Slurm: ``whole``, ``broken`` (by an error), ``stopped`` (by scancel)."""

import os
import subprocess
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

MODE, TASK = sys.argv[1], os.environ["SLURM_PROCID"]


class Trouble(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        step = int(self.model.optimizer.iterations.numpy())
        print("step", step, flush=True)
        if MODE == "broken" and step == 3 and TASK == "1":
            raise RuntimeError("a program that is broken")
        if MODE == "stopped" and step >= 3 and "SLURM_RESTART_COUNT" not in os.environ:
            if step == 3 and TASK == "0":
                job = os.environ["SLURM_JOB_ID"]
                subprocess.run(["scancel", "--signal=TERM", job], check=True)
            time.sleep(3.0)  # The signal comes later than scancel ends.


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
callbacks = [Trouble(), checkpoints.callback()]
tmg.fit(model, data, epochs=3, callbacks=callbacks, verbose=0, verify=False)
if TASK == "0":
    np.savez("weights.npz", *model.get_weights())
