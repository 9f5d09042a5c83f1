"""How many rows a micro-batch has, and that replicas meet once for all of them."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from forced_addition import forcing_addition
from one_device import strategy_of

import tfmultigpu as tmg

rng = np.random.default_rng(5)
X = rng.normal(size=(90, 6)).astype("float32")
Y = rng.integers(0, 3, 90)


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def quiet():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, use_bias=False)])
    return tmg.testing.Training(model, momentum(), crossentropy())


def make_step(strategy, build=quiet, **options):
    with strategy.scope():
        training = build()
    return tmg.make_train_step(
        training.model, training.optimizer, training.loss, strategy, **options
    )


class Watch(keras.layers.Layer):
    """Notes how many rows it is given at once, on which replica."""

    def __init__(self, seen):
        super().__init__()
        self.note = lambda replica, rows: seen.append((int(replica), int(rows)))

    def compute_output_shape(self, input_shape):
        return input_shape

    def call(self, inputs):
        context = tf.distribute.get_replica_context()
        if not tf.inside_function() or context is None:
            return inputs
        replica = tf.identity(context.replica_id_in_sync_group)
        with tf.control_dependencies(
            [tf.py_function(self.note, [replica, tf.shape(inputs)[0]], [])]
        ):
            return tf.identity(inputs)


def watched(seen):
    def build():
        model = keras.Sequential([keras.Input((6,)), Watch(seen), keras.layers.Dense(3)])
        return tmg.testing.Training(model, momentum(), crossentropy())

    return build


def test_no_more_parts_than_rows() -> None:
    seen: list[tuple[int, int]] = []
    step = make_step(strategy_of(2), watched(seen), micro_batches=8, verify=False)
    step((X[:6], Y[:6]))
    assert sorted(seen) == [(0, 1)] * 3 + [(1, 1)] * 3


def test_one_all_reduce_for_a_step(monkeypatch) -> None:
    """However often replicas add, they meet once; on GPUs that is one all-reduce."""
    calls: list[int] = []
    original = tf.distribute.ReplicaContext.all_reduce

    def counting(self, reduce_op, value, options=None):
        calls.append(len(tf.nest.flatten(value)))
        return original(self, reduce_op, value, options)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", counting)
    with forcing_addition("collective"):
        step = make_step(strategy_of(2), micro_batches=4, verify=False)
        step((X[:20], Y[:20]))
    assert calls == [2, 2]  # once on each replica: the gradient, then sums and weights


def test_numbers_that_make_no_sense() -> None:
    for micro_batches in ((1, 0), 0, "12", None):
        with pytest.raises(ValueError, match=r"a whole number, at least 1\. Received: micro_batch"):
            make_step(strategy_of(2), micro_batches=micro_batches)
