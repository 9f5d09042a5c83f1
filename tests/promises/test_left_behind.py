"""What ran before leaves nothing in weights and threads that makes later steps slower."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.pair import strategy_of

import tfmultigpu as tmg

X = np.random.default_rng(1).normal(size=(33, 40)).astype("float32")
Y = X[:, :3].copy()


def address(value: tf.Tensor) -> int:
    """Returns where the memory of a tensor begins."""
    return int(np.asarray(memoryview(value)).__array_interface__["data"][0])  # type: ignore[arg-type]


def copied(strategy: Any, variables: list[Any]) -> list[str]:
    """Returns the variables each read of which is a copy: two reads lie in two places."""
    found = []
    for variable in variables:
        for copy in strategy.experimental_local_results(variable.value):
            reads = copy.read_value(), copy.read_value()
            if address(reads[0]) != address(reads[1]):
                found.append(variable.path)
    return found


def measure(step: Any, batch: Any) -> None:
    with contextlib.suppress(tmg.errors.DataError):  # Of a busy machine; it has computed all.
        tmg.measured_capacities(step, batch, repeats=1)


# Fails if the check of a first step reads single rows of a weight, as TensorFlow copies the weight
# at each later read then; or if an evaluation, a checkpoint or a measurement does.
@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.more)])
def test_no_read_of_a_weight_becomes_a_copy(replicas: int, tmp_path: Path, subtests: Any) -> None:
    strategy = strategy_of(replicas)
    with strategy.scope():
        hidden = keras.layers.Dense(1700, "tanh")  # 68,000 numbers: as large as a table.
        model = keras.Sequential([keras.Input((40,)), hidden, keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    optimizer = model.optimizer
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    checkpoints = tmg.Checkpoints(tmp_path, model, optimizer)
    threads = threading.active_count()
    batch = tf.constant(X), tf.constant(Y)
    ran: dict[str, Callable[[], Any]] = {
        "the check": lambda: step(batch),
        "evaluate": lambda: tmg.evaluate(model, (X, Y), batch_size=11, verbose=0),
        "predict": lambda: tmg.predict(model, X, batch_size=11, verbose=0),
        "save": checkpoints.save,
        "restore": checkpoints.restore,
        "explain": lambda: tmg.explain(model, optimizer, strategy=strategy),
        "capacities": lambda: measure(step, batch),
        "a later step": lambda: step(batch),
    }
    for name, run in ran.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
        with subtests.test(name):
            assert copied(strategy, [*model.variables, *optimizer.variables]) == []
            assert threading.active_count() == threads
    assert step.verification.outcome == "same"
    # The test would notice: TensorFlow copies a variable whose rows were read.
    for copy in strategy.experimental_local_results(hidden.kernel.value):
        copy.sparse_read([0])
    assert copied(strategy, [hidden.kernel]) == [hidden.kernel.path] * replicas
