"""A chain of steps under fit, on each worker; prints what one device prints."""

import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

strategy = tmg.create_strategy(devices=["CPU:0"])
keras.utils.set_random_seed(3)
with strategy.scope():
    models = [
        keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(5, "tanh"),
                keras.layers.BatchNormalization(synchronized=strategy.num_replicas_in_sync > 1),
                keras.layers.Dropout(0.3, seed=4),
                keras.layers.Dense(1),
            ],
            name=name,
        )
        for name in ("first", "second")
    ]
    optimizers = [keras.optimizers.SGD(0.02, momentum=0.9) for _ in models]


def forward(number):
    def both(model, batch, training):
        found = [one(batch, training=training) for one in models]
        sums = [tmg.loss_sum("mse", batch[:, :1], output) for output in found]
        total = sums[number].sum + 0.1 * sums[1 - number].sum
        return tmg.LossSum(total, sums[0].weight), {"other": sums[1 - number]}

    return both


steps = [
    tmg.make_train_step(models[i], optimizers[i], None, strategy, forward=forward(i))
    for i in range(2)
]
step = tmg.chain_steps(*steps, times=(3, 1))
rows = np.random.default_rng(1).normal(size=(23, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices(rows).batch(6)
history = tmg.fit(models[0], data, step=step, epochs=3, verbose=0).history
logs = step.run(iter(tmg.distribute_dataset(data, strategy)), 9)
weights = [w.numpy().ravel().tolist() for model in models for w in model.trainable_variables]
found = {"history": history, "steps": int(logs["steps"]), "weights": weights}
found["outcomes"] = [one and one.outcome for one in step.verification.values()]
print("RESULT" + json.dumps(found), flush=True)
