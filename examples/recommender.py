"""A recommender of two towers: tables of users and items, with the other rows as negatives.

The usual answer computes the loss on each replica. There a user is compared with the items of its
own replica alone, so N replicas see one Nth of the negatives and train another model. And the
gradient of a table is made as large as the table, on each replica and in each step.

``gather_rows`` gives the items of the whole global batch, with their gradients. Under Adagrad or
SGD a step reads and updates the rows of its ids alone, whatever the size of the tables. A run that
stops in the middle and goes on from its checkpoint ends with the same numbers.
"""

import tempfile

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfmultigpu as tmg

USERS, ITEMS, WIDTH, BATCH, EPOCHS = 20_000, 10_000, 16, 256, 4
rng = np.random.default_rng(0)
users = rng.zipf(1.3, size=8_000) % USERS  # Some are often here, most are rare.
items = (users * 7 + rng.integers(0, 3, size=8_000)) % ITEMS  # Each user likes three items.
steps = -(-len(users) // BATCH)  # 32 batches, the last of 64 rows.
data = {"user": users.astype("int32"), "item": items.astype("int32")}


class TwoTowers(keras.Model):
    def __init__(self):
        super().__init__()
        self.user = keras.Sequential(
            [layers.Embedding(USERS, WIDTH, "normal"), layers.Dense(WIDTH)]
        )
        self.item = keras.Sequential(
            [layers.Embedding(ITEMS, WIDTH, "normal"), layers.Dense(WIDTH)]
        )
        self.top_10 = keras.metrics.Mean(name="top_10")

    def call(self, batch):
        user, item = self.user(batch["user"]), self.item(batch["item"])
        return ops.normalize(user), ops.normalize(item)


def forward(model, batch, training):
    user, item = model(batch, training=training)
    rows, every = tmg.rows(), tmg.gather_rows(item)  # The items of the global batch, in order.
    scores = 5.0 * user @ ops.transpose(every)
    own = tf.range(rows.first, rows.first + rows.count)  # Where those of these users are.
    model.top_10.update_state(tf.math.in_top_k(own, scores, 10))
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(own, scores)
    return tmg.LossSum(tf.reduce_sum(losses), rows.count)


def train(strategy, stop_after=None, directory=None):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = TwoTowers()
        model({name: values[:1] for name, values in data.items()})
        optimizer = keras.optimizers.Adagrad(0.1)
    step = tmg.make_train_step(model, optimizer, None, strategy, forward=forward)
    batches = tmg.distribute_dataset(data, strategy, batch_size=BATCH)
    checkpoints = directory and tmg.Checkpoints(directory, model=model, optimizer=optimizer)
    if checkpoints:
        checkpoints.restore()
    for epoch in range(int(optimizer.iterations.numpy()) // steps, EPOCHS):
        if epoch == stop_after:
            return None
        model.top_10.reset_state()
        logs = step.run(iter(batches), steps)
        print(f"loss {logs['loss']:.4f}, in the first ten of {BATCH} {model.top_10.result():.3f}")
        if checkpoints:
            checkpoints.save()
    return model.get_weights()


devices = tmg.devices.list_logical_devices("GPU")
devices = devices if len(devices) > 1 else tmg.split_device("CPU:0", parts=2)
one, several = (tmg.create_strategy(devices=devices[:n]) for n in (1, len(devices)))
with tempfile.TemporaryDirectory() as directory:
    train(several, stop_after=2, directory=directory)
    resumed = train(several, directory=directory)
expected = train(one)
difference = max(np.abs(a - b).max() for a, b in zip(resumed, expected, strict=True))
print(f"{len(devices)} replicas, largest weight difference to one device: {difference:.1e}")
assert difference < 1e-3
