"""Trains until the other worker is gone, and says what each way to compute makes of that."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.strategies.gathering import gather_rows

strategy = tmg.create_strategy()
me = tmg.workers.cluster_from_environment().index
x = np.arange(12, dtype="float32").reshape(6, 2)
y = x[:, :1] / 12
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    variables = [variable.value for variable in model.trainable_variables]
    accumulator = tmg.GradientAccumulator(variables)
step = tmg.make_train_step(model, model.optimizer, "mse", strategy)
evaluate = tmg.make_eval_step(model, "mse", strategy)
predict = tmg.make_predict_step(model, strategy)
data = tmg.distribute_dataset((x, y), strategy, batch_size=6)
(batch,) = list(data)
checkpoints = tmg.Checkpoints(sys.argv[1], train_step=step)


def reduce() -> Any:
    def replica() -> None:
        accumulator.add([tf.ones_like(variable) for variable in variables], 1.0)

    def window() -> Any:
        strategy.run(replica)
        return accumulator.reduce()[1]

    return tf.function(window)()


def by_hand() -> Any:
    with tmg.strategies.explaining_lost_workers():
        return reduce()


def gather() -> Any:
    spread = strategy.experimental_distribute_values_from_function
    return gather_rows(strategy, spread(lambda _: tf.ones([1, 1])))


calls: dict[str, Callable[[], Any]] = {
    "step": lambda: step(batch),
    "step.run": lambda: step.run(iter(data), 1),
    "eval step": lambda: evaluate(batch),
    "predict step": lambda: predict(batch),
    "evaluate": lambda: tmg.evaluate(model, (x, y), batch_size=6),
    "predict": lambda: tmg.predict(model, x, batch_size=6),
    "fit": lambda: tmg.fit(model, (x, y), batch_size=6, verbose=0),
    "accumulator": by_hand,
    "gather": gather,
    "checkpoint": checkpoints.save,
}
step(batch)
if me == 1:
    time.sleep(2.0)  # The other one has its result, too.
    os.kill(os.getpid(), signal.SIGKILL)
for name, call in calls.items():
    try:
        call()
        print(f"{name}: nothing")
    except Exception as error:
        text = str(error).replace("\n", " ")
        print(f"{name}: {type(error).__name__} {text}", flush=True)
