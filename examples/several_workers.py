"""Several workers: one program, started once on every machine.

The usual answer writes TF_CONFIG, creates a ``MultiWorkerMirroredStrategy`` and calls ``fit``. With
Keras 3 that stops ("Attempt to convert a value (PerReplica:..."). A TF_CONFIG without a cluster
makes each worker train alone, without a word; a worker that does not come up makes the others wait
for an hour; with fewer files than workers TensorFlow's sharding fails.

``create_strategy`` reads TF_CONFIG or Slurm strictly, so that a mistake is an error in seconds.
Every worker runs the same pipeline and takes its rows of each batch. Here ``run_workers`` starts
two processes of this machine. For yours: ``python -m tfmultigpu launch --workers 2 train.py``.
"""

import os
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np

import tfmultigpu as tmg

rng = np.random.default_rng(0)
x = rng.normal(size=(205, 16)).astype("float32")  # 6 batches of 32 and one of 13
y = (x @ rng.normal(size=16) > 0).astype("int32")


def train(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((16,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = tmg.make_train_step(model, optimizer, loss, strategy)
    for batch in tmg.distribute_dataset((x, y), strategy, batch_size=32):  # of all workers together
        step(batch)
    return model.get_weights()


if len(sys.argv) > 1:  # a worker: the first thing after the imports is the strategy
    strategy = tmg.create_strategy(prefer="multi_worker", fallback=False, startup_timeout=60.0)
    np.savez(Path(sys.argv[1]) / f"{os.getpid()}.npz", *train(strategy))
else:
    with tempfile.TemporaryDirectory() as folder:
        tmg.testing.run_workers(__file__, workers=2, args=[folder])
        workers = [list(np.load(path).values()) for path in Path(folder).iterdir()]
    reference = train(tmg.create_strategy(devices=["CPU:0"]))
    pairs = [pair for weights in workers for pair in zip(weights, reference, strict=True)]
    difference = max(np.abs(a - b).max() for a, b in pairs)
    print(f"{len(workers)} workers, largest weight difference to one device: {difference:.1e}")
    assert difference < 1e-3
