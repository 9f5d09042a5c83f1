"""Trains on batches of parts and prints what came out; run as one process or as workers."""

from __future__ import annotations

import json

import keras
import numpy as np
import tensorflow as tf
from one_strategy import strategy

import tfmultigpu as tmg
from tfmultigpu.data import Parts, Whole

SIZES = (
    (5, 12),
    (3, 4),
    (7, 2),
    (1, 6),
    (6, 9),
)  # One labeled row goes to both workers, and all else.


def batches():
    def read():
        random = np.random.default_rng(0)
        for labeled, unlabeled in SIZES:
            x = random.normal(size=(labeled, 6)).astype("float32")
            u = random.normal(size=(unlabeled, 6)).astype("float32")
            yield x, random.integers(0, 3, labeled), u

    spec = (tf.TensorSpec((None, 6)), tf.TensorSpec((None,), tf.int64), tf.TensorSpec((None, 6)))
    dataset = tf.data.Dataset.from_generator(read, output_signature=spec)
    return dataset.map(lambda x, y, u: Parts(labeled=(x, y), unlabeled=u, scale=Whole(2.0)))


def forward(model, batch, training):
    """The labeled rows alone have labels; all unlabeled ones are pushed away from each of them."""
    known, p, q = of_labeled(model, batch, training)
    everywhere = tmg.gather_rows(q, part="unlabeled")
    near = tf.reduce_logsumexp(tf.matmul(p, everywhere, transpose_b=True), -1)
    return tmg.LossSum(known.sum + 0.1 * tf.reduce_sum(near), known.weight)


def alone(model, batch, training):
    known, _, q = of_labeled(model, batch, training)
    return tmg.LossSum(known.sum + 0.1 * tf.reduce_sum(tf.square(q)), known.weight)


def of_labeled(model, batch, training):
    (x, y), u = batch["labeled"], batch["unlabeled"]
    h = model(tf.concat([x, u], 0), training=training) * batch["scale"].value
    p, q = h[: tf.shape(x)[0]], h[tf.shape(x)[0] :]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return tmg.loss_sum(loss, y, p), p, q


def train(forward, in_one_call=False, **options):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, activation="tanh"),
                layers.BatchNormalization(synchronized=True),
                layers.Dropout(0.4, seed=3),
                layers.Dense(3),
            ]
        )
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    step = tmg.make_train_step(model, optimizer, None, strategy, forward=forward)
    data = tmg.distribute_dataset(batches(), strategy, **options)
    if in_one_call:
        logs = step.run(iter(data), 100)
        assert int(logs["steps"]) == len(SIZES)
    else:
        for batch in data:
            logs = step(batch)
    return {
        "weights": np.concatenate([w.numpy().ravel() for w in model.weights]).tolist(),
        "loss": float(logs["loss"]),
        "verified": getattr(step.verification, "outcome", None),
    }


shares = (3, 1) if strategy.num_replicas_in_sync > 1 else None
results = {
    "steps": train(forward),
    "run": train(alone, in_one_call=True),
    "shares": train(forward, shares=shares),
}
print("RESULT", json.dumps(results))
