"""N replicas give what one device gives, whatever the batch sizes: the promise, with numbers.

Truth is a loop written by hand for one device (``ByHand``), which has no code of ours in it.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from one_device import assert_same, cut
from small_problem import CASES, MIXED, SIZES, STEPS, crossentropy, one_device, replicated, truth


@pytest.mark.parametrize(
    ("replicas", "micro_batches", "case"),
    [(2, 1, "weights"), (2, 2, "l2"), (2, 3, "clip"), (3, 1, "l2"), (3, 2, "clip"), (4, 1, "clip")],
)
def test_twenty_sgd_steps_at_every_batch_size(replicas, micro_batches, case):
    run = replicated(replicas, case, micro_batches=micro_batches)
    for size in SIZES:
        sizes = (size,) * STEPS
        result = run.train(cut(CASES[case][0], sizes))
        assert_same(result, truth(case, sizes), what=f"batches of {size}")
        assert result.iterations == STEPS
    expected = truth(case, tuple(MIXED))
    assert_same(run.train(cut(CASES[case][0], MIXED)), expected, what=f"batches of {MIXED}")


def test_twenty_adam_steps():
    run = replicated(8, "all", optimizer="adam", micro_batches=2)
    result = run.train(cut(CASES["all"][0], MIXED))
    assert_same(result, truth("all", tuple(MIXED), "adam"), weights=2e-6)


def test_logs_say_what_one_device_would():
    arrays = CASES["all"][0]
    run = replicated(3, "all")
    logs = run.train(cut(arrays, MIXED)).logs
    assert set(logs[0]) == {"loss", "weight", "gradient_norm", "skipped", "loss_scale"}
    sums = [batch[2].sum() for batch in cut(arrays, MIXED)]
    np.testing.assert_allclose([log["weight"] for log in logs], sums, rtol=1e-6)
    assert {log["skipped"] for log in logs} == {0.0}
    assert {log["loss_scale"] for log in logs} == {1.0}
    by_hand = one_device("all")
    by_hand.reset()
    x, y, weight = (tf.constant(part) for part in cut(arrays, MIXED)[0])
    with tf.GradientTape() as tape:
        value = crossentropy("mean_with_sample_weight")(y, by_hand.model(x), sample_weight=weight)
        value += tf.add_n(by_hand.model.losses)
    norm = tf.linalg.global_norm(tape.gradient(value, by_hand.model.trainable_variables))
    assert float(norm) > 0.3, "clipping must have something to do"
    assert logs[0]["gradient_norm"] == pytest.approx(float(norm), rel=1e-5)
