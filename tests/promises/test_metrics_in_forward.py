"""A metric that a forward function updates sees each row of the global batch once."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from law.model import FLOAT, regression, small
from law.pair import dataset_of, strategy_of

import tfmultigpu as tmg


# Fails if a batch of fewer rows than replicas counts once for each of them.
def test_each_row_counts_once() -> None:
    strategy = strategy_of(3)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        training = small()
        error = keras.metrics.MeanAbsoluteError(**FLOAT)

    def forward(model: Any, batch: Any, is_training: bool) -> Any:
        x, y = batch
        outputs = model(x, training=is_training)
        error.update_state(y, outputs)
        return tmg.loss_sum(training.loss, y, outputs)

    step = tmg.make_train_step(training.model, training.optimizer, None, strategy, forward=forward)
    sizes = [7, 1, 2]
    batches = regression(sizes)
    errors = []
    data = tmg.distribute_dataset(dataset_of(lambda: batches, batches[0]), strategy)
    for (x, y), shards in zip(batches, data, strict=True):
        errors += list(np.abs(y - training.model(x).numpy()).mean(1))
        step(shards)
        np.testing.assert_allclose(float(error.result()), np.mean(errors), rtol=1e-9)
    assert len(errors) == sum(sizes)
