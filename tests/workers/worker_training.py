"""Trains one model several ways and prints what came out; run as one process or as workers."""

from __future__ import annotations

import json
import os

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

strategy = (
    tf.distribute.MultiWorkerMirroredStrategy()
    if "TF_CONFIG" in os.environ
    else tf.distribute.get_strategy()
)
rng = np.random.default_rng(0)
features = rng.normal(size=(100, 6)).astype("float32")
labels = rng.integers(0, 3, 100)


def cut_elsewhere(batch_size):
    """Batches that others cut: five eighths on the first worker, the rest on the second."""
    dataset = tf.data.Dataset.from_tensor_slices((features[:96], labels[:96])).batch(batch_size)
    if strategy.num_replicas_in_sync == 1:
        return dataset
    middle = batch_size * 5 // 8

    def of_worker(context):
        rows = slice(middle) if context.input_pipeline_id == 0 else slice(middle, None)
        return dataset.map(lambda x, y: (x[rows], y[rows]))

    return strategy.distribute_datasets_from_function(of_worker)


def train(
    make_optimizer,
    batch_size,
    *,
    shares=None,
    in_one_call=False,
    draws=False,
    foreign=False,
    **options,
):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
                layers.BatchNormalization(synchronized=True),
                *(
                    [layers.Dropout(0.4, seed=3), layers.GaussianNoise(0.2, seed=4)]
                    if draws
                    else []
                ),
                layers.Dense(3),
            ]
        )
        optimizer = make_optimizer()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = tmg.make_train_step(model, optimizer, loss, strategy, metrics=[accuracy], **options)
    shares = shares if strategy.num_replicas_in_sync > 1 else None
    data = tmg.distribute_dataset(
        (features, labels), strategy, batch_size=batch_size, shares=shares
    )
    if foreign:
        for batch in cut_elsewhere(batch_size):
            logs = step(batch)
    elif in_one_call:
        logs = step.run(iter(data), 1000)
        assert int(logs["steps"]) == len(data)
    else:
        for batch in data:
            logs = step(batch)
    predict = tmg.make_predict_step(model, strategy)
    evaluated = tmg.make_eval_step(model, loss, strategy).run(iter(data), 1000)
    return {
        "weights": np.concatenate([w.numpy().ravel() for w in model.weights]).tolist(),
        "logs": {name: float(value) for name, value in logs.items()},
        "accuracy": float(accuracy.result()),
        "iterations": int(optimizer.iterations.numpy()),
        "evaluated": float(evaluated["loss"]),
        "predictions": np.concatenate([predict(b).numpy().ravel() for b in data]).tolist(),
    }


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def adamw():
    return keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=2)


results = {
    # 33 leaves a last batch of one row, which goes to every worker whole.
    "clipped": train(sgd, 33, clip_norm=0.5),
    "shares": train(sgd, 33, shares=(3, 1)),
    "dropout": train(sgd, 33, shares=(3, 1), draws=True),
    "cut_elsewhere": train(sgd, 32, draws=True, foreign=True),
    "one_call": train(adamw, 30, in_one_call=True, loss_scale="dynamic"),
}
print("RESULT", json.dumps(results))
