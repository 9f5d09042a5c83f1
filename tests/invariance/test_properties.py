"""Whatever the batches, shares, micro-batches and weights: replicas give what one device gives.

Everything computes in float64, so that weights of any size can be drawn and a difference of 1e-6
is never rounding.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu.testing import Training
from tfmultigpu.testing.reference import OneDevice

REDUCTIONS = ("sum_over_batch_size", "mean_with_sample_weight", "sum")
# Replicas, micro-batches (13 are more than any batch has rows) and the shares of a distributed
# dataset: what a trace depends on. Everything else is drawn.
SETUPS = [(2, 13, None), (3, 2, (1, 5, 2))]
LARGEST = 12
EXACT = 1e-6

_random = np.random.default_rng(23)
X = _random.normal(size=(5 * LARGEST, 4))
Y = _random.normal(size=(5 * LARGEST, 2))

# The same examples each time; what fails can be repeated from what is printed.
drawn = functools.partial(
    settings,
    deadline=None,
    derandomize=True,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
sizes = st.lists(st.integers(1, LARGEST), min_size=1, max_size=4)
a_weight = st.sampled_from([0.0, 0.0, 1e-6, 1e-3, 0.25, 1.0, 1.0, 3.0, 1e3, 1e6])
a_share = st.one_of(st.integers(1, 9), st.floats(0.01, 100.0))


def training() -> Training:
    """A head for each reduction, penalties of the weights and of the activations, clipping."""
    dense = functools.partial(keras.layers.Dense, dtype="float64")
    inputs = keras.Input((4,), dtype="float64")
    hidden = dense(5, activation="tanh", kernel_regularizer="l2", activity_regularizer="l1")(inputs)
    heads = {name: dense(2, name=name)(hidden) for name in REDUCTIONS}
    # Huber: its gradient is bounded, so that weights of a million do not blow up what is trained.
    loss = {name: keras.losses.Huber(reduction=name, dtype="float64") for name in REDUCTIONS}
    return Training(
        keras.Model(inputs, heads),
        keras.optimizers.SGD(0.05, momentum=0.9),
        loss,
        metrics={REDUCTIONS[0]: [keras.metrics.MeanAbsoluteError(name="error")]},
        weighted_metrics={REDUCTIONS[1]: [keras.metrics.MeanSquaredError(name="weighted")]},
        loss_weights={"sum_over_batch_size": 1.0, "mean_with_sample_weight": 0.5, "sum": 0.25},
        clip_norm=1.0,
    )


class Setup:
    """One device and N replicas, built once and set back to the same start for each example."""

    def __init__(self, replicas: int, micro_batches: int, shares: Any) -> None:
        self.strategy = strategy_of(replicas)
        keras.utils.set_random_seed(3)
        self.truth = training()
        self.loop = OneDevice(self.truth)
        self.loop.build(batches_of([1], [1.0])[0])
        keras.utils.set_random_seed(3)
        with self.strategy.scope():
            self.ours = this = training()
        self.step = tmg.make_train_step(
            this.model,
            this.optimizer,
            this.loss,
            self.strategy,
            metrics=this.metrics,
            weighted_metrics=this.weighted_metrics,
            loss_weights=this.loss_weights,
            clip_norm=this.clip_norm,
            micro_batches=micro_batches,
        )
        self.batches: list[Any] = batches_of([1], [1.0])
        dataset = tf.data.Dataset.from_generator(
            lambda: iter(self.batches),
            output_signature=tf.nest.map_structure(
                lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), self.batches[0]
            ),
        )
        self.data = tmg.distribute_dataset(dataset, self.strategy, shares=shares)
        self._start = values(self.ours)

    def cut_anywhere(self, batch: Any, sizes: Sequence[int]) -> Any:
        """The batch with so many rows on each replica, as something else than this library cuts."""
        replicas = self.strategy.num_replicas_in_sync
        if replicas == 1:
            return batch
        ends = np.cumsum([0, *sizes])

        def spread(array: Any) -> Any:
            return self.strategy.experimental_distribute_values_from_function(
                lambda context: tf.constant(
                    array[ends[context.replica_id_in_sync_group] :][
                        : sizes[context.replica_id_in_sync_group]
                    ]
                )
            )

        return tf.nest.map_structure(spread, batch)

    def reset(self, one: Training) -> None:
        for variable, value in zip(one.variables().values(), self._start, strict=True):
            variable.assign(value)


@functools.cache
def setup(replicas: int, micro_batches: int, shares: Any) -> Setup:
    return Setup(replicas, micro_batches, shares)


def batches_of(rows: Sequence[int], weights: Sequence[float]) -> list[Any]:
    """Batches of these sizes; the weights go to the rows in turn, another row for each output."""
    batches, start = [], 0
    for size in rows:
        part = slice(start, start + size)
        weight = {
            name: np.array([weights[(start + i + 7 * k) % len(weights)] for i in range(size)])
            for k, name in enumerate(REDUCTIONS)
        }
        batches.append((X[part], dict.fromkeys(REDUCTIONS, Y[part]), weight))
        start += size
    return batches


def values(one: Training) -> list[np.ndarray]:
    return [variable.numpy() for variable in one.variables().values()]


def assert_near(actual: Any, expected: Any, what: str) -> None:
    np.testing.assert_allclose(actual, expected, rtol=EXACT, atol=EXACT, err_msg=what)


def assert_same_variables(one: Setup) -> None:
    named = zip(one.truth.variables(), values(one.truth), values(one.ours), strict=True)
    for name, expected, actual in named:
        assert_near(actual, expected, name)


@pytest.mark.parametrize(("replicas", "micro_batches", "shares"), SETUPS)
def test_any_batches_any_cuts_any_weights(replicas: int, micro_batches: int, shares: Any) -> None:
    @drawn(max_examples=12)
    @given(
        rows=sizes,
        cuts=st.lists(a_share, min_size=replicas, max_size=replicas),
        weights=st.lists(a_weight, min_size=1, max_size=10),
        steps=st.integers(1, 5),
    )
    def hold(rows: list[int], cuts: list[float], weights: list[float], steps: int) -> None:
        one = setup(replicas, micro_batches, shares)
        one.batches = batches_of(rows, weights)
        one.reset(one.truth)
        one.reset(one.ours)
        expected = [one.loop.step(tensors(batch)) for batch in one.batches]
        for batch, shards, log in zip(one.batches, one.data, expected, strict=True):
            if len(batch[0]) >= replicas:
                shards = one.cut_anywhere(batch, tmg.plan_shares(len(batch[0]), cuts))
            logs = one.step(shards)
            for name in ("loss", "gradient_norm"):
                assert_near(logs[name], log[name], name)
        assert_same_variables(one)

        one.reset(one.ours)
        iterator = iter(one.data)
        done = 0
        while done < len(rows):
            logs = one.step.run(iterator, steps)
            assert int(logs["steps"]) == min(steps, len(rows) - done)
            assert float(logs["weight"]) == sum(rows[done : done + steps])
            done += int(logs["steps"])
            assert_near(logs["gradient_norm"], expected[done - 1]["gradient_norm"], "last norm")
            if steps == 1:
                assert_near(logs["loss"], expected[done - 1]["loss"], "loss of step.run")
        assert_same_variables(one)

    hold()


def tensors(batch: Any) -> Any:
    return tf.nest.map_structure(tf.convert_to_tensor, batch)


@drawn(max_examples=60)
@given(
    cuts=st.lists(st.integers(1, LARGEST - 1), max_size=4, unique=True).map(sorted),
    weights=st.none() | st.lists(a_weight, min_size=LARGEST, max_size=LARGEST),
    mask=st.none() | st.lists(st.booleans(), min_size=LARGEST, max_size=LARGEST),
    reduction=st.sampled_from(REDUCTIONS),
)
def test_sums_and_weights_add_up_however_the_rows_are_cut(
    cuts: list[int], weights: Any, mask: Any, reduction: str
) -> None:
    loss = keras.losses.MeanAbsoluteError(reduction=reduction, dtype="float64")
    weight = None if weights is None else np.array(weights)

    def predictions(part: slice) -> tf.Tensor:
        y_pred = tf.constant(X[part, :2])
        if mask is not None:
            y_pred._keras_mask = tf.constant(mask[part])
        return y_pred

    def pair(part: slice) -> tmg.LossSum:
        of_rows = None if weight is None else tf.constant(weight[part])
        return tmg.loss_sum(loss, tf.constant(Y[part]), predictions(part), of_rows)

    ends = [0, *cuts, LARGEST]
    parts = [pair(slice(a, b)) for a, b in itertools.pairwise(ends)]
    whole = pair(slice(0, LARGEST))
    assert_near(sum(float(one.sum) for one in parts), whole.sum, "sums")
    if reduction != "sum":
        assert_near(sum(float(one.weight) for one in parts), whole.weight, "weights")
    assert isinstance(whole, type(parts[0]))
    of_rows = None if weight is None else tf.constant(weight)
    everything = slice(0, LARGEST)
    expected = loss(tf.constant(Y[everything]), predictions(everything), sample_weight=of_rows)
    mean = tf.math.divide_no_nan(whole.sum, tf.cast(whole.weight, whole.sum.dtype))
    assert_near(mean, expected, "sum over weight")


@drawn(max_examples=60)
@given(
    rows=st.integers(1, 40),
    shares=st.lists(a_share, min_size=1, max_size=5) | st.integers(1, 6).map(lambda n: [1] * n),
)
def test_every_row_is_on_one_replica_or_the_whole_batch_on_all(
    rows: int, shares: list[float]
) -> None:
    from tfmultigpu.data.partition import cut_rows
    from tfmultigpu.data.shares import integer_shares

    parts = [part.numpy().tolist() for part in cut_rows(tf.range(rows), integer_shares(shares))]
    if rows < len(shares):
        assert parts == [list(range(rows))] * len(shares)
        return
    assert [row for part in parts for row in part] == list(range(rows))
    assert all(parts), "a replica without rows"
    assume(min(rows * share / sum(shares) for share in shares) >= 1)
    for part, share in zip(parts, shares, strict=True):
        assert abs(len(part) - rows * share / sum(shares)) < 1 + 1e-3, "not in proportion"
