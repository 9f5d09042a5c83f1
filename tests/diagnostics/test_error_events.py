"""What goes wrong in training and needs a process to itself, raised for real."""

from __future__ import annotations

from typing import Any

import pytest
from diagnosed import provoke

PRELUDE = """
virtual_cpus(2)
x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")

def two():
    return tmg.create_strategy(devices=["CPU:0", "CPU:1"])

def build(*layers):
    return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
"""
HUNGRY = """
class Hungry(keras.layers.Layer):
    def call(self, inputs):
        many = tf.shape(inputs)[0] > 2
        size = tf.where(many, tf.constant(2**50, tf.int64), 1)
        return inputs + tf.reduce_max(tf.fill([size], tf.reduce_max(inputs) * 0.0))
strategy = two()
with strategy.scope(): model, optimizer = build(Hungry()), keras.optimizers.SGD(0.1)
step = tmg.make_train_step(model, optimizer, "mse", strategy)
kept = lambda: int(optimizer.iterations.numpy())
# Two rows and three: TensorFlow waits ten seconds for memory on each replica that lacks it.
step((x[:5], y[:5]))
"""
GROWS = """
driver(2); tensorflow_sees(2)
tf.config.experimental.set_memory_growth(tf.config.list_physical_devices("GPU")[0], True)
"""
PORTS = """import json, os, socket
def free():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]
def cluster(*ports, index=0):
    workers = [f"localhost:{port}" for port in ports]
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
"""


def event(error: str, says: str, code: str, kept: Any = ""):
    return error, says, kept, {"code": code, "raises": True}


EVENTS = {
    "memory growth of one GPU": event(
        "TfMultiGpuError",
        "Memory growth cannot differ between GPU devices. Write tmg.enable_memory_growth(), for "
        "all GPUs, in place of",
        GROWS + "tmg.create_strategy()",
    ),
    "memory growth of one GPU of a worker": event(
        "ClusterError",
        "Memory growth cannot differ between GPU devices. Write tmg.enable_memory_growth(), for "
        "all GPUs, in place of",
        GROWS + PORTS + "cluster(free(), free())\ntmg.create_strategy(startup_timeout=1)",
    ),
    "two rings over different devices": event(
        "StrategyUnavailableError",
        "it aborts both, and whatever else adds so, until the process restarts",
        "virtual_cpus(3)\n"
        "from tfmultigpu.steps.failures import explaining_failures\n"
        "def adding_on(*devices):\n"
        "    strategy = tf.distribute.MirroredStrategy(devices)\n"
        "    def add():\n"
        "        context = tf.distribute.get_replica_context()\n"
        "        return context.all_reduce('SUM', tf.ones([3]))\n"
        "    def run():\n"
        "        with explaining_failures(strategy): strategy.run(add)\n"
        "    return run\n"
        "first, second = adding_on('CPU:0', 'CPU:1'), adding_on('CPU:0', 'CPU:1', 'CPU:2')\n"
        "first()\n"
        "try: second()\n"
        "except tmg.errors.StrategyUnavailableError: second = None\n"
        "assert second is None\n"
        "first()",
    ),
    "another backend": event(
        "TfMultiGpuError",
        'set os.environ["KERAS_BACKEND"] = "tensorflow"',
        "import os\n"
        "for name in list(sys.modules):\n"
        "    if name.split('.')[0] == 'keras': del sys.modules[name]\n"
        "os.environ['KERAS_BACKEND'] = 'jax'\n"
        "tmg.make_train_step(None, None, 'mse')",
    ),
    "out of memory": event(
        "OutOfMemoryError",
        "Replica 1 (CPU:1) has not enough memory for this step. Received: a global batch of 5 rows",
        PRELUDE + HUNGRY,
        kept=0,
    ),
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return provoke({name: settings for name, (*_, settings) in EVENTS.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", EVENTS)
def test_each_event_is_an_error_that_says_what_to_do(found: Any, name: str) -> None:
    error, says, kept, _ = EVENTS[name]
    outcome = found[name]
    assert (outcome["type"], outcome["kept"]) == (error, kept), outcome["text"]
    assert says in outcome["text"]
