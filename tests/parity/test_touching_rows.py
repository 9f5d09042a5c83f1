"""Programs whose rows touch each other: the answer of one device, or a word.

Each is trained on one device by plain TensorFlow, and on two replicas by the train step.
"""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import cut, difference, strategy_of, train_by_hand
from programs import CASES, Case, Program, Y

import tfmultigpu as tmg


def values_of(program: Program) -> list[np.ndarray]:
    weights = [*program.model.trainable_variables, *program.model.non_trainable_variables]
    variables = [*weights, *program.watched]
    return [np.asarray(tf.convert_to_tensor(variable.value)) for variable in variables]


def on_one_device(case: Case) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The variables before and after, by a plain loop."""
    keras.utils.set_random_seed(0)
    program = case.build()
    before = values_of(program)
    loss = lambda model, batch: program.plain(model, *map(tf.constant, batch))  # noqa: E731
    batches = cut((case.x, Y), case.sizes)
    train_by_hand(program.model, keras.optimizers.SGD(0.1), loss, batches)
    return before, values_of(program)


def on_replicas(case: Case) -> list[np.ndarray]:
    strategy = strategy_of(2)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        program = case.build()
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(program.model, optimizer, strategy=strategy, **program.options)
    for batch in cut((case.x, Y), case.sizes):
        step(batch)
    return values_of(program)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replicas_give_one_devices_answer_or_say_that_they_do_not(case: Case) -> None:
    before, expected = on_one_device(case)
    noticeable = 1e-4 * difference(before, expected)
    if case.outcome == "refused":
        with pytest.raises(tmg.TfMultiGpuError):
            on_replicas(case)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apart = difference(on_replicas(case), expected)
    told = [str(w.message) for w in caught if w.category is tmg.ReplicaDependenceWarning]
    if case.outcome == "told":
        assert case.says in "; ".join(told)
        assert told
        assert apart > noticeable, f"a false alarm: {told}"
    else:
        assert not told
        assert apart < noticeable, "silently different"
