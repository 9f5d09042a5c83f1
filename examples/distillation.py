"""Distillation with a moving average: the teacher is the average of the student's own weights.

The usual answer updates the teacher at the end of ``train_step``. On several replicas each has
statistics of BatchNormalization from its own rows, so each averages another teacher. Nothing says
so, and the first is saved. A callback that updates it costs a call for each batch.

Here ``forward`` assigns the teacher before it asks it. Keras variables that ``forward`` assigns are
states of the step, like the statistics of BatchNormalization: assigned once, the same on all
replicas, left as they were by a step that fails. Validation asks the same teacher, and assigns
nothing. With ``micro_batches`` each part would assign it: take a callback there.
"""

from __future__ import annotations

import keras
import numpy as np

import tfmultigpu as tmg

BATCH, EPOCHS, MOMENTUM = 32, 4, 0.9

rng = np.random.default_rng(0)
x = rng.normal(size=(210, 8)).astype("float32")  # 180 to train: 5 batches of 32 and one of 20
y = (x[:, 0] > x[:, 1]).astype("int32")
loss = keras.losses.CategoricalCrossentropy(from_logits=True)


def classifier():
    normal = keras.layers.BatchNormalization(synchronized=True)
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, "relu"), normal, keras.layers.Dense(2)]
    )


class Distiller(keras.Model):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = classifier(), classifier()
        self.teacher.set_weights(self.student.get_weights())
        self.teacher.trainable = False  # the optimizer does not see it
        self.noise = keras.layers.GaussianNoise(0.3)

    def call(self, inputs, training=None):
        return self.student(self.noise(inputs, training=training), training=training)


def forward(distiller, batch, training):
    features, labels = batch
    teacher, student = distiller.teacher, distiller.student
    if training:
        for average, current in zip(teacher.weights, student.weights, strict=True):
            average.assign(MOMENTUM * average + (1 - MOMENTUM) * current)
    predicted = distiller(features, training=training)
    hard = tmg.loss_sum(loss, keras.ops.one_hot(labels, 2), predicted)
    soft = tmg.loss_sum(loss, keras.ops.softmax(teacher(features)), predicted)
    return tmg.LossSum(hard.sum + soft.sum, hard.weight), {"hard": hard, "soft": soft}


def train(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        distiller = Distiller()
        distiller.compile(keras.optimizers.Adam(1e-2))
    options = {"batch_size": BATCH, "epochs": EPOCHS, "verbose": 0}
    validation = x[180:], y[180:]
    history = tmg.fit(
        distiller, x[:180], y[:180], forward=forward, validation_data=validation, **options
    )
    assert not np.allclose(distiller.teacher.weights[0], distiller.student.weights[0])
    return distiller.get_weights(), history.history


def main():
    gpus = tmg.devices.list_logical_devices("GPU")
    devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=3)
    reference, expected = train(tmg.create_strategy(devices=devices[:1]))
    differences = []
    for count in sorted({2, len(devices)}):
        weights, logs = train(tmg.create_strategy(devices=devices[:count]))
        differences += [np.abs(a - b).max() for a, b in zip(weights, reference, strict=True)]
        assert all(np.allclose(logs[name], expected[name], atol=1e-3) for name in expected)
    print("  " + ", ".join(f"{name} {values[-1]:.3f}" for name, values in logs.items()))
    counts = " and ".join(str(count) for count in sorted({2, len(devices)}))
    print(f"{counts} replicas, largest weight difference to one device: {max(differences):.1e}")
    assert max(differences) < 1e-3


if __name__ == "__main__":
    main()
