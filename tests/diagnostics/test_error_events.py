"""What goes wrong in training, raised for real: which error, how soon, and what is left unchanged.

The events that take several processes are held elsewhere; ``ELSEWHERE`` says where.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from diagnosed import provoke

PRELUDE = """
import logging, os, socket
virtual_cpus(2)
x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")

def two():
    return tmg.create_strategy(devices=["CPU:0", "CPU:1"])

def build(*layers):
    return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])

def make(strategy, **options):
    with strategy.scope(): model, optimizer = build(), keras.optimizers.SGD(0.1)
    return tmg.make_train_step(model, optimizer, "mse", strategy, **options)
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
PORTS = """import os, socket
def free():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]
def cluster(*ports, index=0):
    workers = [f"localhost:{port}" for port in ports]
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
"""


# Seconds in which an error is promised where there is something to wait for; a machine may be five
# times as slow. The others come at the call: one that never came would end the whole process.
PROMISED = {
    "memory growth of one GPU of a worker": 10.0,
    "no TPU": 5.0,
    "TF_CONFIG that is no JSON": 10.0,
    "an index out of range": 10.0,
    "an empty TF_CONFIG": 10.0,
    "a port that is taken": 10.0,
    "a worker that never comes up": 10.0,
}


def event(error: str, says: str, code: str, kept: Any = "", **environment: str):
    return error, says, kept, {"code": code, "environment": environment, "raises": True}


EVENTS = {
    "memory growth of one GPU": event(
        "DeviceSettingsError",
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
    "a device that does not exist": event(
        "DeviceNotFoundError",
        "No such device here: GPU:7. Asked for: CPU:0, GPU:7. Existing: CPU:0, CPU:1",
        PRELUDE + "tmg.create_strategy(devices=['CPU:0', 'GPU:7'])",
    ),
    "splitting after the start": event(
        "DevicesInitializedError",
        "Move this line up, directly after the imports",
        "tf.constant(1.0)\nkept = tmg.devices.list_logical_devices\ntmg.split_device('CPU:0', 2)",
        kept=["CPU:0"],
    ),
    "no GPU": event(
        "AssertionError",
        "No GPU: CUDA_VISIBLE_DEVICES='-1' hides them. Training runs on CPU:0",
        "import logging\nsaid = []\n"
        "class Keep(logging.Handler):\n"
        "    def emit(self, record): said.append(record.getMessage())\n"
        "logging.getLogger('tfmultigpu').addHandler(Keep())\n"
        "tmg.create_strategy(); raise AssertionError(said[0])",
        CUDA_VISIBLE_DEVICES="-1",
    ),
    "no TPU": event(
        "StrategyUnavailableError",
        "prefer='tpu': TPU_NAME='grpc://localhost:1': nothing listens there",
        "tmg.create_strategy(prefer='tpu', fallback=False)",
        TPU_NAME="grpc://localhost:1",
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
        "except tmg.StrategyUnavailableError: second = None\n"
        "assert second is None\n"
        "first()",
    ),
    "another backend": event(
        "KerasBackendError",
        'set os.environ["KERAS_BACKEND"] = "tensorflow"',
        "import os\n"
        "for name in list(sys.modules):\n"
        "    if name.split('.')[0] == 'keras': del sys.modules[name]\n"
        "os.environ['KERAS_BACKEND'] = 'jax'\n"
        "tmg.make_train_step(None, None, 'mse')",
    ),
    "a model outside the scope": event(
        "ScopeError",
        "The model was created outside the scope of the strategy",
        PRELUDE + "strategy, model = two(), build()\n"
        "tmg.make_train_step(model, keras.optimizers.SGD(0.1), 'mse', strategy)",
    ),
    "an optimizer outside the scope": event(
        "ScopeError",
        "The optimizer was created outside the scope of the strategy",
        PRELUDE + "strategy, optimizer = two(), keras.optimizers.SGD(0.1)\n"
        "with strategy.scope(): model = build()\n"
        "tmg.make_train_step(model, optimizer, 'mse', strategy)",
    ),
    "an unbatched dataset": event(
        "DataError",
        "dataset.batch(global_batch_size)",
        PRELUDE + "data = tf.data.Dataset.from_tensor_slices((x, y[:, 0]))\nstrategy = two()\n"
        "tmg.distribute_dataset(data, strategy)",
    ),
    "an empty dataset and a batch of one row": event(
        "",
        "",
        PRELUDE + "step = make(two())\n"
        "data = tmg.distribute_dataset((x[:1], y[:1]), step.strategy, batch_size=8)\n"
        "batch = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).take(0)\n"
        "empty = iter(tmg.distribute_dataset(batch, step.strategy))\n"
        "kept = lambda: [int(step.run(iter(data), 3)['steps']), int(step.run(empty, 3)['steps'])]\n"
        "pass",
        kept=[1, 0],
    ),
    "a gradient that is not finite": event(
        "",
        "",
        PRELUDE + "step = make(two(), loss_scale=1e38)\nbefore = step.model.get_weights()\n"
        "def kept():\n"
        "    logs = step((1e3 * x, y))\n"
        "    same = [(a == b).all() for a, b in zip(before, step.model.get_weights())]\n"
        "    count = int(step.optimizer.iterations.numpy())\n"
        "    return [float(logs['skipped']), bool(all(same)), count]\n"
        "pass",
        kept=[1.0, True, 0],
    ),
    "TF_CONFIG that is no JSON": event(
        "ClusterError", "TF_CONFIG: is not JSON", "tmg.create_strategy()", TF_CONFIG="{"
    ),
    "an index out of range": event(
        "ClusterError",
        "TF_CONFIG: task.index is out of range",
        "tmg.create_strategy()",
        TF_CONFIG=json.dumps(
            {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}
        ),
    ),
    "an empty TF_CONFIG": event(
        "ClusterError", "TF_CONFIG", "tmg.create_strategy()", TF_CONFIG="{}"
    ),
    "a port that is taken": event(
        "ClusterError",
        "is taken by another program. Stop it",
        "import json, os, socket\n" + PORTS + "taken = socket.socket()\n"
        "taken.bind(('localhost', 0)); taken.listen()\n"
        "cluster(taken.getsockname()[1], free())\n"
        "tmg.create_strategy(startup_timeout=3)",
    ),
    "a worker that never comes up": event(
        "ClusterError",
        "1 of 2 workers did not come within 2 s: worker 1 at localhost:",
        "import json, os, socket\n" + PORTS + "cluster(free(), free())\n"
        "tmg.create_strategy(startup_timeout=2)",
    ),
    "out of memory": event(
        "OutOfMemoryError",
        "Replica 1 (CPU:1) has not enough memory for this step. Received: a global batch of 5 rows",
        PRELUDE + HUNGRY,
        kept=0,
    ),
}
ELSEWHERE = {
    "workers that disagree on the cluster": (
        "workers/test_multi_worker_start.py",
        "test_workers_that_disagree_on_the_cluster_are_both_told",
    ),
    "workers that disagree on their devices": (
        "workers/test_multi_worker_start.py",
        "test_workers_that_bring_other_devices_or_communication_are_both_told",
    ),
    "a worker that dies": ("clusters/test_connection.py", "test_steps_name_a_lost_worker_too"),
    "all restarted from the last checkpoint": (
        "workers/test_launch_resume.py",
        "test_workers_that_get_a_signal_resume_to_the_same_bits",
    ),
    "SIGTERM": (
        "workers/test_checkpoints_workers.py",
        "test_a_signal_to_one_worker_stops_both_after_the_same_step",
    ),
    "a damaged checkpoint": (
        "checkpoints/test_manager.py",
        "test_a_damaged_checkpoint_is_passed_over_with_a_word",
    ),
    "memory growth too late": (
        "devices/test_configure_processes.py",
        "test_memory_growth_after_the_start_is_refused",
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
    if name in PROMISED:
        assert outcome["seconds"] < 5 * PROMISED[name]


@pytest.mark.parametrize("event", ELSEWHERE)
def test_the_other_events_have_a_test(event: str) -> None:
    file, name = ELSEWHERE[event]
    assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text()
