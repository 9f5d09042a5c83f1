"""The picture of README and start page: one training on 1, 2 and 4 replicas, here and in Keras.

``python docs/figures/same_curve.py`` trains each in a process and draws ``docs/same-curve.svg``.
Needs matplotlib.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

EPOCHS, EXAMPLES, LONGEST = 12, 516, 48
RUNS = [
    ("Keras fit", 1, "silver"),
    ("Keras fit", 2, "orange"),
    ("Keras fit", 4, "firebrick"),
    ("tmg.fit", 2, "dodgerblue"),
    ("tmg.fit", 4, "navy"),
]


def train(library: str, replicas: int) -> None:
    """Trains on padded texts of unequal length and prints the loss of each epoch."""
    import keras
    import tensorflow as tf

    import tfmultigpu as tmg

    devices = tmg.split_device("CPU:0", parts=4)
    random = np.random.default_rng(1)
    lengths = np.clip(np.exp(random.normal(1.8, 0.9, EXAMPLES)).astype(int), 2, LONGEST)
    x = random.normal(size=(EXAMPLES, LONGEST, 5)).astype("float32")
    # Each token has a tag: its largest number, moved on by one after each fourth token.
    y = (np.argmax(x, axis=-1) + np.arange(LONGEST) // 4) % 5
    x[np.arange(LONGEST) >= lengths[:, None]] = 0.0

    keras.utils.set_random_seed(1)
    if replicas == 1:
        strategy = tf.distribute.OneDeviceStrategy(devices[0])
    else:
        strategy = tf.distribute.MirroredStrategy(devices[:replicas])
    with strategy.scope():
        recurrent = keras.layers.GRU(32, return_sequences=True)
        layers = [keras.layers.Masking(), recurrent, keras.layers.Dense(5)]
        model = keras.Sequential([keras.Input((LONGEST, 5)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
    fit = tmg.fit if library == "tmg.fit" else keras.Model.fit
    print(json.dumps(fit(model, data, epochs=EPOCHS, verbose=0).history["loss"]))


def draw() -> None:
    """Trains all, checks what the text under the picture says, and draws."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "same", "font.size": 9})
    figure, (losses, distances) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    epochs = range(1, EPOCHS + 1)
    furthest = {}
    for library, replicas, colour in RUNS:
        command = [sys.executable, __file__, library, str(replicas)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        curve = np.array(json.loads(done.stdout.splitlines()[-1]))
        label = f"{library}, {replicas} replicas" if replicas > 1 else "Keras fit, one device"
        losses.plot(epochs, curve, color=colour, label=label, linewidth=6 if replicas == 1 else 1.5)
        if replicas == 1:
            expected = curve
            continue
        distance = np.abs(curve - expected)
        furthest[library, replicas] = distance.max()
        distances.semilogy(epochs, np.maximum(distance, 1e-8), color=colour)
    losses.set_title("Loss that fit reports, by epoch")
    losses.legend(frameon=False)
    distances.set_title("Distance to one device, logarithmic")
    distances.minorticks_off()
    figure.savefig(Path(__file__).parents[1] / "same-curve.svg", metadata={"Date": None})
    print(furthest)
    assert max(furthest["tmg.fit", 2], furthest["tmg.fit", 4]) < 5e-7
    assert 0.055 < furthest["Keras fit", 4] < 0.07


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2])) if len(sys.argv) == 3 else draw()
