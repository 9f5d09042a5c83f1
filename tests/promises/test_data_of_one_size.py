"""Data whose batches all have one size is computed for that size, and other sizes still fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from law.by_hand import build, hold, on_one_device
from law.model import regression
from law.pair import strategy_of

import tfmultigpu as tmg


# Fails if a step takes the size of the first data for the size of others, or is traced for each.
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.more)])
def test_data_of_several_sizes_costs_two_traces_at_most(replicas: int) -> None:
    strategy = strategy_of(replicas)
    ours, traces = build(strategy), []

    def forward(model: Any, batch: Any, training: bool) -> Any:
        traces.append(batch[0].shape[0])
        return tmg.loss_sum(ours.loss, batch[1], model(batch[0], training=training))

    step = tmg.make_train_step(
        ours.model, ours.optimizer, None, strategy, forward=forward, verify=False
    )
    batches = regression([6, 6, 4, 4, 1, 1])
    for first in range(0, len(batches), 2):
        pair = batches[first : first + 2]
        rows = [np.concatenate(part) for part in zip(*pair, strict=True)]
        size = len(pair[0][0])
        dataset = tf.data.Dataset.from_tensor_slices(tuple(rows)).batch(size, drop_remainder=True)
        for batch in tmg.distribute_dataset(dataset, strategy):
            step(batch)
    hold(ours, on_one_device(batches))
    assert len(traces) <= 2
    assert replicas > 1 or traces == [6, None]
