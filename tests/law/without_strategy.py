"""All blocks in a process that never makes a strategy."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import tfmultigpu as tmg
from law.model import Training, regression, small
from law.pair import LOGS, known
from law.plain import PlainLoop, assert_values

SIZES = (7, 2, 5, 1)


def model() -> Training:
    keras.utils.set_random_seed(5)
    return small(clip_norm=0.2)


def train(ours: Training) -> tuple[list[float], list[float]]:
    """Trains four passes; returns the losses of the steps of the first, and of the last epochs."""
    step = tmg.make_train_step(ours.model, ours.optimizer, ours.loss, clip_norm=0.2)
    losses = [float(step(batch)["loss"]) for batch in regression(SIZES)]
    logs = step.run(iter(known(regression(SIZES))), 9)
    assert int(logs["steps"]) == len(SIZES)
    ours.model.compile(ours.optimizer, ours.loss)
    options: dict[str, Any] = {"epochs": 2, "clip_norm": 0.2, "steps_per_call": 2, "verbose": 0}
    return losses, tmg.fit(ours.model, known(regression(SIZES)), **options).history["loss"]


def hold() -> None:
    """Trains, evaluates and predicts without a strategy, and compares with plain loops."""
    keras.config.set_dtype_policy("float64")
    keras.config.set_floatx("float64")  # Losses of ``compile`` too.
    truth, ours = model(), model()
    loop = PlainLoop(truth, regression(SIZES)[0])
    expected = [log["loss"] for _ in range(4) for log in loop.train(regression(SIZES))]
    try:
        losses, of_epochs = train(ours)
    except RuntimeError as error:
        raise AssertionError("A block asked the default strategy what it does not say") from error
    np.testing.assert_allclose(losses, expected[:4], **LOGS)
    means = [np.average(expected[at : at + 4], weights=SIZES) for at in (8, 12)]
    np.testing.assert_allclose(of_epochs, means, **LOGS)
    assert_values(ours.values(), truth.values(), truth.variables())

    x, y = (np.concatenate(arrays) for arrays in zip(*regression(SIZES), strict=True))
    predicted = tmg.predict(ours.model, known(regression(SIZES)))
    np.testing.assert_allclose(predicted, truth.model(x), rtol=1e-7)
    loss = tmg.evaluate(ours.model, known(regression(SIZES)))
    np.testing.assert_allclose(loss, truth.loss(y, truth.model(x)), **LOGS)
