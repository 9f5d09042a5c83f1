"""Why only one GPU works: the model was created outside the scope, and how that is found.

The usual program creates a ``MirroredStrategy``, builds the model above the ``with`` line or loads
it before, and calls ``fit``. Nothing is wrong as far as Keras can tell: it trains on one device,
``num_replicas_in_sync`` says 2, and ``nvidia-smi`` shows one busy GPU and others whose memory is
taken. With the optimizer alone outside, replicas drift apart instead.

``make_train_step`` looks where the variables live before anything runs, and says which one is in
the wrong place and which line to change.
"""

from __future__ import annotations

import keras
import numpy as np

import tfmultigpu as tmg

rng = np.random.default_rng(0)
x = rng.normal(size=(128, 16)).astype("float32")
y = (x @ rng.normal(size=(16, 1))).astype("float32")


def build():
    keras.utils.set_random_seed(0)
    layers = [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def copies(model, strategy):
    return len(strategy.experimental_local_results(model.trainable_variables[0].value))


def main():
    gpus = tmg.devices.list_logical_devices("GPU")
    devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=2)
    strategy = tmg.create_strategy(devices=devices)
    print(f"the strategy has {strategy.num_replicas_in_sync} replicas")

    model = build()  # the mistake: above the scope
    optimizer = keras.optimizers.SGD(0.05)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    model.fit(x, y, batch_size=32, verbose=0)  # trains, on one device, without a word
    print(f"model outside the scope: {copies(model, strategy)} copy of each weight, fit is silent")

    messages = []
    with strategy.scope():
        right = build()
    for wrong in ((model, optimizer), (right, model.optimizer)):
        try:
            tmg.make_train_step(*wrong, "mse", strategy)
        except tmg.ScopeError as error:
            messages.append(str(error))
            print(f"found: {error}\n")
    assert len(messages) == 2, "both mistakes must be found"
    assert "with strategy.scope()" in messages[0]

    with strategy.scope():
        model = build()
        optimizer = keras.optimizers.SGD(0.05)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    for batch in tmg.distribute_dataset((x, y), strategy, batch_size=32):
        logs = step(batch)
    print(f"inside the scope: {copies(model, strategy)} copies, loss {float(logs['loss']):.3f}")
    assert copies(model, strategy) == len(devices)


if __name__ == "__main__":
    main()
