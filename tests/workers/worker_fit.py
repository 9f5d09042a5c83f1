"""Fits and prints what came out; run as one process or as workers."""

from __future__ import annotations

import json
import os
import random

import keras
import numpy as np
import tensorflow as tf
from one_strategy import strategy

import tfmultigpu as tmg

several = "TF_CONFIG" in os.environ
number = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if several else 0
rng = np.random.default_rng(0)
# 31 rows in batches of 6: the last batch of one row goes to every worker whole.
features = rng.normal(size=(31, 6)).astype("float32")
kinds = rng.integers(0, 3, 31)
weights = rng.uniform(0.2, 2.0, 31).astype("float32")
results = {}


def built():
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(4, "tanh", kernel_regularizer="l2"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(3, "softmax"),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.05),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            weighted_metrics=["accuracy"],
        )
    return model


def note(name, history, **more):
    trained = history.model.get_weights()
    results[name] = {
        "history": history.history,
        "weights": [weight.tolist() for weight in trained],
        "steps": int(history.model.optimizer.iterations.numpy()),
        **more,
    }


model = built()
options = {"batch_size": 6, "sample_weight": weights}
# The bar goes by time, in which workers never agree: here by what they agreed on.
history = tmg.fit(model, (features, kinds), epochs=6, validation_split=0.2, verbose=1, **options)
note("shuffled", history)


class StopHere(keras.callbacks.Callback):
    """Wants to stop on one worker only."""

    def on_epoch_end(self, epoch, logs=None):
        if number == 0 and epoch == 1:
            self.model.stop_training = True


dataset = tf.data.Dataset.from_tensor_slices((features, kinds)).batch(6)
history = tmg.fit(model, dataset, epochs=4, callbacks=[StopHere()], verbose=0)
note("stopped", history, epochs=history.epoch)


class Watching(keras.callbacks.Callback):
    """Looks at some batches, and stops after one in the middle of an epoch."""

    def __init__(self, every_batches, stop_after=None):
        super().__init__()
        self.every_batches = every_batches
        self.stop_after = stop_after
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(batch)
        if batch == self.stop_after:
            self.model.stop_training = True

    def on_test_batch_end(self, batch, logs=None):
        self.seen.append(("test", batch))


# Each worker has callbacks of its own: the batches after which any of them is called are those of
# all, who stops is followed by all.
watching = Watching(every_batches=2 + number)
history = tmg.fit(
    model,
    dataset,
    validation_data=dataset,
    callbacks=[watching, keras.callbacks.History()][: 2 - number],
    verbose=0,
)
note("watched by all", history)
seen = {"all": watching.seen}
watching = Watching(every_batches=1, stop_after=3)
history = tmg.fit(model, dataset, epochs=2, callbacks=[watching][:number], verbose=0)
note("stopped in an epoch", history)
seen["one"] = watching.seen


def rate_of_one(epoch, logs):
    if number == 0:
        model.optimizer.learning_rate = 0.01


best = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0, restore_best_weights=True)
run = tmg.Checkpoints("unused", model, model.optimizer)
errors = {}
weights_of_all, rate = model.get_weights(), 0.05
for name, options in {
    "rate": {"callbacks": [keras.callbacks.LambdaCallback(on_epoch_end=rate_of_one)]},
    "weights": {"callbacks": [best][:number], "epochs": 3},
    "epochs": {"epochs": 1 + number},
    "checkpoints": {"callbacks": [run.callback()][:number]},
}.items():
    try:
        if several:
            tmg.fit(model, dataset, verbose=0, **options)
    except tmg.errors.ClusterError as error:
        errors[name] = str(error)
    model.optimizer.learning_rate = rate
    model.set_weights(weights_of_all)
print("\nOWN", json.dumps({"seen": seen, "errors": errors}))
# Who sets no seed gets an order nobody knows, but one for all.
random.seed(number)
model.layers[1].rate = 0.0
tmg.fit(model, (features, kinds), batch_size=6, verbose=0)
accuracy = model.metrics[1].metrics[0]
results["without a seed"] = float(accuracy.count.numpy())
print("\nRESULT", json.dumps(results))
