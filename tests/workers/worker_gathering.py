"""A loss over the whole batch, for batches of many sizes in one call; prints the logs."""

import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

SIZES = (12, 4, 2, 6, 1, 9)
strategy = tmg.create_strategy(devices=["CPU:0"])


def batches():
    random = np.random.default_rng(0)
    for size in SIZES:
        yield random.normal(size=(size, 6)).astype("float32")


def forward(model, batch, training):
    own = model(batch, training=training)
    near = tf.reduce_logsumexp(tf.matmul(own, tmg.gather_rows(own), transpose_b=True), -1)
    return tmg.LossSum(tf.reduce_sum(near), tf.cast(tf.size(near), tf.float32))


keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.01)
train = tmg.make_train_step(model, optimizer, None, strategy, forward=forward)
evaluate = tmg.make_eval_step(model, None, strategy, forward=forward)
dataset = tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec([None, 6]))
data = tmg.distribute_dataset(dataset, strategy)
logs = [step.run(iter(data), 100) for step in (train, evaluate)]
print("RESULT" + json.dumps([{name: float(v) for name, v in one.items()} for one in logs]))
