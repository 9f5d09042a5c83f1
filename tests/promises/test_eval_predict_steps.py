"""Evaluation and prediction steps see each row once: loss, metrics, and rows in order."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from law.model import FLOAT, Batch, cut
from law.pair import LOGS, SEED, dataset_of, strategy_of
from law.plain import plain_loss

import tfmultigpu as tmg

CLASSES = 4
ROWS = 60
_random = np.random.default_rng(12)
X = _random.normal(size=(ROWS, 3))
LABELS = {
    "likely": (_random.uniform(size=(ROWS, 1)) > 0.6).astype("float64"),
    "kind": _random.integers(0, CLASSES, (ROWS, 1)),
}
WEIGHTS = {name: _random.uniform(0, 2, ROWS) * (np.arange(ROWS) % 3 > 0) for name in LABELS}
# Sizes that N does not divide, fewer rows than replicas, and a last batch of one row.
SIZES = {1: (5, 1, 3), 2: (7, 1, 4, 1), 3: (8, 2, 5, 1), 8: (11, 3, 16, 7, 1)}


def batches_of(sizes: Any) -> list[Batch]:
    return cut((X, LABELS, WEIGHTS), sizes)


class Evaluated:
    """A model of two outputs, with losses of two reductions and metrics of six kinds."""

    def __init__(self, strategy: Any = None) -> None:
        keras.utils.set_random_seed(SEED)
        with strategy.scope() if strategy else contextlib.nullcontext():
            x = keras.Input((3,), dtype="float64")
            hidden = keras.layers.Dense(5, "tanh", kernel_regularizer="l2", **FLOAT)(x)
            hidden = keras.layers.BatchNormalization(**FLOAT)(hidden)
            hidden = keras.layers.Dropout(0.5, **FLOAT)(hidden)
            dense = functools.partial(keras.layers.Dense, **FLOAT)
            outputs = {
                "likely": dense(1, "sigmoid", name="likely")(hidden),
                "kind": dense(CLASSES, "softmax", name="kind")(hidden),
            }
            self.model = keras.Model(x, outputs)
            self.loss = {
                "likely": keras.losses.BinaryCrossentropy(
                    reduction="mean_with_sample_weight", **FLOAT
                ),
                "kind": keras.losses.SparseCategoricalCrossentropy(**FLOAT),
            }
            metrics = keras.metrics
            self.metrics = {
                "likely": [
                    metrics.MeanAbsoluteError(**FLOAT),
                    metrics.AUC(num_thresholds=50, **FLOAT),
                    metrics.Precision(**FLOAT),
                    metrics.TruePositives(thresholds=0.3, **FLOAT),
                ],
                "kind": [
                    metrics.SparseCategoricalAccuracy(**FLOAT),
                    metrics.SparseCategoricalCrossentropy(**FLOAT),
                ],
            }

    def results(self) -> dict[str, float]:
        metrics = [metric for group in self.metrics.values() for metric in group]
        return {type(metric).__name__: float(metric.result()) for metric in metrics}

    def reset(self) -> None:
        for group in self.metrics.values():
            for metric in group:
                metric.reset_state()


@functools.cache
def truth(sizes: tuple[int, ...]) -> tuple[list[float], dict[str, float], list[dict[str, Any]]]:
    """Returns the loss of each batch, the metrics of all, and the predictions of each."""
    one = Evaluated()
    losses, predictions = [], []
    for x, y, weights in batches_of(sizes):
        outputs = one.model(x, training=False)
        loss = plain_loss(one.loss, y, outputs, weights) + sum(one.model.losses)
        losses.append(float(loss))
        predictions.append({name: output.numpy() for name, output in outputs.items()})
        for name, metrics in one.metrics.items():
            for metric in metrics:
                metric.update_state(y[name], outputs[name])
    return losses, one.results(), predictions


@functools.cache
def evaluated(replicas: int) -> tuple[Evaluated, Any]:
    strategy = strategy_of(replicas)
    one = Evaluated(strategy)
    return one, tmg.make_eval_step(one.model, one.loss, strategy, metrics=one.metrics)


def shards(replicas: int) -> Iterator[Any]:
    batches = batches_of(SIZES[replicas])
    source = dataset_of(lambda: batches, batches[0])
    return iter(tmg.distribute_dataset(source, strategy_of(replicas)))


# Fails if a row of a small batch counts once for each replica, a metric sees the rows of one
# replica, a loss is a mean of the means of replicas, or a layer behaves as in training.
@pytest.mark.parametrize("replicas", SIZES)
def test_loss_and_metrics_are_over_each_row_once(replicas: int) -> None:
    losses, metrics, _ = truth(SIZES[replicas])
    one, step = evaluated(replicas)
    before = [variable.numpy() for variable in one.model.variables]
    for batch, loss in zip(shards(replicas), losses, strict=True):
        np.testing.assert_allclose(step(batch)["loss"], loss, **LOGS)
    assert one.results() == pytest.approx(metrics, rel=1e-9)
    for variable, value in zip(one.model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, variable.path)


# Fails if several batches in one call are counted by batches, or the last of them is left out.
def test_several_batches_in_one_call() -> None:
    replicas = 3
    one, step = evaluated(replicas)
    one.reset()
    iterator = shards(replicas)
    logs = step.run(iterator, 100)
    assert int(logs["steps"]) == len(SIZES[replicas])
    x, y, weights = batches_of([sum(SIZES[replicas])])[0]
    alone = Evaluated()
    loss = plain_loss(alone.loss, y, alone.model(x), weights) + sum(alone.model.losses)
    np.testing.assert_allclose(logs["loss"], float(loss), **LOGS)
    assert one.results() == pytest.approx(truth(SIZES[replicas])[1], rel=1e-9)


# Fails if rows of replicas come in another order, a row of a small batch comes once for each
# replica or not at all, or an output takes the place of another.
@pytest.mark.parametrize(
    "replicas",
    [pytest.param(1, marks=pytest.mark.more), pytest.param(2, marks=pytest.mark.more), 3, 8],
)
def test_each_row_is_predicted_once_and_in_order(replicas: int) -> None:
    _, _, expected = truth(SIZES[replicas])
    one, _ = evaluated(replicas)
    step = tmg.make_predict_step(one.model, strategy_of(replicas))
    for batch, outputs in zip(shards(replicas), expected, strict=True):
        found = step(batch)
        assert set(found) == set(outputs)
        for name, output in outputs.items():
            np.testing.assert_allclose(found[name], output, rtol=1e-12, err_msg=name)
