"""Several workers: one program, started once on every machine.

The usual answer writes TF_CONFIG, creates a ``MultiWorkerMirroredStrategy`` and calls ``fit``. With
Keras 3 that stops ("Attempt to convert a value (PerReplica:..."). A TF_CONFIG without a cluster
makes each worker train alone, without a word; a worker that does not come up makes the others wait
for an hour; with fewer files than workers TensorFlow's sharding fails.

``create_strategy`` reads TF_CONFIG strictly and meets the other workers first, so that a mistake is
an error in seconds. Every worker runs the same pipeline and takes its rows of each batch.

Here this script starts itself twice, on free ports of this machine. On a cluster start it once per
machine, with the same "cluster" and another "index" in TF_CONFIG.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np

import tfmultigpu as tmg

WORKERS, BATCH = 2, 32  # the batch of all workers together

rng = np.random.default_rng(0)
x = rng.normal(size=(205, 16)).astype("float32")  # 6 batches of 32 and one of 13
y = (x @ rng.normal(size=16) > 0).astype("int32")


def train(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = tmg.make_train_step(model, optimizer, loss, strategy)
    for batch in tmg.distribute_dataset((x, y), strategy, batch_size=BATCH):
        logs = step(batch)
    return model.get_weights(), float(logs["loss"])


def work(directory):
    """What every worker does; the first thing after the imports is the strategy."""
    strategy = tmg.create_strategy(prefer="multi_worker", fallback=False, startup_timeout=60.0)
    weights, loss = train(strategy)
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    print(f"worker {index} of {strategy.num_replicas_in_sync}: last loss {loss:.6f}", flush=True)
    np.savez(directory / f"{index}.npz", *weights)


def start_workers(directory):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(WORKERS)]
    addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in sockets]
    for server in sockets:
        server.close()
    processes = []
    for index in range(WORKERS):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = {"TF_CONFIG": json.dumps(config), "CUDA_VISIBLE_DEVICES": "-1"}
        command = [sys.executable, __file__, str(directory)]
        processes.append(subprocess.Popen(command, env=os.environ | environment))
    try:
        codes = [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()  # none outlives this script
    assert codes == [0] * WORKERS, f"the workers ended with {codes}"


def main():
    with tempfile.TemporaryDirectory() as name:
        start_workers(Path(name))
        found = [list(np.load(Path(name) / f"{i}.npz").values()) for i in range(WORKERS)]
    reference, loss = train(tmg.create_strategy(devices=["CPU:0"]))
    print(f"one device:    last loss {loss:.6f}")
    pairs = [pair for weights in found for pair in zip(weights, reference, strict=True)]
    difference = max(np.abs(a - b).max() for a, b in pairs)
    print(f"{WORKERS} workers, largest weight difference to one device: {difference:.1e}")
    assert difference < 1e-3


if __name__ == "__main__":
    work(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
