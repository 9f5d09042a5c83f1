"""Misplaced and misspelt arguments are answered with the call to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.arguments import telling_swapped

Call = Callable[[SimpleNamespace], Any]


@pytest.fixture(scope="module")
def given() -> SimpleNamespace:
    strategy = tmg.create_strategy(devices=["CPU:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        optimizer = keras.optimizers.SGD(0.1)
    x, y = np.zeros((8, 4), "float32"), np.zeros((8, 2), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    return SimpleNamespace(s=strategy, m=model, o=optimizer, x=x, y=y, data=data)


CASES: list[tuple[str, Call]] = [
    (
        "distribute_dataset received a number as strategy. Received: strategy=64. "
        "Write distribute_dataset(dataset, batch_size=64).",
        lambda g: tmg.distribute_dataset((g.x, g.y), 64),
    ),
    (
        "distribute_dataset received a strategy as dataset and a dataset as strategy, in each "
        "other's place. Received: dataset=<",
        lambda g: tmg.distribute_dataset(g.s, g.data),
    ),
    (
        "make_train_step received an optimizer as model and a model as optimizer, in each other's "
        "place. Received: model=<SGD>, optimizer=<Sequential>. "
        "Write make_train_step(model, optimizer, 'mse').",
        lambda g: tmg.make_train_step(g.o, g.m, "mse"),
    ),
    (
        "make_train_step received a strategy as loss. ",
        lambda g: tmg.make_train_step(g.m, g.o, g.s),
    ),
    (
        "Write make_train_step(model, optimizer, 'mse', strategy).",
        lambda g: tmg.make_train_step(g.s, g.m, g.o, "mse"),
    ),
    (
        "make_train_step received a text as optimizer and an optimizer as loss, in each other's",
        lambda g: tmg.make_train_step(g.m, "mse", g.o),
    ),
    ("Write make_eval_step(model, 'mse').", lambda g: tmg.make_eval_step("mse", g.m)),
    ("Write make_predict_step(model, strategy).", lambda g: tmg.make_predict_step(g.s, g.m)),
    ("Write fit(model, data).", lambda g: tmg.fit(g.s, g.m, g.data)),
    ("Write fit(model, data).", lambda g: tmg.fit(g.data, g.m)),
    ("Write fit(model, data, batch_size=64).", lambda g: tmg.fit(g.m, 64)),
    ("Write evaluate(model, data).", lambda g: tmg.evaluate(g.s, g.m)),
    ("Write fit(model, data, batch_size=64).", lambda g: tmg.fit(g.m, g.x, 64)),
    ("Write evaluate(model, data).", lambda g: tmg.evaluate(g.data, g.m)),
    ("Write predict(model, data).", lambda g: tmg.predict(g.data, g.m)),
    ("Write Checkpoints('runs/1', model).", lambda g: tmg.Checkpoints(g.m, "runs/1")),
    ("Write explain(model, dataset=dataset).", lambda g: tmg.explain(g.m, g.data)),
    ("Write memory_capacities(model=model).", lambda g: tmg.memory_capacities(g.m)),
    ("Write create_strategy(devices=2).", lambda g: tmg.create_strategy(2)),  # type: ignore[arg-type]
    ("Write split_device('CPU:0', 4).", lambda g: tmg.split_device(4, "CPU:0")),  # type: ignore[arg-type]
    (
        "fit has no argument 'epoch'. Received: epoch=3. Write epochs=3.",
        lambda g: tmg.fit(g.m, g.data, epoch=3),
    ),
    (
        "Write micro_batches=2.",
        lambda g: tmg.make_train_step(g.m, g.o, "mse", micro_batch=2),
    ),
    # What cannot be put right by another place is left to the function's own words.
    ("strategy must be a tf.distribute.Strategy", lambda g: tmg.distribute_dataset(g.data, "all")),
    ("strategy must be a tf.distribute.Strategy", lambda g: tmg.memory_capacities("all")),
    ("optimizer must be a Keras optimizer", lambda g: tmg.make_train_step(g.m, "sgd", "mse", g.s)),
    ("Write tmg.clip_gradients(gradients, 1.0)", lambda g: tmg.clip_gradients(1.0, [g.x])),
    ("model.trainable_variables", lambda g: tmg.GradientAccumulator(g.m)),
    ("model must be a Keras model", lambda g: tmg.fit(g.o, g.data)),
    ("fit() takes from 1 to 3 positional arguments", lambda g: tmg.fit(g.m, g.x, g.y, 64)),
    ("unexpected keyword argument 'zzz'", lambda g: tmg.fit(g.m, g.data, zzz=1)),
]


def test_the_answer_is_the_call_to_write(given: SimpleNamespace) -> None:
    for text, call in CASES:
        with pytest.raises(TypeError, match=re.escape(text)):
            call(given)


def test_right_calls_pass_unchanged(given: SimpleNamespace) -> None:
    seen = []

    @telling_swapped
    def train(model: Any, strategy: Any = None, *, batch_size: Any = None, **others: Any) -> int:
        """Trains."""
        seen.append((model, strategy, batch_size, others))
        return 7

    assert train.__doc__ == "Trains."
    calls: list[tuple[Any, ...]] = [
        (given.m, given.s, 64, {"other": given.o}),
        (given.m, None, np.int64(64), {}),
        ([given.m], object(), True, {"data": given.s}),  # Kinds that are not known.
    ]
    for model, strategy, batch_size, others in calls:
        assert train(model, strategy, batch_size=batch_size, **others) == 7
    assert seen == calls


def test_a_scalar_tensor_is_a_number_and_an_array_may_validate() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((4, 2), "float32")
    for size in (np.array(2), tf.constant(2), np.int64(2)):
        tmg.fit(model, x, x[:, :1], batch_size=size, epochs=np.array(1), verbose=0)

    def forward(model: Any, x: Any, training: bool) -> Any:
        return tmg.loss_sum("mse", x[:, :1], model(x))

    step = tmg.make_train_step(model, model.optimizer, None, forward=forward)
    eval_step = tmg.make_eval_step(model, None, forward=forward)
    tmg.fit(model, x, step=step, eval_step=eval_step, validation_data=x, verbose=0)
