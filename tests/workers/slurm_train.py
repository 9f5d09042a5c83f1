"""A training for jobs of Slurm, to which happens what its first argument says."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

MODE, TASK, JOB = sys.argv[1], os.environ["SLURM_PROCID"], os.environ["SLURM_JOB_ID"]
IS_FIRST_START = "SLURM_RESTART_COUNT" not in os.environ
# What one task asks Slurm for. The signal comes later than the command ends, so all wait then.
COMMANDS = {
    "stopped": ["scancel", "--signal=TERM", JOB],
    "requeued": ["scontrol", "requeue", JOB],
    "smaller": ["scontrol", "requeuehold", JOB],
    "late": ["true"],  # Its time is over soon.
}


class Trouble(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        step = int(np.asarray(self.model.optimizer.iterations))
        print("step", step, flush=True)
        if MODE == "broken" and step == 3 and TASK == "1":
            raise RuntimeError("a program that is broken")
        if MODE == "killed" and step == 7 and TASK == "1" and IS_FIRST_START:
            os.kill(os.getpid(), signal.SIGKILL)
        if MODE in COMMANDS and step >= 3 and IS_FIRST_START:
            if step == 3 and TASK == "0":
                subprocess.run(COMMANDS[MODE], check=True)
            time.sleep(10.0 if MODE == "late" else 3.0)


strategy = tmg.create_strategy()
print("tasks", strategy.num_replicas_in_sync, flush=True)
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
with strategy.scope():
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3, seed=1)]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
number = os.environ.get("SLURM_ARRAY_TASK_ID", "")  # Each job of an array has its folder.
checkpoints = tmg.Checkpoints(f"checkpoints/{number}", model, model.optimizer)
print("restored", checkpoints.restore(), flush=True)
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)
options = {"epochs": 3, "verbose": 0, "verify": False, "logical_replicas": 2}
tmg.fit(model, data, callbacks=[Trouble(), checkpoints.callback()], **options)
if TASK == "0":
    np.savez(f"weights{number}.npz", *model.get_weights())
