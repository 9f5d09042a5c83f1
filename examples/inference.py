"""One saved model on every GPU: predict a large set, each example once, in order.

The usual answer loads the model outside the scope, so that one GPU works, or starts a process per
GPU and puts the pieces together by hand. In a ``strategy.run`` by hand the results come as
``PerReplica`` values of different sizes, one of them empty where there are too few rows.

``load_model`` in the scope puts a copy on every device; ``make_predict_step`` returns the rows of
each global batch once and in their order, also for one row on several replicas.
"""

import tempfile
from pathlib import Path

import keras
import numpy as np

import tfmultigpu as tmg

rng = np.random.default_rng(0)
images = rng.normal(size=(131, 8, 8, 1)).astype("float32")  # 2 batches of 64, one of 3


def save_some_model(path):
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization(), keras.layers.Flatten()]
    head = keras.layers.Dense(10, "softmax")
    keras.Sequential([keras.Input((8, 8, 1)), *hidden, head]).save(path)


def predict(path, strategy, rows):
    with strategy.scope():
        model = keras.models.load_model(path)
    step = tmg.make_predict_step(model, strategy)
    data = tmg.distribute_dataset(images[:rows], strategy, batch_size=64)
    return np.concatenate([step(batch) for batch in data])


gpus = tmg.devices.list_logical_devices("GPU")
devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=3)
several = tmg.create_strategy(devices=devices)
single = tmg.create_strategy(devices=devices[:1])
differences = []
with tempfile.TemporaryDirectory() as directory:
    path = Path(directory) / "model.keras"
    save_some_model(path)
    for rows in (131, 65, 2, 1):
        ours, reference = predict(path, several, rows), predict(path, single, rows)
        assert ours.shape == reference.shape == (rows, 10)
        differences.append(np.abs(ours - reference).max())
print(f"{len(devices)} replicas, largest difference to one device: {max(differences):.1e}")
assert max(differences) < 1e-3
