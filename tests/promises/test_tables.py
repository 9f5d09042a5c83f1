"""Tables of embeddings train as on one device, whether rows or all of the table are updated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.model import FLOAT, Batch, Training
from law.pair import Pair, strategy_of

import tfmultigpu as tmg

IDS, WIDTH = 4100, 16  # So large that lists of rows are added, not tables.
optimizers, layers = keras.optimizers, keras.layers
_random = np.random.default_rng(7)
ITEMS = _random.integers(1, IDS, (40, 3)).astype("int32")
ITEMS[:, 1] = ITEMS[::-1, 0]  # Ids are repeated within and across replicas,
ITEMS[::3, 2] = 5
USERS = _random.integers(0, IDS, (40, 1)).astype("int32")
USERS[::2] = 3  # and those of odd rows are on one replica alone.
Y = _random.normal(size=(40, 2))
WEIGHTS = _random.choice([0.25, 0.5, 2.0], size=40)


class Case(NamedTuple):
    optimizer: Callable[[], Any]
    replicas: int
    clip_norm: float | None = None
    tied: bool = False
    options: tuple[tuple[str, Any], ...] = ()


CASES = {
    "SGD, rows, clipped": Case(lambda: optimizers.SGD(0.5), 3, clip_norm=0.05),
    "Adagrad, on every replica, in micro-batches": Case(
        lambda: optimizers.Adagrad(0.5, clipvalue=0.01),
        2,
        options=(("micro_batches", 3), ("shard_update", False)),
    ),
    "Adam, the whole table": Case(lambda: optimizers.Adam(0.01), 2),
    "tied to the output": Case(lambda: optimizers.SGD(0.5), 2, tied=True),
}


def batches_of(sizes: list[int]) -> list[Batch]:
    batches: list[Batch] = []
    start = 0
    for size in sizes:
        rows = slice(start, start + size)
        items = ITEMS[rows].copy()
        items[::2, 0] = 0  # Masked.
        batches.append(({"items": items, "users": USERS[rows]}, Y[rows], WEIGHTS[rows]))
        start += size
    return batches


def two_tables(case: Case) -> Training:
    """Two tables, of which one is used in two places; masked, weighted."""
    items = keras.Input((3,), dtype="int32", name="items")
    users = keras.Input((1,), dtype="int32", name="users")
    kind = layers.ReversibleEmbedding if case.tied else layers.Embedding
    shared = kind(IDS, WIDTH, mask_zero=True, **FLOAT)
    own = layers.Embedding(IDS, WIDTH, **FLOAT)
    rows = [shared(items), own(users), shared(users)]
    means = [layers.GlobalAveragePooling1D(**FLOAT)(each) for each in rows]
    hidden = layers.Dense(WIDTH, "tanh", **FLOAT)(layers.Concatenate(**FLOAT)(means))
    if case.tied:
        hidden = shared(hidden, reverse=True)
    model = keras.Model({"items": items, "users": users}, layers.Dense(2, **FLOAT)(hidden))
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight", **FLOAT)
    return Training(model, case.optimizer(), loss, clip_norm=case.clip_norm)


# Fails if rows of a repeated id are not added, or clipped or squared before; if rows of a replica,
# a micro-batch or a second table are lost, or written to other rows or to one replica alone.
@pytest.mark.parametrize("name", CASES)
def test_tables_train_as_on_one_device(name: str) -> None:
    case = CASES[name]
    pair = Pair(
        functools.partial(two_tables, case), batches_of([1])[0], case.replicas, **dict(case.options)
    )
    pair.hold(batches_of([7, 6, 1, 2]), steps=4 if case.replicas == 3 else None)
    assert pair.step.verification.outcome == "same"


class Double(tmg.steps.Feature):
    """Doubles the gradient, of which it knows tensors alone."""

    def on_gradient(self, gradient: Any) -> Any:
        assert all(isinstance(tensor, tf.Tensor) for tensor in gradient.tensors)
        return gradient._replace(tensors=tuple(2.0 * tensor for tensor in gradient.tensors))


# Fails if a feature of a user gets a list of rows in place of the tensor that it was written for.
def test_a_feature_gets_the_gradient_of_a_table_as_a_tensor() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,), dtype="int32"), layers.Embedding(IDS, WIDTH)])
        optimizer = keras.optimizers.SGD(0.5)
    before = model.get_weights()[0]
    step = tmg.make_train_step(
        model, optimizer, keras.losses.MeanSquaredError(reduction="sum"), strategy,
        features=[Double()], verify=False,
    )  # fmt: skip
    ids = np.array([[1, 2, 2], [9, 9, 9]], "int32")
    step((ids, np.zeros((2, 3, WIDTH), "float32")))
    # The mean over the last axis; twice of what the ids say.
    counts = np.bincount(ids.ravel(), minlength=IDS)[:, None]
    expected = before - 0.5 * 2 * counts * 2 * before / WIDTH
    np.testing.assert_allclose(model.get_weights()[0], expected, rtol=1e-6, atol=1e-8)


# Fails if a step of float16 that overflows on one replica changes a row, or a slot of one.
def test_an_overflow_on_one_replica_changes_no_row() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,), dtype="int32"), layers.Embedding(IDS, WIDTH)])
        optimizer = keras.optimizers.Adagrad(0.5)
    step = tmg.make_train_step(model, optimizer, "mse", strategy, loss_scale="dynamic")
    ids, y = np.array([[1, 2, 2], [9, 9, 9]], "int32"), np.zeros((2, 3, WIDTH), "float32")
    step((ids, y))
    before = [each.numpy() for each in (*model.variables, *optimizer.variables)]
    y[1, 0, 0] = np.inf
    assert float(step((ids, y))["skipped"]) == 1.0
    for variable, value in zip((*model.variables, *optimizer.variables), before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, variable.path)


# Fails if ragged ids, or ids that a layer of a user looks up by TensorFlow, are read otherwise.
def test_ragged_ids_and_lookups_of_a_layer_of_a_user() -> None:
    ragged = tf.ragged.constant([[1, 2], [3], [1, 1, 4]], dtype=tf.int32)

    class Lookup(layers.Layer):
        def build(self, _: Any) -> None:
            self.table = self.add_weight(shape=(IDS, WIDTH), name="table")

        def call(self, ids: Any) -> Any:
            rows = tf.nn.embedding_lookup(self.table, ids)
            flat = tf.gather(self.table, ids.flat_values[:0], axis=0)  # None at all.
            return tf.reduce_sum(rows, axis=1) + tf.reduce_sum(flat, axis=0)

        def compute_output_shape(self, shape: Any) -> Any:
            return shape[0], WIDTH

    strategy = strategy_of(2)
    with strategy.scope():
        ids = keras.Input((None,), dtype="int32", ragged=True)
        model = keras.Model(ids, Lookup()(ids))
        optimizer = keras.optimizers.SGD(0.5)
    before = model.get_weights()[0]
    loss = keras.losses.MeanSquaredError(reduction="sum")
    data = tf.data.Dataset.from_tensors((ragged, np.zeros((3, WIDTH), "float32")))
    step = tmg.make_train_step(model, optimizer, loss, strategy)
    for shards in tmg.distribute_dataset(data, strategy):
        step(shards)
    expected = before.copy()
    for row in ragged.to_list():
        np.add.at(expected, row, -before[row].sum(axis=0) / WIDTH)
    np.testing.assert_allclose(model.get_weights()[0], expected, rtol=1e-5, atol=1e-7)
    assert step.verification.outcome == "same"


# Fails if what is added to a window of a table is taken for empty in the function that empties it.
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.more)])
def test_a_loop_by_hand_in_one_function(replicas: int) -> None:
    strategy = strategy_of(replicas)
    ids = ITEMS[:8]
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,), dtype="int32"), layers.Embedding(IDS, WIDTH)])
        optimizer = keras.optimizers.SGD(0.5)
        window = tmg.GradientAccumulator(model.trainable_variables)
    before = model.get_weights()[0]

    def replica(ids: Any) -> None:
        with tf.GradientTape() as tape:
            values = tf.reduce_sum(model(ids, training=True) ** 2, [1, 2])
            pair = tmg.LossSum(tf.reduce_sum(values), tf.cast(tf.size(values), tf.float32))
        window.add(tape.gradient(pair.sum, model.trainable_variables), pair)

    @tf.function(reduce_retracing=True)
    def step(shards: Any) -> None:
        strategy.run(replica, args=(shards,))
        gradients, _ = window.reduce()
        tmg.apply_reduced_gradients(optimizer, gradients, model.trainable_variables)

    for shards in tmg.distribute_dataset(ids, strategy, batch_size=8):
        try:
            step(shards)
        except tf.errors.InvalidArgumentError as error:
            raise AssertionError("the rows of the window are taken for none") from error
    counts = np.bincount(ids.ravel(), minlength=IDS)[:, None]
    np.testing.assert_allclose(model.get_weights()[0], before - 0.5 * counts * 2 * before / 8,
                               rtol=1e-5, atol=1e-7)  # fmt: skip
