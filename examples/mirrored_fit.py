"""Mirrored training with Keras ``compile`` and ``fit``, and with ``tmg.fit``.

The usual answer is ``with MirroredStrategy().scope():`` around build and compile, then ``fit``.
That gives one device's answer only while every batch divides by the number of replicas. Where the
last one does not, Keras takes the mean of each replica's mean: weights drift, and the loss printed
looks right. A first batch that does not divide stops with "Inputs to operation AddN ...".
"""

import keras
import numpy as np

import tfmultigpu as tmg

rng = np.random.default_rng(0)
x = rng.normal(size=(643, 16)).astype("float32")  # 10 batches of 64, and one of 3
y = (x @ rng.normal(size=16) > 0).astype("int32")


def train(strategy, fit, rows=643):
    with strategy.scope():  # model, optimizer and metrics: everything that has variables
        keras.utils.set_random_seed(0)
        layers = [keras.Input((16,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    fit(model, x[:rows], y[:rows], batch_size=64, epochs=3, shuffle=False, verbose=0)
    return model.get_weights()


def difference(weights, reference):
    return max(np.abs(a - b).max() for a, b in zip(weights, reference, strict=True))


gpus = tmg.devices.list_logical_devices("GPU")
devices = gpus[:2] if len(gpus) > 1 else tmg.split_device("CPU:0", parts=2)
several = tmg.create_strategy(devices=devices)
single = tmg.create_strategy(devices=devices[:1])

even = difference(train(several, keras.Model.fit, 640), train(single, keras.Model.fit, 640))
reference = train(single, keras.Model.fit)
uneven = difference(train(several, keras.Model.fit), reference)
ours = difference(train(several, tmg.fit), reference)
print(f"Keras' fit, every batch divides:   {even:.1e}")
print(f"Keras' fit, the last one does not: {uneven:.1e}   (no error, no warning)")
print(f"tmg.fit, 2 replicas, largest weight difference to one device: {ours:.1e}")
assert even < 1e-3
assert ours < 1e-3
