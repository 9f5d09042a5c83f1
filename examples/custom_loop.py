"""A custom training loop: the step is made for you, the loop stays yours.

The usual answer divides by a constant: ``tf.nn.compute_average_loss(loss,
global_batch_size=BATCH)`` inside ``strategy.run``. The last, partial batch is then scaled wrongly;
code that forgets the line trains with N times the learning rate, which Adam hides. L2 is added once
per replica, and clipping is done per replica before the sum.

``make_train_step`` adds sums and weights over the replicas and divides once.
"""

import keras
import numpy as np

import tfmultigpu as tmg

rng = np.random.default_rng(0)
x = rng.normal(size=(1001, 16)).astype("float32")  # 15 batches of 64 and one of 41
y = (x @ rng.normal(size=16) > 0).astype("int32")


def train(strategy):
    with strategy.scope():  # everything that has variables
        keras.utils.set_random_seed(0)
        hidden = keras.layers.Dense(32, "tanh", kernel_regularizer=keras.regularizers.L2(1e-3))
        model = keras.Sequential([keras.Input((16,)), hidden, keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = tmg.make_train_step(
        model, optimizer, loss, strategy, metrics=[accuracy], clip_norm=1.0, micro_batches=2
    )
    data = tmg.distribute_dataset((x, y), strategy, batch_size=64)  # of all replicas together
    for epoch in range(3):
        accuracy.reset_state()
        total = weight = 0.0
        for batch in data:  # or, faster, ten steps per call: step.run(iter(data), 10)
            logs = step(batch)
            total += float(logs["loss"] * logs["weight"])
            weight += float(logs["weight"])
        print(f"  epoch {epoch + 1}: loss {total / weight:.4f}, accuracy {accuracy.result():.4f}")
    assert optimizer.iterations == 3 * len(data)
    return model.get_weights()


gpus = tmg.devices.list_logical_devices("GPU")
devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=2)
weights = train(tmg.create_strategy(devices=devices))
reference = train(tmg.create_strategy(devices=devices[:1]))
difference = max(np.abs(a - b).max() for a, b in zip(weights, reference, strict=True))
print(f"{len(devices)} replicas, largest weight difference to one device: {difference:.1e}")
assert difference < 1e-3
