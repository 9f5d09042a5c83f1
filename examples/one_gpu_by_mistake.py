"""Why only one GPU works: the model was created outside the scope, and how that is found.

The usual program creates a ``MirroredStrategy``, builds the model above the ``with`` line or loads
it before, and calls ``fit``. Keras trains on one device, ``num_replicas_in_sync`` says 2, and
``nvidia-smi`` shows one busy GPU and others whose memory is taken. With the optimizer alone
outside, replicas drift apart.

Every call of this library looks where the variables live before anything runs, and ``explain``
says which one is in the wrong place and which line to change.
"""

import keras
import numpy as np

import tfmultigpu as tmg

rng = np.random.default_rng(0)
x = rng.normal(size=(130, 16)).astype("float32")
y = (x @ rng.normal(size=(16, 1))).astype("float32")


def build():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


gpus = tmg.devices.list_logical_devices("GPU")
devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=2)
strategy = tmg.create_strategy(devices=devices)

wrong = build()  # the mistake: above the scope
wrong.fit(x, y, batch_size=32, verbose=0)  # trains, on one device, without a word
print(tmg.explain(wrong))
try:
    tmg.fit(wrong, x, y)
except tmg.ScopeError as error:
    print(f"refused: {error}")

with strategy.scope():
    model = build()
assert "outside the scope" not in str(tmg.explain(model))
with tmg.create_strategy(devices=devices[:1]).scope():
    reference = build()
for one in (model, reference):
    tmg.fit(one, x, y, batch_size=32, verbose=0, shuffle=False)
pairs = zip(model.get_weights(), reference.get_weights(), strict=True)
difference = max(np.abs(a - b).max() for a, b in pairs)
print(f"{len(devices)} replicas, largest weight difference to one device: {difference:.1e}")
assert difference < 1e-3
