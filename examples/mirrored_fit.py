"""Mirrored training with Keras ``compile`` and ``fit``, and the same with a loop that is exact.

The usual answer is ``with MirroredStrategy().scope():`` around build and compile, then ``fit``.
That gives one device's answer only while every batch divides by the number of replicas. Where the
last one does not, Keras takes the mean on each replica and then the mean of the means: its rows
count unequally, weights drift, and the loss printed looks right. A first batch that does not divide
stops with "Inputs to operation AddN ... must have the same size and shape".

Here ``fit`` is used for what it does exactly, and ``make_train_step`` for any number of rows.
"""

from __future__ import annotations

import keras
import numpy as np

import tfmultigpu as tmg

BATCH, EPOCHS = 64, 3  # the batch of all replicas together
ROWS = 10 * BATCH + 3  # the last batch is small and odd

rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, 16)).astype("float32")
y = (x @ rng.normal(size=16) > 0).astype("int32")


def compiled_model(strategy):
    with strategy.scope():  # model, optimizer and metrics: everything that has variables
        keras.utils.set_random_seed(0)
        layers = [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    return model


def fit(strategy, rows):
    model = compiled_model(strategy)
    model.fit(x[:rows], y[:rows], batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return model.get_weights()


def our_loop(strategy, rows):
    model = compiled_model(strategy)
    step = tmg.make_train_step(model, model.optimizer, model.loss, strategy)
    data = tmg.distribute_dataset((x[:rows], y[:rows]), strategy, batch_size=BATCH)
    for _ in range(EPOCHS):
        for batch in data:
            step(batch)
    return model.get_weights()


def difference(ours, reference):
    return max(np.abs(a - b).max() for a, b in zip(ours, reference, strict=True))


def main():
    gpus = tmg.devices.list_logical_devices("GPU")
    devices = gpus[:2] if len(gpus) > 1 else tmg.split_device("CPU:0", parts=2)
    several = tmg.create_strategy(devices=devices)
    single = tmg.create_strategy(devices=devices[:1])

    even = ROWS - ROWS % BATCH
    exact = fit(single, even)
    fit_even = difference(fit(several, even), exact)
    exact = fit(single, ROWS)
    fit_odd = difference(fit(several, ROWS), exact)
    ours_odd = difference(our_loop(several, ROWS), exact)

    print(f"{several.num_replicas_in_sync} replicas, largest weight difference to one device:")
    print(f"  fit, every batch divides:     {fit_even:.1e}")
    print(f"  fit, the last one does not:   {fit_odd:.1e}   (no error, no warning)")
    print(f"  our loop, the last does not:  {ours_odd:.1e}")
    assert fit_even < 1e-3
    assert ours_odd < 1e-3


if __name__ == "__main__":
    main()
