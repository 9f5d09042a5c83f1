"""Sums and weights add up however rows are cut, and rows are cut in proportion.

What replicas make of them is the law of tests/promises.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from hypothesis import HealthCheck, assume, given, settings, strategies as st

import tfmultigpu as tmg

REDUCTIONS = ("sum_over_batch_size", "mean_with_sample_weight", "sum")
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
a_weight = st.sampled_from([0.0, 0.0, 1e-6, 1e-3, 0.25, 1.0, 1.0, 3.0, 1e3, 1e6])
a_share = st.one_of(st.integers(1, 9), st.floats(0.01, 100.0))


def assert_near(actual: Any, expected: Any, what: str) -> None:
    np.testing.assert_allclose(actual, expected, rtol=EXACT, atol=EXACT, err_msg=what)


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
