"""Goes wrong in each way that needs a process to itself, and prints what was raised.

TensorFlow and Keras are imported once; each event runs in a copy of the process in which TensorFlow
has started nothing.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.steps.failures import explaining_failures

X, Y = np.ones((5, 3), "float32"), np.ones((5, 1), "float32")


def grow_memory_of_one_of_two_gpus() -> None:
    """Plants two GPUs where TensorFlow lists those of the driver."""
    from tensorflow.python.eager.context import pywrap_tfe

    names = [b"/physical_device:CPU:0", b"/physical_device:GPU:0", b"/physical_device:GPU:1"]
    pywrap_tfe.TF_ListPhysicalDevices = lambda: names
    pywrap_tfe.TF_GetDeviceDetails = lambda index: {"device_name": "H200"} if index else {}
    tf.config.experimental.set_memory_growth(tf.config.list_physical_devices("GPU")[0], True)


def memory_growth_of_one_gpu() -> None:
    grow_memory_of_one_of_two_gpus()
    tmg.create_strategy()


def memory_growth_of_one_gpu_of_a_worker() -> None:
    grow_memory_of_one_of_two_gpus()
    with socket.socket() as one, socket.socket() as other:
        one.bind(("localhost", 0))
        other.bind(("localhost", 0))
        workers = [f"localhost:{listener.getsockname()[1]}" for listener in (one, other)]
    task = {"type": "worker", "index": 0}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    tmg.create_strategy(startup_timeout=1)


def two_rings_over_different_devices() -> None:
    tmg.testing.virtual_devices(3)

    def adding_on(*devices: str) -> Callable[[], None]:
        strategy = tf.distribute.MirroredStrategy(devices)

        def add() -> Any:
            return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([3]))

        def run() -> None:
            with explaining_failures(strategy):
                strategy.run(add)

        return run

    first, second = adding_on("CPU:0", "CPU:1"), adding_on("CPU:0", "CPU:1", "CPU:2")
    first()
    try:
        second()
    except tmg.errors.StrategyUnavailableError:
        first()


def another_backend() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "keras"]:
        del sys.modules[name]
    os.environ["KERAS_BACKEND"] = "jax"
    tmg.make_train_step(None, None, "mse")


class Hungry(keras.layers.Layer):
    """Needs more memory than there is, for more than two rows."""

    def call(self, inputs: Any) -> Any:
        size = tf.where(tf.shape(inputs)[0] > 2, tf.constant(2**50, tf.int64), 1)
        return inputs + tf.reduce_max(tf.fill([size], tf.reduce_max(inputs) * 0.0))


def out_of_memory() -> int:
    """Returns how many steps were counted, if nothing was raised before."""
    tmg.testing.virtual_devices(2)
    strategy = tmg.create_strategy(devices=["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Hungry(), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    try:
        # Two rows and three: TensorFlow waits ten seconds for memory on each replica that lacks it.
        step((X, Y))
    finally:
        assert int(optimizer.iterations.numpy()) == 0
    return 1


EVENTS: tuple[Callable[[], Any], ...] = (
    memory_growth_of_one_gpu,
    memory_growth_of_one_gpu_of_a_worker,
    two_rings_over_different_devices,
    another_backend,
    out_of_memory,
)


def main() -> None:
    for event in EVENTS:
        child = os.fork()
        if child == 0:
            raised: dict[str, str] = {"type": "nothing", "text": ""}
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    event()
            except BaseException as error:
                raised = {"type": type(error).__name__, "text": str(error)}
                traceback.print_exc()
            print(json.dumps({"event": event.__name__, **raised}), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
