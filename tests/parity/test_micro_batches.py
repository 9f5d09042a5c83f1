"""Each replica takes its shard in its own number of micro-batches; one device gives the same."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu.strategies.collectives import forcing_addition

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


def test_no_replica_holds_more_rows_than_planned() -> None:
    seen: list[tuple[int, int]] = []
    shares, maximum = (15, 5), (15, 2)
    counts = tmg.data.plan_micro_batches(shares, maximum)
    assert counts == (1, 3)
    strategy = strategy_of(2)
    step = make_step(strategy, watched(seen), micro_batches=np.array(counts), verify=False)
    data = list(tmg.distribute_dataset((X[:27], Y[:27]), strategy, batch_size=20, shares=shares))
    step(data[0])
    assert sorted(seen) == [(0, 15), (1, 1), (1, 2), (1, 2)]
    seen.clear()
    step(data[1])  # the partial batch: 5 and 2 rows, so no part has none and no row comes twice
    assert sorted(seen) == [(0, 5), (1, 1), (1, 1)]
    seen.clear()
    step((X[:1], Y[:1]))  # one row, on both, each time once
    assert sorted(seen) == [(0, 1), (1, 1)]


def test_alike_on_all_replicas_no_more_parts_than_rows() -> None:
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
        step = make_step(strategy_of(2), micro_batches=(1, 4), verify=False)
        step((X[:20], Y[:20]))
    assert calls == [2, 2]  # once on each replica: the gradient, then sums and weights


class Counted(keras.layers.Layer):
    """Assigns to a variable that is added over replicas, whenever it is called."""

    def __init__(self):
        super().__init__()
        self.calls = self.add_weight(
            shape=(), initializer="zeros", trainable=False, aggregation="sum"
        )

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs


def test_what_meets_in_the_middle_of_a_step_is_refused() -> None:
    def build():
        model = keras.Sequential([keras.Input((6,)), Counted(), keras.layers.Dense(3)])
        return tmg.testing.Training(model, momentum(), crossentropy())

    step = make_step(strategy_of(2), build, micro_batches=(1, 3))
    before = [variable.numpy() for variable in step.model.variables]
    with pytest.raises(tmg.TfMultiGpuError) as caught:
        step((X[:20], Y[:20]))
    text = str(caught.value)
    assert text.startswith("A layer synchronises the replicas whenever it is called, such as")
    assert "Received: micro_batches=(1, 3). Give all the same number, micro_batches=3" in text
    for variable, value in zip(step.model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_numbers_that_make_no_sense() -> None:
    for micro_batches, text in (
        ((1, 2, 3), r"each replica, of all workers\. Received: micro_batches=\(1, 2, 3\) for 2"),
        ((4,), r"micro_batches=\(4,\) for 2 replica\(s\)\. Write tmg\.data\.plan_micro_batches"),
        ((1, 0), r"a whole number, at least 1, or one .*Received: micro_batches=0\."),
        ((1, 1.5), r"Received: micro_batches=1\.5\."),
        ("12", r"Received: micro_batches='12'\."),
        (None, r"Received: micro_batches=None\."),
    ):
        with pytest.raises(ValueError, match=text):
            make_step(strategy_of(2), micro_batches=micro_batches)
