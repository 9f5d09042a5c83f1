"""Metrics of one's own in two workers: which are refused, and what the others come to."""

from __future__ import annotations

import json
import warnings

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

strategy = tf.distribute.MultiWorkerMirroredStrategy()
rng = np.random.default_rng(0)
features = rng.normal(size=(41, 4)).astype("float32")
labels = rng.uniform(size=(41, 3)).astype("float32").round()


class Errors(keras.metrics.Metric):
    def __init__(self, start="zeros"):
        super().__init__(name="errors")
        self.total = self.add_variable((), start, name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.abs(y_true - y_pred)))

    def result(self):
        return self.total + 0.0


class Largest(Errors):
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign(tf.maximum(self.total, tf.reduce_max(tf.abs(y_true - y_pred))))


class FromOne(Errors):
    def __init__(self):
        super().__init__("ones")


with strategy.scope():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "sigmoid")])


def evaluate(make, passes=1):
    with strategy.scope():
        metric = make()
    data = tmg.distribute_dataset((features, labels), strategy, batch_size=8)  # the last has 1 row
    for _ in range(passes):  # a second step finds what the first left behind
        step = tmg.make_eval_step(model, "mse", strategy, metrics=[metric])
        try:
            step.run(iter(data), 100)
        except tmg.MetricError as error:
            return str(error)
    return float(metric.result())


warnings.simplefilter("error", tmg.ReplicaDependenceWarning)
found = {
    "errors": evaluate(Errors),
    "errors twice": evaluate(Errors, passes=2),
    "f1": evaluate(lambda: keras.metrics.F1Score(average="micro", threshold=0.5)),
    "largest": evaluate(Largest),
    "from one": evaluate(FromOne),
}
predicted = np.asarray(tf.convert_to_tensor(model(features)))
f1 = keras.metrics.F1Score(average="micro", threshold=0.5)
f1.update_state(labels, predicted)
truth = {"errors": float(np.abs(predicted - labels).sum()), "f1": float(f1.result())}
print("RESULT " + json.dumps([found, truth]))
