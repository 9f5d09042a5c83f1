"""Programs whose rows touch each other: the answer of one device, or a word.

Each is trained on one device by plain TensorFlow, and on two replicas by the train step.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from more_programs import MORE_CASES
from programs import CASES, Case, Program

import tfmultigpu as tmg


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What two replicas made of a program.

    Attributes:
        said: ``"same"``, ``"told"``, ``"unverified"``, ``"refused"`` or ``"SILENTLY DIFFERENT"``.
        apart: The largest difference of a variable from one device.
        moved: How far training moved the weights on one device.
        text: What was said.
    """

    said: str
    apart: float
    moved: float
    text: str


def batches(case: Case) -> list[tuple[Any, Any]]:
    cut, start = [], 0
    for size in case.sizes:
        part = slice(start, start + size)
        cut.append(tf.nest.map_structure(lambda one, part=part: one[part], (case.x, case.y)))
        start += size
    return cut


def _values(program: Program) -> list[np.ndarray]:
    weights = [*program.model.trainable_variables, *program.model.non_trainable_variables]
    return [np.asarray(tf.convert_to_tensor(one.value)) for one in [*weights, *program.watched]]


def on_one_device(case: Case) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The variables before and after, by a plain loop."""
    keras.utils.set_random_seed(0)
    program = case.build()
    before = _values(program)
    optimizer = keras.optimizers.SGD(0.1)
    for x, y in batches(case):
        with tf.GradientTape() as tape:
            constants = tf.nest.map_structure(tf.convert_to_tensor, (x, y))
            loss = program.plain(program.model, *constants)
            loss += sum(tf.reduce_sum(one) for one in program.model.losses)
        variables = program.model.trainable_variables
        gradients = tape.gradient(loss, [one.value for one in variables])
        pairs = zip(gradients, variables, strict=True)
        pairs = [(tf.convert_to_tensor(one), v) for one, v in pairs if one is not None]
        optimizer.apply(*zip(*pairs, strict=True))
    return before, _values(program)


def on_replicas(case: Case, strategy: Any) -> list[np.ndarray]:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        program = case.build()
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(program.model, optimizer, strategy=strategy, **program.options)
    for batch in batches(case):
        step(batch)
    return _values(program)


def compare(case: Case, strategy: Any) -> Outcome:
    before, expected = on_one_device(case)
    moved = max(float(np.max(np.abs(a - b))) for a, b in zip(before, expected, strict=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = on_replicas(case, strategy)
        except tmg.TfMultiGpuError as error:
            return Outcome("refused", np.nan, moved, str(error))
    pairs = zip(expected, found, strict=True)
    apart = max(float(np.max(np.abs(a.astype("float64") - b), initial=0.0)) for a, b in pairs)
    told = [one for one in caught if issubclass(one.category, tmg.ReplicaDependenceWarning)]
    other = [one for one in caught if not issubclass(one.category, tmg.ReplicaDependenceWarning)]
    text = "; ".join(str(one.message) for one in [*told, *other])
    unverified = [warning for warning in told if "could not be held" in str(warning.message)]
    if len(told) > len(unverified):
        return Outcome("told", apart, moved, text)
    if unverified:
        return Outcome("unverified", apart, moved, text)
    return Outcome("same" if apart < 1e-4 * moved else "SILENTLY DIFFERENT", apart, moved, text)


@pytest.mark.parametrize("case", [*CASES, *MORE_CASES], ids=lambda case: case.name)
def test_replicas_give_one_devices_answer_or_say_that_they_do_not(case: Case) -> None:
    outcome = compare(case, tmg.create_strategy(devices=["CPU:0", "CPU:1"]))
    assert outcome.said == case.outcome, outcome
    assert case.says in outcome.text
    if outcome.said == "told":
        assert outcome.apart > 1e-4 * outcome.moved, f"a false alarm: {outcome}"
