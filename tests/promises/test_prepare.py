"""``tmg.prepare`` has fit, evaluate and predict of one model run ours, called as those of Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from law.model import regression, small
from law.pair import LOGS, dataset_of, strategy_of
from law.plain import PlainLoop, assert_values

import tfmultigpu as tmg

SIZES, CLIP = (7, 1, 2), 0.2


# Fails if a method is still that of Keras (whose last batches weigh otherwise on replicas, and
# which cannot clip the gradient of the global batch), or if another model changes too.
@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.more), 3])
def test_a_prepared_model_trains_as_one_device(replicas: int) -> None:
    batches = regression(SIZES)
    keras.utils.set_random_seed(3)
    truth = small(clip_norm=CLIP)
    logs = PlainLoop(truth, batches[0]).train(batches * 2)
    with strategy_of(replicas).scope():
        keras.utils.set_random_seed(3)
        ours, other = small(), small()
        ours.model.compile(ours.optimizer, ours.loss)
    before: Any = dict(vars(other.model))
    tmg.prepare(ours.model, clip_norm=CLIP)
    history = ours.model.fit(dataset_of(lambda: batches, batches[0]), epochs=2, verbose=0)
    assert_values(ours.values(), truth.values(), truth.variables())
    expected = np.average([log["loss"] for log in logs[3:]], weights=SIZES)
    np.testing.assert_allclose(history.history["loss"][1], expected, **LOGS)

    x, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    predicted = ours.model.predict(dataset_of(lambda: batches, batches[0]), verbose=0)
    np.testing.assert_allclose(predicted, truth.model(x).numpy(), rtol=1e-7)
    evaluated = ours.model.evaluate(
        dataset_of(lambda: batches, batches[0]), verbose=0, return_dict=True
    )
    np.testing.assert_allclose(evaluated["loss"], truth.loss(y, truth.model(x)), **LOGS)
    assert dict(vars(other.model)) == before
