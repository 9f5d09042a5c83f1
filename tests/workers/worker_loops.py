"""Evaluates and predicts and prints what came out; run as one process or as workers."""

from __future__ import annotations

import json

import keras
import numpy as np
import tensorflow as tf
from one_strategy import strategy

import tfmultigpu as tmg

rng = np.random.default_rng(0)
# 31 rows in batches of 6: the last batch of one row goes to every worker whole.
features = rng.normal(size=(31, 6)).astype("float32")
kinds = rng.integers(0, 3, 31)
weights = rng.uniform(0.2, 2.0, 31).astype("float32")


class Everything(keras.Model):
    """An output of each type that workers must send each other in its own way."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs):
        number = tf.cast(tf.round(10.0 * inputs[:, 0]), tf.int32)
        count = tf.math.floormod(number, 3)
        words = tf.strings.join([tf.strings.as_string(number), "\xff|é"])
        values = {
            "float32": self.dense(inputs),
            "text": tf.stack(
                [words, tf.strings.substr(words, tf.zeros_like(count), count)], axis=1
            ),
            "no text": tf.fill(tf.shape(number), ""),
            "ragged": tf.RaggedTensor.from_row_lengths(tf.repeat(inputs, count, axis=0), count),
            "ragged text": tf.strings.bytes_split(words),
            "empty rows": tf.RaggedTensor.from_row_lengths(inputs[:0, 0], tf.zeros_like(number)),
            "nothing": inputs[:, :0],
        }
        for dtype in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
            values[dtype] = tf.cast(number, dtype)
        for dtype in ("bfloat16", "float16", "float64", "complex64", "complex128"):
            values[dtype] = tf.cast(inputs[:, :2], dtype)
        values["bool"] = inputs > 0
        return {"deep": [values]}


def readable(leaf):
    if isinstance(leaf, tf.RaggedTensor):
        return ["ragged", leaf.dtype.name, repr(leaf.to_list())]
    return [list(leaf.shape), leaf.dtype.name, repr(leaf.tolist())]


keras.utils.set_random_seed(1)
with strategy.scope():
    everything = Everything()
    classifier = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(4, "tanh", kernel_regularizer="l2"),
            keras.layers.Dense(3, "softmax"),
        ]
    )
    classifier.compile(
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy(name="entropy")],
    )
predicted = tmg.predict(everything, features, batch_size=6)["deep"][0]
one_row = tmg.predict(everything, features[:1])["deep"][0]
results = {
    "everything": {name: readable(leaf) for name, leaf in predicted.items()},
    "one row": {name: readable(leaf) for name, leaf in one_row.items()},
    "evaluated": tmg.evaluate(classifier, (features, kinds, weights), batch_size=6),
    "again": tmg.evaluate(classifier, (features[:1], kinds[:1])),
    "predicted": tmg.predict(classifier, features, batch_size=6).tolist(),
}
print("RESULT", json.dumps(results))
