"""A custom training loop: the step is made for you, the loop stays yours.

The usual answer divides by a constant: ``tf.nn.compute_average_loss(loss,
global_batch_size=BATCH)`` inside ``strategy.run``. The last, partial batch is then scaled wrongly;
code that forgets the line trains with N times the learning rate, which Adam hides and SGD does not.
L2 regularisation is added once per replica, clipping is done per replica before the sum, and an
optimizer whose slots are first made inside ``strategy.run`` stops with "You must feed a value for
placeholder tensor".

``make_train_step`` adds sums and weights over the replicas and divides once. The loop below prints
the loss of every epoch and ends with a comparison to one device.
"""

from __future__ import annotations

import keras
import numpy as np

import tfmultigpu as tmg

BATCH, EPOCHS = 64, 3  # the batch of all replicas together

rng = np.random.default_rng(0)
x = rng.normal(size=(1001, 16)).astype("float32")  # 15 batches of 64 and one of 41
y = (x @ rng.normal(size=16) > 0).astype("int32")


def train(strategy):
    with strategy.scope():  # everything that has variables
        keras.utils.set_random_seed(0)
        l2 = keras.regularizers.L2(1e-3)
        hidden = keras.layers.Dense(32, "relu", kernel_regularizer=l2)
        model = keras.Sequential([keras.Input((16,)), hidden, keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = tmg.make_train_step(
        model, optimizer, loss, strategy, metrics=[accuracy], clip_norm=1.0, micro_batches=2
    )
    data = tmg.distribute_dataset((x, y), strategy, batch_size=BATCH)
    losses = []
    for epoch in range(EPOCHS):
        accuracy.reset_state()
        total = weight = 0.0
        for batch in data:  # or, faster, ten steps per call: step.run(iter(data), 10)
            logs = step(batch)
            total += float(logs["loss"] * logs["weight"])
            weight += float(logs["weight"])
        losses.append(total / weight)
        print(f"  epoch {epoch + 1}: loss {losses[-1]:.4f}, accuracy {accuracy.result():.4f}")
    assert optimizer.iterations == EPOCHS * len(data)
    return model.get_weights(), losses


def main():
    gpus = tmg.devices.list_logical_devices("GPU")
    devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=2)
    results = {}
    for count in (len(devices), 1):
        strategy = tmg.create_strategy(devices=devices[:count])
        print(f"on {', '.join(devices[:count])}:")
        results[count] = train(strategy)

    weights, losses = (results[len(devices)][i] for i in (0, 1))
    difference = max(np.abs(a - b).max() for a, b in zip(weights, results[1][0], strict=True))
    print(f"{len(devices)} replicas, largest weight difference to one device: {difference:.1e}")
    assert difference < 1e-3
    assert np.allclose(losses, results[1][1], atol=1e-3)


if __name__ == "__main__":
    main()
