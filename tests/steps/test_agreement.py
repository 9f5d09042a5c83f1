"""Workers must train one program: what counts as a difference, and what must never count as one."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmultigpu.addons.testing import run_workers
from tfmultigpu.steps.agreement import ProgramAgreement, describe
from tfmultigpu.steps.objective import Objective


def dense(activation: Any = "relu", units: int = 3, **options: Any) -> Any:
    inputs = keras.Input((2,))
    hidden = keras.layers.Dense(units, activation, **options)(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def wired(swapped: bool) -> Any:
    inputs = keras.Input((2,))
    both = [keras.layers.Dense(2)(inputs), inputs]
    return keras.Model(inputs, keras.layers.Subtract()(both[::-1] if swapped else both))


def normalized(mean: float) -> Any:
    return keras.Sequential([keras.Input((2,)), keras.layers.Normalization(mean=mean, variance=1)])


class Own(keras.layers.Layer):
    """A layer without a configuration."""

    def __init__(self, argument: float) -> None:
        super().__init__()
        self.argument = argument

    def call(self, inputs: Any) -> Any:
        return inputs * 2.0


def own(argument: float) -> Any:
    return keras.Sequential([keras.Input((2,)), Own(argument)])


def scaled(factor: float) -> Callable[[Any, Any], Any]:
    return lambda y_true, y_pred: factor * (y_true - y_pred) ** 2


def with_global(value: float) -> Any:
    """A function that reads a number of its module."""
    scope: dict[str, Any] = {"WEIGHT": value}
    exec("def loss(y_true, y_pred):\n    return WEIGHT * (y_true - y_pred)", scope)
    return scope["loss"]


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "activation": (dense, lambda: dense("tanh")),
    "units": (dense, lambda: dense(units=4)),
    "regularizer": (dense, lambda: dense(kernel_regularizer="l2")),
    "dtype": (dense, lambda: dense(dtype="float16")),
    "policy": (dense, lambda: dense(dtype="mixed_bfloat16")),
    "lambda": (lambda: dense(lambda x: x * 2.0), lambda: dense(lambda x: x * 3.0)),
    "wiring": (lambda: wired(False), lambda: wired(True)),
    "argument": (lambda: own(1.0), lambda: own(2.0)),
    "constant": (lambda: normalized(0.0), lambda: normalized(1.0)),
}  # fmt: skip


# Fails if two models that compute something else are taken for one, or two of one program for two:
# layers and models have been counted up since.
def test_models_that_compute_something_else_are_described_differently() -> None:
    for name, (one, other) in MODELS.items():
        first = describe(one())
        assert describe(one()) == first, name
        assert describe(other()) != first, name
    model = dense()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    before = describe(model), describe(model.optimizer)
    model.predict(np.ones((3, 2)), verbose=0)
    model.fit(np.ones((3, 2)), np.ones((3, 1)), verbose=0)
    assert (describe(model), describe(model.optimizer)) == before, "it was only used"
    model.layers[1].trainable = False
    assert describe(model) != before[0]


VALUES: dict[str, tuple[Any, Any]] = {
    "a number": (0.5, 0.25),
    "a type": (1, 1.0),
    "code": (lambda y, p: y - p, lambda y, p: y + p),
    "a constant": (lambda y, p: 2 * (y - p), lambda y, p: 3 * (y - p)),
    "a name": (lambda y, p: tf.abs(y - p), lambda y, p: tf.square(y - p)),
    "a closure": (scaled(1.0), scaled(2.0)),
    "a global": (with_global(0.5), with_global(0.25)),
    "a metric": (
        keras.metrics.BinaryAccuracy(threshold=0.5),
        keras.metrics.BinaryAccuracy(threshold=0.6),
    ),
    "a default": (lambda y, p, a=1: a * (y - p), lambda y, p, a=2: a * (y - p)),
    "a partial": (functools.partial(scaled, 1.0), functools.partial(scaled, 2.0)),
    "a loss": (keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError()),
    "its setting": (keras.losses.Huber(1.0), keras.losses.Huber(2.0)),
    "its reduction": (keras.losses.Huber(), keras.losses.Huber(reduction="sum")),
    "an optimizer": (keras.optimizers.SGD(), keras.optimizers.Adam()),
    "momentum": (keras.optimizers.SGD(momentum=0.1), keras.optimizers.SGD(momentum=0.2)),
    "a rate": (keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.2)),
    "clipping": (keras.optimizers.SGD(), keras.optimizers.SGD(clipnorm=1.0)),
    "a schedule": (
        keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)),
        keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 20, 0.9)),
    ),
    "an array": (np.zeros(2), np.ones(2)),
    "an order": ([1, 2], [2, 1]),
    "an objective": (Objective("mse"), Objective("mae")),
    "a key": ({"a": 1}, {"b": 1}),
    "a tf.function": (tf.function(lambda x: x + 1), tf.function(lambda x: x + 2)),
}  # fmt: skip


def test_values_that_mean_something_else_are_described_differently() -> None:
    for name, (one, other) in VALUES.items():
        assert describe(one) == describe(one), name
        assert describe(one) != describe(other), name


def test_what_differs_between_processes_is_not_in_a_description() -> None:
    class Mine:
        """An object whose `repr` is its address."""

    assert describe(Mine()) == describe(Mine())
    assert describe({"name": "dense_1", "rate": 1}) == describe({"name": "x", "rate": 1})
    assert describe({"a": 1, "b": 2}) == describe({"b": 2, "a": 1})
    assert describe(keras.layers.Dropout(0.5, seed=1)) == describe(
        keras.layers.Dropout(0.5, seed=2)
    )
    assert describe(keras.optimizers.SGD()) == describe(keras.optimizers.SGD())


# Between workers ----------------------------------------------------------------------------------


def test_one_worker_has_nobody_to_compare_with() -> None:
    agreement = ProgramAgreement(tf.distribute.get_strategy(), {"loss": "mse"})
    agreement.check(None, None)


WORKER = """
import json, os, sys
import keras, numpy as np, tensorflow as tf
import tfmultigpu as tmg

strategy = tmg.create_strategy()
number = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
if number == 0:
    # A model that one worker alone makes, outside of the scope: names count up from here.
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
x = np.ones((8, 2), "float32")
y = np.ones((8, 1), "float32")
found = {}


def made(activation="relu", loss="mse", optimizer=None):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(3, activation), keras.layers.Dense(1)]
        )
        model.compile(optimizer or keras.optimizers.SGD(0.1), loss)
    return model


def attempt(name, train):
    try:
        train()
        found[name] = "trained"
    except tmg.errors.ClusterError as error:
        found[name] = str(error)


data = tmg.distribute_dataset((x, y), strategy, batch_size=4)


def step(loss, model=None):
    model = model or made()
    one = tmg.make_train_step(model, model.optimizer, loss, strategy)
    for batch in data:
        one(batch)


fit = lambda model: tmg.fit(model, (x, y), batch_size=4, verbose=0)
attempt("alike", lambda: fit(made(lambda v: v * 2.0, lambda a, b: (a - b) ** 2)))
attempt("activation", lambda: fit(made(["relu", "tanh"][number])))
attempt("optimizer", lambda: fit(made(
    optimizer=[keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)][number]
)))
losses = [lambda a, b: (a - b) ** 2, lambda a, b: 2 * (a - b) ** 2]
attempt("function", lambda: step(losses[number]))
attempt("alike again", lambda: step("mse"))


def loaded_by_the_first():
    model = made()
    if number == 0:
        model.layers[1].bias.assign([0.5])
    return model


attempt("weights in fit", lambda: fit(loaded_by_the_first()))
attempt("weights in a step", lambda: step("mse", loaded_by_the_first()))
attempt("weights in evaluate", lambda: tmg.evaluate(loaded_by_the_first(), (x, y), batch_size=4))
with strategy.scope():
    momentum = keras.optimizers.SGD(0.1, momentum=0.9)
model = made(optimizer=momentum)
fit(model)
if number == 1:
    model.optimizer.variables[-1].assign([7.0])
attempt("moments in a second fit", lambda: fit(model))


# The last one: TensorFlow adds nothing more after it.
model = made()
checkpoints = tmg.Checkpoints(sys.argv[1], model, model.optimizer)
attempt("calls", [lambda: step("mse", model), checkpoints.save][number])
print("FOUND", json.dumps(found))
"""


@pytest.mark.slow
def test_two_workers_that_train_another_program_are_told(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(WORKER)
    runs = run_workers(script, workers=2, args=[tmp_path / "run"], timeout=900.0)
    for number, run in enumerate(runs):
        found = json.loads(run.output.partition("FOUND ")[2].splitlines()[0])
        assert found["alike"] == found["alike again"] == "trained"
        for name, part, values in [
            ("activation", "model", ("activation: 'relu'", "activation: 'tanh'")),
            ("optimizer", "optimizer", ("SGD", "Adam")),
            ("function", "loss", ("<lambda>", "<lambda>")),
        ]:
            text = found[name]
            assert text.startswith(f"The workers train with a different {part}, so"), text
            assert values[number] in text, text
            assert f"on worker {number}, and another on worker {1 - number}. Run the same" in text
        for name in ("in fit", "in a step", "in evaluate"):
            text = found[f"weights {name}"]
            assert text.startswith("The workers begin with different values of "), text
            assert "bias, and would go on with two models" in text
            assert f"add up to {0.5 if number == 0 else 0:g} on worker {number}" in text
        assert "momentum" in found["moments in a second fit"]
        assert "to 7 on worker 1" in found["moments in a second fit"]
        assert found["calls"].startswith("The workers do not call the same things in the same")
        assert "Every worker must make the same steps" in found["calls"]
