"""Trains models with sharded variables and prints what came out; one device, or workers of two."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy

import tfmultigpu as tmg
from tfmultigpu.strategies.topology import is_sharded

WORKERS = "TF_CONFIG" in os.environ
LOCAL = 2
layers = keras.layers
# Partial batches, one row, fewer rows than replicas.
SIZES = (12, 7, 1, 2, 3, 12)
_random = np.random.default_rng(3)
X = _random.normal(size=(sum(SIZES), 6)).astype("float32")
Y = _random.integers(0, 3, sum(SIZES))


def two_devices() -> None:
    """Gives a worker two CPUs: TensorFlow gives it one."""

    def devices(_: Any, __: Any, worker: str) -> Any:
        return tuple(f"{worker}/device:CPU:{i}" for i in range(LOCAL)), "CPU"

    tmg.split_device("CPU:0", parts=2)
    extended: Any = collective_all_reduce_strategy.CollectiveAllReduceExtended
    assert callable(extended._initialize_local_devices)
    extended._initialize_local_devices = devices


def make_strategy() -> Any:
    if not WORKERS:
        return tf.distribute.get_strategy()
    two_devices()
    made = tmg.create_strategy(prefer="multi_worker")
    assert len(made.extended.worker_devices) == LOCAL
    return made


strategy = make_strategy()
worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if WORKERS else 0


def mlp() -> Any:
    return [
        keras.Input((6,)),
        layers.Dense(16, "tanh", kernel_regularizer="l2"),
        layers.Dropout(0.3, seed=1),
        layers.Dense(16, "tanh", kernel_constraint=keras.constraints.MaxNorm(1.0)),
        layers.Dense(3),
    ]


def normalized() -> Any:
    return [
        keras.Input((6,)),
        layers.Dense(16, use_bias=False),
        layers.BatchNormalization(synchronized=True),
        layers.Activation("tanh"),
        layers.Dense(3),
    ]


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def momentum() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def built(make: Any, make_optimizer: Any, at_least: int = 0, seed: int = 1) -> tuple[Any, Any]:
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        with tmg.sharded_variables(at_least=at_least) if WORKERS else contextlib.nullcontext():
            model = keras.Sequential(make())
        optimizer = make_optimizer()
    return model, optimizer


def crossentropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def batches() -> Any:
    def read() -> Any:
        ends = np.cumsum(SIZES)
        for end, size in zip(ends, SIZES, strict=True):
            yield X[end - size : end], Y[end - size : end]

    spec = (tf.TensorSpec((None, 6)), tf.TensorSpec((None,), tf.int64))
    return tf.data.Dataset.from_generator(read, output_signature=spec)


def numbers(variables: Any) -> list[float]:
    return np.concatenate([np.ravel(v.numpy()) for v in variables]).tolist()


def bytes_on_devices(variables: Any) -> dict[str, int]:
    on_each: dict[str, int] = {}
    for variable in variables:
        for one in strategy.experimental_local_results(variable.value):
            size = one.shape.num_elements() * one.dtype.size
            name = one.device.split("device:")[-1]
            on_each[name] = on_each.get(name, 0) + size
    return on_each


def train(
    make: Any,
    make_optimizer: Any = adam,
    at_least: int = 0,
    in_one_call: bool = False,
    **options: Any,
) -> dict[str, Any]:
    model, optimizer = built(make, make_optimizer, at_least)
    loss = crossentropy()
    with strategy.scope():
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    step = tmg.make_train_step(model, optimizer, loss, strategy, metrics=[accuracy], **options)
    data = tmg.distribute_dataset(batches(), strategy)
    if in_one_call:
        logs = step.run(iter(data), 1000)
    else:
        for batch in data:
            logs = step(batch)
    alone = [is_sharded(one) for one in model.trainable_variables]
    assert sum(alone) == (1 if at_least and WORKERS else len(alone) if WORKERS else 0)
    evaluated = tmg.make_eval_step(model, loss, strategy).run(iter(data), 1000)
    predict = tmg.make_predict_step(model, strategy)
    return {
        "weights": numbers(model.weights),
        "state": numbers(optimizer.variables),
        "logs": {name: float(value) for name, value in logs.items()},
        "accuracy": float(accuracy.result()),
        "evaluated": float(evaluated["loss"]),
        "predictions": np.concatenate([predict(b).numpy().ravel() for b in data]).tolist(),
        "verified": getattr(step.verification, "outcome", None) if WORKERS else "same",
    }


def fitted() -> dict[str, Any]:
    model, optimizer = built(lambda: mlp()[1:], adam)
    model.compile(optimizer, crossentropy(), metrics=["accuracy"])
    data = (X, Y)
    options = {"batch_size": 7, "verbose": 0}
    history = tmg.fit(model, data, epochs=2, validation_data=data, **options)
    return {
        "weights": numbers(model.weights),
        "logs": {name: values[-1] for name, values in history.history.items()},
        "evaluated": tmg.evaluate(model, data, batch_size=7)["loss"],
        "predictions": tmg.predict(model, X, batch_size=7).ravel().tolist(),
    }


def dense(memory: Any = None) -> Any:
    with strategy.scope(), tmg.sharded_variables(at_least=0, memory=memory):
        made = layers.Dense(32, use_bias=False)
        made.build((None, 32))
    return made


def placed() -> dict[str, Any]:
    """Bytes of large and small variables, and of the state of the optimizer, on each device."""

    def wide() -> Any:
        return [keras.Input((6,)), *[layers.Dense(32, "tanh") for _ in range(5)], layers.Dense(3)]

    # Workers draw other numbers, and begin with those of the first.
    model, optimizer = built(wide, adam, 4 * 32 * 32, seed=worker)
    first = [float(np.sum(np.square(v.numpy()))) for v in model.variables]
    step = tmg.make_train_step(model, optimizer, crossentropy(), strategy)
    step((X[:8], Y[:8]))
    alone = [v for v in model.variables if is_sharded(v)]
    slots = [
        v
        for v in optimizer.variables
        if v.path.split("/")[-1] not in ("iteration", "learning_rate")
    ]
    small = [v for v in model.variables if not is_sharded(v)]
    # One worker still has a model that another has let go of, and their devices differ in memory.
    memory = {"CPU:0": 3e6, "CPU:1": 1e6} if worker == 0 else {"CPU:0": 1e6, "CPU:1": 4e6}
    made = [dense() for _ in range(3)][worker:]
    gc.collect()
    later = [dense(memory) for _ in range(6)]
    assert made
    return {
        "first": first,
        "later": [one.kernel.value.device.split("device:")[-1] for one in later],
        "paths": [one.path for one in alone],
        "devices": [one.value.device.split("device:")[-1] for one in alone],
        "large": bytes_on_devices(alone),
        "small": bytes_on_devices(small),
        "slots": bytes_on_devices(slots),
        "trained": sum(4 * v.shape.num_elements() for v in model.trainable_variables),
        "report": str(tmg.explain(step)),
    }


def resumed(directory: str, end: int | None) -> dict[str, Any]:
    model, optimizer = built(mlp, adam, seed=9)
    step = tmg.make_train_step(model, optimizer, crossentropy(), strategy)
    checkpoints = tmg.Checkpoints(directory, model, optimizer)
    begin = checkpoints.restore() or 0
    for batch in list(tmg.distribute_dataset(batches(), strategy))[begin:end]:
        step(batch)
    checkpoints.save()
    return {"weights": numbers(model.weights), "state": numbers(optimizer.variables)}


def different(name: str) -> list[str]:
    """What is said if the workers create other things."""

    def create() -> Any:
        at_least = 8 * worker if name == "limits" else 0
        with strategy.scope(), tmg.sharded_variables(at_least=at_least):
            width = 16 + worker if name == "widths" else 16
            more = [layers.Dense(3)] if name == "number" and worker == 1 else []
            return keras.Sequential([keras.Input((6,)), layers.Dense(width), *more])

    try:
        tmg.make_train_step(create(), keras.optimizers.SGD(0.1), "mse", strategy)
        return []
    except Exception as error:
        return [type(error).__name__, str(error)]


CASES = {
    "parts": lambda: train(mlp, micro_batches=2, clip_norm=0.1),
    "scaled": lambda: train(normalized, momentum, loss_scale="dynamic", in_one_call=True),
    "some": lambda: train(mlp, at_least=4 * 16 * 16),
    "fit": fitted,
}
# The folder of a run that the workers begin and one device resumes.
folder = sys.argv[1]
found: dict[str, Any] = {"placed": placed()} if WORKERS else {}
found |= {name: case() for name, case in CASES.items()}
if WORKERS:
    resumed(folder, 2)
    found["different"] = {name: different(name) for name in ("widths", "limits", "number")}
    print("RESULT", json.dumps(found), flush=True)
else:
    found["whole"] = resumed(f"{folder}/whole", None)
    found["resumed"] = resumed(folder, None)
    print("RESULT", json.dumps(found), flush=True)
