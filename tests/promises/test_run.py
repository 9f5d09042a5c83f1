"""``step.run`` trains until the data ends, and counts the steps that ran."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.model import FLOAT, Batch, Training, regression, small
from law.pair import LOGS, Pair

SIZES = (7, 1, 4, 2, 5, 1, 1)  # The last batch has one row, fewer than there are replicas.
WEIGHTS = np.array([0.5, 3.0, 0.0, 1.0, 10.0, 0.25, 2.0])


def build() -> Training:
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight", **FLOAT)
    return small(keras.optimizers.SGD(0.1, momentum=0.9), loss)


def batches_of(sizes: Any) -> list[Batch]:
    return [
        (x, y, WEIGHTS[(np.arange(len(x)) + 2 * n) % len(WEIGHTS)])
        for n, (x, y) in enumerate(regression(sizes))
    ]


@functools.cache
def pair_of(replicas: int) -> Pair:
    return Pair(build, batches_of([1])[0], replicas)


def expected_logs(pair: Pair, batches: list[Batch]) -> list[tuple[float, float, float]]:
    """Trains one device; returns loss, weight and norm of each batch."""
    logs = pair.plain.train(batches)
    return [
        (log["loss"], float(weight.sum()), log["gradient_norm"])
        for log, (_, _, weight) in zip(logs, batches, strict=True)
    ]


def assert_logs(logs: dict[str, Any], steps: list[tuple[float, float, float]]) -> None:
    """Holds that logs are those of several steps: one division, sums, or the last value."""
    losses, weights, norms = np.transpose(steps)
    assert int(logs["steps"]) == len(steps)
    np.testing.assert_allclose(logs["loss"], np.sum(losses * weights) / np.sum(weights), **LOGS)
    np.testing.assert_allclose(logs["weight"], np.sum(weights), **LOGS)
    np.testing.assert_allclose(logs["gradient_norm"], norms[-1], **LOGS)
    assert float(logs["skipped"]) == 0


# Fails if a call stops before the last batch, counts one that was not there, trains on a batch
# twice or after the end, or if its loss is the mean of the losses of its steps.
@pytest.mark.parametrize(
    ("replicas", "calls"),
    [(2, (3, 100)), (3, (1, 5, 2)), (1, (7, 1))],
    ids=["N=2", "N=3", "N=1"],
)
def test_the_data_ends_within_a_call(replicas: int, calls: tuple[int, ...]) -> None:
    pair = pair_of(replicas)
    pair.reset()
    batches = batches_of(SIZES)
    expected = expected_logs(pair, batches)
    iterator, begin = pair.shards(batches), 0
    for asked in calls:
        end = min(begin + asked, len(batches))
        logs = pair.step.run(iterator, asked)
        if end > begin:
            assert_logs(logs, expected[begin:end])
        else:
            assert int(logs["steps"]) == 0
        begin = end
        assert int(pair.ours.optimizer.iterations.numpy()) == end
    assert int(pair.step.run(iterator, 3)["steps"]) == 0
    assert int(pair.ours.optimizer.iterations.numpy()) == len(batches)
    pair.assert_same()


# Fails if a second pass over the same data does not begin with its first batch.
def test_each_pass_is_over_all_batches() -> None:
    pair = pair_of(2)
    pair.reset()
    batches = batches_of(SIZES[:3])
    expected = expected_logs(pair, [*batches, *batches])
    for begin in (0, 3):
        assert_logs(pair.step.run(pair.shards(batches), 9), expected[begin : begin + 3])
    pair.assert_same()


# Fails if a step whose batch the data could not give is counted, or moves a weight.
def test_the_end_of_the_data_in_a_function_of_the_user() -> None:
    pair = pair_of(3)
    pair.reset()
    batches = batches_of(SIZES)
    expected = expected_logs(pair, batches)

    @tf.function
    def train(iterator: Any) -> Any:
        return pair.step(next(iterator))["loss"]

    iterator = pair.shards(batches)
    losses = [float(train(iterator)) for _ in batches]
    np.testing.assert_allclose(losses, [one[0] for one in expected], **LOGS)
    with pytest.raises((tf.errors.OutOfRangeError, StopIteration)):
        train(iterator)
    assert int(pair.ours.optimizer.iterations.numpy()) == len(batches)
    pair.assert_same()


# Fails if a step inside a tf.function trains while that is traced, takes a batch that is not its
# own, or knows no longer how many rows a batch has that is smaller than the number of replicas.
@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.more), 3])
def test_steps_inside_a_function_of_the_user(replicas: int) -> None:
    pair = pair_of(replicas)
    pair.step(next(pair.shards(batches_of([4]))))  # The first step is verified, and eager.
    pair.reset()
    batches = batches_of(SIZES)
    expected = expected_logs(pair, batches)

    @tf.function
    def first_two_and_the_rest(iterator: Any) -> Any:
        first = pair.step(next(iterator))
        second = pair.step(next(iterator))
        return first["loss"], second["loss"], pair.step.run(iterator, 10)

    first, second, logs = first_two_and_the_rest(pair.shards(batches))
    np.testing.assert_allclose([first, second], [one[0] for one in expected[:2]], **LOGS)
    assert_logs(logs, expected[2:])
    assert int(pair.ours.optimizer.iterations.numpy()) == len(batches)
    pair.assert_same()


# Fails if an empty pass divides by nothing, counts a step or changes a variable.
def test_data_without_batches_is_no_step() -> None:
    pair = pair_of(2)
    pair.reset()
    logs = pair.step.run(pair.shards([]), 3)
    assert int(logs["steps"]) == 0
    pair.truth.assign(pair.start)
    pair.assert_same(rtol=0, atol=0)
