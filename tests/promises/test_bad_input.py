"""An ordinary mistake is an error with the fact that a user needs, before anything is trained."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.pair import strategy_of

import tfmultigpu as tmg

OURS = tmg.errors.TfMultiGpuError
ANY = (OURS, ValueError, TypeError)
X, Y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")


class Parts(NamedTuple):
    """A model and an optimizer in the scope of two replicas, and others outside of it."""

    strategy: tf.distribute.Strategy
    model: Any
    optimizer: Any
    outside: Any
    outside_optimizer: Any
    named: Any


def dense(**options: Any) -> Any:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, **options)])


@functools.cache
def parts() -> Parts:
    strategy = strategy_of(2)
    with strategy.scope():
        model = dense()
        model.compile("sgd", "mse", metrics=["mae"])
        optimizer = keras.optimizers.SGD(0.1)
        x = keras.Input((4,))
        heads = {name: keras.layers.Dense(2, name=name)(x) for name in ("left", "right")}
        named = keras.Model(x, heads)
    outside = dense()
    outside_optimizer = keras.optimizers.SGD(0.1)
    outside_optimizer.build(outside.trainable_variables)
    return Parts(strategy, model, optimizer, outside, outside_optimizer, named)


def new_optimizer() -> Any:
    with parts().strategy.scope():
        return keras.optimizers.SGD(0.1)


def step(model: Any = None, optimizer: Any = None, loss: Any = "mse", **options: Any) -> Any:
    model, optimizer = model or parts().model, optimizer or parts().optimizer
    return tmg.make_train_step(model, optimizer, loss, parts().strategy, **options)


def distribute(data: Any, **options: Any) -> Any:
    return tmg.distribute_dataset(data, parts().strategy, **options)


def fit(*data: Any, model: Any = None, **options: Any) -> Any:
    return tmg.fit(model or parts().model, *data, verbose=0, **options)


def batches(*arrays: Any, size: int = 4) -> Any:
    return tf.data.Dataset.from_tensor_slices(arrays).batch(size)


def outside_metric() -> Any:
    metric = keras.metrics.MeanAbsoluteError()
    metric.update_state(Y, Y)
    return metric


def accumulator() -> Any:
    with parts().strategy.scope():
        return tmg.GradientAccumulator(parts().model.trainable_variables)


class Mistake(NamedTuple):
    name: str
    call: Callable[[], Any]
    error: Any
    said: str


UNBATCHED = tf.data.Dataset.from_tensor_slices(X[:, 0])
RAGGED_ROWS = tf.data.Dataset.from_tensors((X, Y[:5]))
# Each fails if the mistake is taken for something else, or is only told by TensorFlow later.
MISTAKES = [
    # Data.
    Mistake("unbatched dataset", lambda: distribute(UNBATCHED), OURS, ".batch("),
    Mistake("unbatched in fit", lambda: fit(tf.data.Dataset.from_tensor_slices((X, Y[:, 0]))),
            OURS, ".batch("),
    Mistake("not data", lambda: distribute(7), ANY, "7"),
    Mistake("rows that differ", lambda: list(distribute(RAGGED_ROWS)), ANY, "5"),
    Mistake("arrays of other lengths", lambda: distribute((X, Y[:5]), batch_size=4), ANY, "5"),
    Mistake("arrays without batch_size", lambda: distribute((X, Y)), ANY, "batch_size"),
    Mistake("batch_size of 0", lambda: distribute((X, Y), batch_size=0), ANY, "0"),
    Mistake("negative batch_size in fit", lambda: fit(X, Y, batch_size=-4), ANY, "-4"),
    Mistake("distributed twice", lambda: distribute(distribute((X, Y), batch_size=4)), ANY,
            "distribute"),
    Mistake("empty dataset in fit", lambda: fit(batches(X, Y).take(0)), OURS, "no "),
    Mistake("empty dataset in evaluate",
            lambda: tmg.evaluate(parts().model, batches(X, Y).take(0)), OURS, "no "),
    Mistake("preprocess without batch_size", lambda: distribute(X, preprocess=lambda row: row),
            ANY, "batch_size"),
    Mistake("a strategy by name", lambda: tmg.distribute_dataset(batches(X), "mirrored"), ANY,
            "mirrored"),
    # Shares.
    Mistake("a share of zero", lambda: distribute(batches(X), shares=(1, 0)), OURS, "0"),
    Mistake("a negative share", lambda: distribute(batches(X), shares=(1, -2)), OURS, "-2"),
    Mistake("three shares for two", lambda: distribute(batches(X), shares=(1, 1, 1)), OURS, "3"),
    Mistake("shares in fit", lambda: fit(batches(X, Y), shares=(1, 1, 2)), OURS, "3"),
    # Steps.
    Mistake("optimizer outside the scope", lambda: step(optimizer=parts().outside_optimizer),
            tmg.ScopeError, "optimizer"),
    Mistake("model outside the scope", lambda: step(parts().outside, new_optimizer()),
            tmg.ScopeError, "model"),
    Mistake("metric outside the scope",
            lambda: step(optimizer=new_optimizer(), metrics=[outside_metric()]), tmg.ScopeError,
            "metric"),
    Mistake("evaluation outside the scope",
            lambda: tmg.make_eval_step(parts().outside, "mse", parts().strategy)((X, Y)),
            tmg.ScopeError, "model"),
    Mistake("prediction outside the scope",
            lambda: tmg.make_predict_step(parts().outside, parts().strategy)(X), tmg.ScopeError,
            "model"),
    Mistake("negative micro_batches", lambda: step(micro_batches=-1), ANY, "-1"),
    Mistake("micro_batches of 0", lambda: step(micro_batches=0), ANY, "0"),
    Mistake("half a micro-batch", lambda: step(micro_batches=1.5), ANY, "1.5"),
    Mistake("negative clip_norm", lambda: step(clip_norm=-0.5), ANY, "-0.5"),
    Mistake("unknown loss_scale", lambda: step(loss_scale="static"), ANY, "static"),
    Mistake("negative loss_scale", lambda: step(loss_scale=-8.0), ANY, "-8"),
    Mistake("unknown loss", lambda: step(loss="mean_squared"), ANY, "mean_squared"),
    Mistake("unknown verify", lambda: step(verify="always"), ANY, "always"),
    Mistake("optimizer by name", lambda: step(optimizer="sgd"), ANY, "sgd"),
    Mistake("unknown output in losses",
            lambda: step(parts().named, new_optimizer(), {"left": "mse", "up": "mse"})(
                (X, {"left": Y, "right": Y})), ANY, "up"),
    Mistake("a loss of one number for a batch",
            lambda: step(loss=lambda y, p: tf.reduce_mean(tf.square(y - p)))((X, Y)), OURS,
            "number"),
    Mistake("weights of another shape", lambda: step(verify=False)((X, Y, np.ones((8, 2, 2)))),
            ANY, "sample_weight"),
    Mistake("a batch without rows", lambda: step()((X[:0], Y[:0])), OURS, "0"),
    # Loops.
    Mistake("model not compiled", lambda: fit(batches(X, Y), model=parts().named), OURS,
            "compile"),
    Mistake("epochs of -1", lambda: fit(batches(X, Y), epochs=-1), ANY, "-1"),
    Mistake("endless data without steps", lambda: fit(batches(X, Y).repeat()), ANY,
            "steps_per_epoch"),
    Mistake("endless data in predict",
            lambda: tmg.predict(parts().model, batches(X).repeat()), ANY, "steps"),
    # Blocks by hand.
    Mistake("accumulator without variables", lambda: tmg.GradientAccumulator([]), ANY,
            "variables"),
    Mistake("accumulator of a model", lambda: tmg.GradientAccumulator(parts().model), ANY,
            "trainable_variables"),
    Mistake("add outside of run", lambda: accumulator().add([None, None], 1.0), OURS,
            "strategy.run"),
    Mistake("one gradient for two variables",
            lambda: parts().strategy.run(accumulator().add, args=([None], 1.0)), OURS, "1"),
    Mistake("clip limit of 0", lambda: tmg.clip_gradients([tf.constant([1.0])], 0), ANY, "0"),
    Mistake("loss scale of 0", lambda: tmg.LossScale(0), ANY, "0"),
    # Strategies and devices.
    Mistake("unknown prefer", lambda: tmg.create_strategy(prefer="gpus"), ANY, "gpus"),
    Mistake("unknown communication", lambda: tmg.plan_strategy(communication="mpi"), ANY, "mpi"),
    Mistake("no devices", lambda: tmg.create_strategy(devices=[]), ANY, "devices"),
    Mistake("a device twice", lambda: tmg.create_strategy(devices=["CPU:0", "CPU:0"]), ANY,
            "CPU:0"),
    Mistake("negative timeout", lambda: tmg.create_strategy(startup_timeout=-1.0), ANY, "-1"),
    Mistake("split into -1", lambda: tmg.split_device("CPU:0", parts=-1), ANY, "-1"),
    # The rest.
    Mistake("start of 0", lambda: tmg.find_batch_size(lambda size: None, start=0), ANY, "0"),
    Mistake("explain something else", lambda: tmg.explain("model"), ANY, "model"),
    Mistake("keep of 0",
            lambda: tmg.Checkpoints("unused", model=parts().model, optimizer=parts().optimizer,
                                    keep=0), ANY, "0"),
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_told(mistake: Mistake, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    before = [np.copy(weights) for weights in parts().model.get_weights()]
    with pytest.raises(mistake.error) as caught:
        mistake.call()
    assert mistake.said in str(caught.value)
    np.testing.assert_equal(before, parts().model.get_weights())


# Fails if an empty dataset in an epoch by hand is an error, or a step too many.
def test_no_batch_is_no_step() -> None:
    made = step(verify=False)
    iterations = int(parts().optimizer.iterations.numpy())
    assert int(made.run(iter(distribute(batches(X, Y).take(0))), 3)["steps"]) == 0
    assert int(parts().optimizer.iterations.numpy()) == iterations
