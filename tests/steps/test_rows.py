"""Where replicas meet within a pass: gather_rows, rows, synchronized layers; where they cannot.

Losses over the whole batch are in tests/promises/test_touching_rows.py, on workers in
test_agreement.py.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import step_on, strategy_of
from problems import network, networks

import tfmultigpu as tmg
from tfmultigpu.steps.sums_of_users import counting_once
from tfmultigpu.steps.values import Rows

layers = keras.layers
LossError = tmg.errors.LossError
_random = np.random.default_rng(5)


# gather_rows by itself ---------------------------------------------------------------------------


def on_replicas(
    replicas: int, batch: Any, function: Callable[[Any], Any], shares: Sequence[int] | None = None
) -> list[Any]:
    """What a function of a shard returns on each replica, in a loop of the user."""
    strategy = strategy_of(replicas)
    data = tmg.distribute_dataset(batch, strategy, batch_size=99, shares=shares)
    run = tf.function(lambda iterator: strategy.run(function, args=(next(iterator),)))
    results = run(iter(data))
    parts = [strategy.experimental_local_results(one) for one in tf.nest.flatten(results)]
    return [tf.nest.pack_sequence_as(results, [part[i] for part in parts]) for i in range(replicas)]


DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]


@pytest.mark.parametrize("rows", [1, 2, 7], ids=str)
def test_every_dtype_to_the_last_bit(rows: Any) -> None:
    numbers = _random.integers(0, 100, (rows, 2))
    batch = {name: tf.cast(numbers - 50 * (name[0] == "f"), name).numpy() for name in DTYPES}
    for dtype in ("int64", "uint64"):
        largest, least = np.iinfo(dtype).max, np.iinfo(dtype).min
        batch[f"large {dtype}"] = np.array([largest, 2**53 + 1, *[least] * 5][:rows], dtype)
    batch["not finite"] = np.array([np.nan, 1.0, np.inf, -np.inf, 2.0, 3.0, 4.0][:rows], "f4")
    for gathered in on_replicas(3, batch, tmg.gather_rows, (4, 1, 2)):
        for name, rows_of_all in gathered.items():
            assert rows_of_all.dtype == batch[name].dtype
            np.testing.assert_array_equal(rows_of_all.numpy(), batch[name])


def test_gradients_of_gradients_and_of_some_of_the_rows() -> None:
    batch = np.arange(1.0, 6.0, dtype="float32")[:, None]

    def second(shard: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(shard)
            with tf.GradientTape() as inner:
                inner.watch(shard)
                some = tf.gather(tmg.gather_rows(shard), [4, 0, 0])  # Its gradient: IndexedSlices.
                value = tf.reduce_sum(some**3)
            first = inner.gradient(value, shard)
        return first, outer.gradient(first, shard)

    pairs = zip(*on_replicas(2, batch, second), strict=True)
    first, again = (np.concatenate(parts) for parts in pairs)
    times = np.array([2, 0, 0, 0, 1])[:, None] * 2  # And two replicas.
    np.testing.assert_allclose(first, times * 3 * batch**2)
    np.testing.assert_allclose(again, times * 6 * batch)
    tensor = tf.constant(batch)
    assert tmg.gather_rows(tensor) is tensor  # One replica has them.


# In steps: places, and what is refused ------------------------------------------------------------

X, Z = _random.normal(size=(2, 7, 4)).astype("float32")
BATCH = X[:5], Z[:5]


dense = networks(4, lambda: keras.layers.Dense(4))
sgd = functools.partial(keras.optimizers.SGD, 0.02)


def step_with(loss: Any, replicas: int = 2, **options: Any) -> Any:
    return step_on(replicas, dense, sgd, loss, verify=False, **options)


# Fails if the places of parts, or in what XLA compiles, are not those in the global batch.
@pytest.mark.parametrize("options", [{"micro_batches": 3}, {"jit_compile": True}])
def test_places_need_no_other_replica(options: dict[str, Any], subtests: pytest.Subtests) -> None:
    def places(y_true: Any, y_pred: Any) -> Any:
        here = tmg.rows()
        own = tf.cast(here.first + tf.range(here.count), tf.float32)
        return own + 0 * tf.reduce_sum(y_pred, -1)

    step = step_with(places, **options)
    for rows in (7, 2, 1):
        with subtests.test(rows=rows):
            assert float(step((X[:rows], Z[:rows]))["loss"]) == pytest.approx((rows - 1) / 2)


def mean_of_all(y_true: Any, y_pred: Any) -> Any:
    value = tf.reduce_mean((tmg.gather_rows(y_pred) - tmg.gather_rows(y_true)) ** 2)
    return tf.fill(tf.shape(y_pred)[:1], value)


def in_a_branch(y_true: Any, y_pred: Any) -> Any:
    return tf.cond(
        tf.reduce_sum(y_pred) > 0,
        lambda: mean_of_all(y_true, y_pred),
        lambda: tf.reduce_sum(y_pred, -1),
    )


def test_where_replicas_cannot_meet_and_what_has_no_rows(subtests: pytest.Subtests) -> None:
    meet = r"please avoid nested `tf\.function`s or control flow"  # TensorFlow's own words.
    in_a_function = tf.function(mean_of_all)
    for step, text in (
        (step_with(mean_of_all, 1, micro_batches=2), r"one micro-batch only\. Write micro_batches"),
        (step_with(in_a_function), meet),
        (step_with(in_a_branch), meet),
    ):
        with subtests.test(text):
            with pytest.raises((tmg.TfMultiGpuError, RuntimeError), match=text):
                step(BATCH)
            assert int(step.optimizer.iterations.numpy()) == 0
    step_with(mean_of_all, 1, jit_compile=True)(BATCH)  # Where there is nothing to wait for.

    y = tf.ones([2, 2])
    for value, text in (
        (tf.reduce_mean(y), r"shape \(\)\. Gather numbers for each"),
        (tf.strings.as_string(y), "dtype string"),
        (tf.cast(y, tf.complex64), "dtype complex64"),
        (tf.sparse.from_dense(y), "SparseTensor"),
    ):
        with subtests.test(text), pytest.raises(LossError, match=text):
            tmg.gather_rows(value)
    with pytest.raises(LossError, match=r"tmg\.rows is called where the global batch is not know"):
        strategy_of(2).run(lambda: tmg.rows().first)


# Sums within a pass, of layers that are synchronized: promises/test_synchronized_norm.py ----------

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def test_every_batch_normalization_of_a_model_is_synchronized() -> None:
    class Block(layers.Layer):
        """Holds layers in a list, where ``model.layers`` does not show them."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = [layers.Dense(3), layers.BatchNormalization()]

    nested = keras.Sequential([Block(), keras.Sequential([layers.BatchNormalization()])])
    assert tmg.synchronize_batch_norm(nested) is nested
    norms = [layer for layer in nested._flatten_layers() if hasattr(layer, "synchronized")]
    assert [norm.synchronized for norm in norms] == [True] * 2
    model = network(3, layers.BatchNormalization())
    copy = keras.models.clone_model(tmg.synchronize_batch_norm(model))
    assert copy.layers[0].synchronized


class Gathered(layers.Layer):
    """Multiplies by what ``strategy.gather`` finds in all rows, and how many rows that are."""

    def call(self, x: Any) -> Any:
        every, context = tf.stop_gradient(x), tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            gather = lambda strategy, value: strategy.gather(value, axis=0)  # noqa: E731
            every = context.merge_call(gather, args=(every,))
        return x * tf.reduce_mean(every**2) * tf.cast(tf.shape(every)[0], x.dtype)


# Fails if of a small batch every copy is gathered.
def test_of_a_small_batch_strategy_gather_returns_one_copy() -> None:
    def train(strategy: tf.distribute.Strategy) -> Any:
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = network(4, Gathered(), layers.Dense(1))
            sgd = keras.optimizers.SGD(0.01)
        step = tmg.make_train_step(model, sgd, "mse", strategy, verify=False)
        return [step((X[:rows, :4], X[:rows, :1])) for rows in (5, 2, 1)], model.get_weights()

    tmg.testing.assert_replica_invariant(train, replicas=3)


class Centred(layers.Layer):
    """Subtracts the mean of all rows, which it gathers with their gradient."""

    def call(self, x: Any) -> Any:
        every, context = x, tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            every = context.all_gather(x, axis=0)
        return x - tf.reduce_mean(every, 0)


# Fails if the gradient of what TensorFlow's own all_gather returns is lost or not summed.
def test_gradients_pass_tensorflows_own_gathering() -> None:
    def train(strategy: tf.distribute.Strategy) -> Any:
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = network(4, layers.Dense(3), Centred(), layers.Dense(1))
            sgd = keras.optimizers.SGD(0.1)
        step = tmg.make_train_step(model, sgd, "mse", strategy, verify=False)
        return [step((X[:rows, :4], X[:rows, :1])) for rows in (5, 2, 1)], model.get_weights()

    tmg.testing.assert_replica_invariant(train, replicas=3)


# Fails if rows are those of the first batch, where another has others.
@pytest.mark.parametrize("compiled", [True, False])
def test_rows_of_one_batch_are_not_those_of_another(compiled: bool) -> None:
    strategy = strategy_of(2)

    def first_row(*_: Any) -> Any:
        return tmg.rows().first

    def firsts(*batches: Any) -> list[int]:
        def run(*iterators: Any) -> Any:
            return strategy.run(first_row, args=tuple(map(next, iterators)))

        each = [iter(tmg.distribute_dataset(batch, strategy, batch_size=99)) for batch in batches]
        results = (tf.function(run) if compiled else run)(*each)
        return [int(first) for first in strategy.experimental_local_results(results)]

    assert firsts(X[:6], X[:6]) == [0, 3]
    errors = LossError, tf.errors.InvalidArgumentError
    with pytest.raises(errors, match="zip the datasets before") as error:
        firsts(X[:6], X[:4])
    assert re.search("0,? 3,? 6,? 0,? 2,? 4", str(error.value))


# Fails if a sum, a mean, or a gradient of either order is not that of TensorFlow, or if rows of an
# embedding get lost.
@pytest.mark.parametrize(("replicas", "operation"), [(3, SUM), (2, MEAN), (2, "sum")])
def test_values_and_gradients_of_both_orders_are_those_of_tensorflow(
    replicas: int, operation: Any
) -> None:
    batch = X[:replicas].astype("float64")  # A row for each.
    counting = functools.partial(counting_once, Rows(0, 1, replicas))

    def run(context: Any, shard: Any) -> Any:
        x = shard[0]
        with context(), tf.GradientTape() as outer:
            outer.watch(x)
            replica = tf.distribute.get_replica_context()
            with tf.GradientTape() as inner:
                inner.watch(x)
                one, other = replica.all_reduce(operation, [tf.sin(x), {"a": x[:2] * x[2:]}])
                cubes = tf.reduce_sum(one**3) + tf.reduce_sum(other["a"] ** 2)
            gradient = inner.gradient(cubes, x)
            rows = tf.IndexedSlices(shard, tf.constant([1]), tf.constant([2, 4]))
            dense = tf.convert_to_tensor(replica.all_reduce(SUM, rows))
        return one, other["a"], gradient, outer.gradient(gradient, x), dense

    theirs, ours = (
        on_replicas(replicas, batch, functools.partial(run, context))
        for context in (contextlib.nullcontext, counting)
    )
    for value, expected in zip(tf.nest.flatten(ours), tf.nest.flatten(theirs), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(ours[0][-1], [np.zeros(4), batch.sum(0)])
    with counting():  # One replica is left alone.
        assert "all_reduce" not in vars(tf.distribute.get_replica_context())


# Fails if tf.custom_gradient searches through what other replicas have computed: a trace of twice
# as many layers would take four times as long.
def test_each_sum_is_searched_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    selector = pkgutil.resolve_name("tensorflow.python.ops.op_selector")
    original = selector.get_backward_walk_ops
    visited: list[int] = []

    def walk(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        visited.append(len(found))
        return found

    def build() -> keras.Model:
        norm = functools.partial(layers.BatchNormalization, synchronized=True)
        inner = [layer for _ in range(3) for layer in (layers.Dense(4, use_bias=False), norm())]
        return network(4, *inner)

    monkeypatch.setattr(selector, "get_backward_walk_ops", walk)
    step_on(2, build, sgd, "mse", verify=False)(BATCH)
    assert 0 < max(visited) < 20, "a search goes through more than its own sum"
