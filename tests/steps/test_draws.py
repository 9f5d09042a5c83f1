"""Draws by row: each replica draws its rows of what one device draws, bit for bit.

Layers are in tests/promises/test_draws.py.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter
from contextlib import nullcontext, suppress
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.model import Training
from law.pair import Pair
from one_device import cut, difference, graph_of, step_on, strategy_of
from problems import crossentropy, network

import tfmultigpu as tmg
from tfmultigpu._patch import patching
from tfmultigpu.steps.features.draws import Draws, GlobalSeeds
from tfmultigpu.steps.values import Rows

SEED, TOTAL = (7, 3), 29
random = tf.random
_numbers = np.random.default_rng(2)
X = _numbers.normal(size=(TOTAL, 6)).astype("float32")
STEPS = _numbers.normal(size=(TOTAL, 5, 6)).astype("float32")


def dropped(x: Any, **options: Any) -> Any:
    return tf.nn.experimental.stateless_dropout(x, 0.5, SEED, **options)


def joined(x: Any) -> Any:
    return tf.concat([x, 2.0 * x], 0)


# What is drawn for rows of x. Parameters with rows must be those of the rows of this replica.
EXACT: dict[str, Any] = {
    **{
        f"uniform {d}": lambda x, d=d: random.stateless_uniform(tf.shape(x), SEED, -1.5, 2.5, d)
        for d in ("float16", "bfloat16", "float32", "float64")
    },
    **{
        f"normal {d}": lambda x, d=d: random.stateless_normal(tf.shape(x), SEED, 0.5, 2.0, d)
        for d in ("float16", "bfloat16", "float32", "float64")
    },
    **{
        f"integers {d}": lambda x, d=d: random.stateless_uniform(tf.shape(x), SEED, -5, 10**5, d)
        for d in ("int32", "int64")
    },
    **{
        f"all {d}": lambda x, d=d: random.stateless_uniform(tf.shape(x), SEED, None, None, d)
        for d in ("int32", "int64", "uint32", "uint64")
    },
    "uniform, philox": lambda x: random.stateless_uniform(tf.shape(x), SEED, alg="philox"),
    "normal, philox": lambda x: random.stateless_normal(tf.shape(x), SEED, 1.0, alg="philox"),
    "normal about rows": lambda x: random.stateless_normal(tf.shape(x), SEED, x, tf.abs(x) + 0.5),
    "truncated": lambda x: random.stateless_truncated_normal(tf.shape(x), SEED, 1.0, 2.0),
    "gamma": lambda x: random.stateless_gamma(tf.shape(x), SEED, 0.7, 2.0),
    "gamma by column": lambda x: random.stateless_gamma(tf.shape(x), SEED, tf.range(1.0, 7.0)),
    "binomial": lambda x: random.stateless_binomial(tf.shape(x), SEED, 20.0, 0.3),
    "seeds": lambda x: random.split(SEED, tf.shape(x)[0]),
    "dropout": dropped,
    "dropout of rows": lambda x: dropped(x, noise_shape=[tf.shape(x)[0], 1]),
    "dropout of columns": lambda x: dropped(x, noise_shape=[1, 6]),
    "keras noise shape": lambda x: keras.random.dropout(x, 0.5, (None, 1), seed=3),
    "keras lengths": lambda x: x + keras.random.normal(keras.ops.shape(x), seed=3),
    "flips": lambda x: tf.image.stateless_random_flip_left_right(x[:, None, :, None], SEED),
    # Several places of one row that follow each other, or rows that the model takes apart again.
    "repeated": lambda x: dropped(tf.repeat(x, 2, 0)),
    "split again": lambda x: dropped(tf.split(joined(x), 2)[0]),
    "sliced again": lambda x: dropped(joined(x)[: tf.shape(x)[0]]),
    # Known shapes are the same for all rows, and on every replica.
    "one for all": lambda x: tf.zeros_like(x) + random.stateless_uniform((6,), SEED),
    "a number for all": lambda x: tf.zeros_like(x) + random.stateless_normal((), SEED),
    "a row for all": lambda x: tf.zeros_like(x) + random.stateless_gamma((1, 6), SEED, 2.0),
}  # fmt: skip


def drawing(first: Any, count: Any, total: Any) -> Any:
    draws = Draws()
    draws.seeds = GlobalSeeds(tf.distribute.get_strategy(), [])
    return draws.around_model(Rows(first, count, total, parts=1))  # Else one replica has all rows.


# Fails if a function is not replaced, counts on wrongly, moves parameters to other rows, or draws
# numbers of one shape from those of another.
def test_rows_are_those_of_one_device() -> None:
    scalar = tf.TensorSpec([], tf.int64)

    @tf.function(input_signature=[scalar] * 3, autograph=False)
    def drawn(first: Any, count: Any, total: Any) -> Any:
        x, steps = (
            tf.slice(every, [first, *[0] * (every.ndim - 1)], [count, *every.shape[1:]])
            for every in (X, STEPS)
        )
        with drawing(first, count, total):
            rows = {name: draw(x) for name, draw in EXACT.items()}
            return rows, dropped(tf.reshape(steps, [-1, 6])), dropped(steps[:, 0])

    wrong = set()
    for total, cuts in ((TOTAL, (0, TOTAL)), (TOTAL, (0, 5, 6, TOTAL)), (1, (0, 1)), (2, (0, 2))):
        x = tf.constant(X[:total])
        every = {name: draw(x).numpy() for name, draw in EXACT.items()}
        every["flat"] = dropped(tf.reshape(STEPS[:total], [-1, 6])).numpy()
        every["column"] = dropped(tf.constant(STEPS[:total, 0])).numpy()
        for first, end in itertools.pairwise(cuts):
            rows, flat, column = drawn(first, end - first, total)
            for name, values in {**rows, "flat": flat, "column": column}.items():
                per_row = len(every[name]) // total
                expected = every[name][first * per_row : end * per_row]
                if not np.array_equal(values.numpy(), expected):
                    wrong.add(name)
    assert sorted(wrong) == []


# Fails if a count in 32 bits begins again after 2**31 numbers.
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64], ids=lambda dtype: dtype.name)
def test_rows_far_on_in_a_large_draw(dtype: tf.DType) -> None:
    wide, first = 2**20, 4999
    assert first * wide > 2**32

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)], autograph=False)
    def row(count: Any) -> Any:
        with drawing(tf.constant(first, tf.int64), count, tf.constant(5000, tf.int64)):
            shape = tf.stack([tf.cast(count, tf.int32), wide])
            return random.stateless_uniform(shape, SEED, dtype=dtype)[0, :4]

    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=SEED)
    counter += tf.constant([first * wide // (2 if dtype == tf.float64 else 4), 0], tf.uint64)
    expected = tf.raw_ops.StatelessRandomUniformV2(
        shape=[4], key=key, counter=counter, alg=1, dtype=dtype
    )
    np.testing.assert_array_equal(row(1), expected)


class Owner:
    """What is replaced in the test below."""

    def double(self, number: int) -> int:
        return 2 * number

    @property
    def name(self) -> str:
        return "owner"


class Inheriting(Owner):
    """Inherits what is replaced."""


# Fails if wrappers reach other threads, stay after the context or an error, or do not nest.
def test_a_patch_is_of_one_thread_and_ends() -> None:
    owner, elsewhere = Inheriting(), []

    def more(original: Any, this: Any, number: int) -> int:
        assert this is owner
        return original(this, number) + 1

    with (
        suppress(ZeroDivisionError),
        patching(Inheriting, "double", more),
        patching(Inheriting, "name", lambda o, s: o(s) * 2),
    ):
        with patching(Inheriting, "double", lambda o, *args, **named: -o(*args, **named)):
            assert owner.double(number=3) == -7
            thread = threading.Thread(
                target=lambda: elsewhere.append([owner.double(3), owner.name])
            )
            thread.start()
            thread.join()
        assert (owner.double(3), owner.name) == (7, "ownerowner")
        assert Owner().double(3) == 6
        raise ZeroDivisionError
    assert elsewhere == [[6, "owner"]]
    assert {"double", "name"}.isdisjoint(vars(Inheriting))
    assert (owner.double(3), owner.name) == (6, "owner")


# Steps --------------------------------------------------------------------------------------------

Y = _numbers.integers(0, 3, TOTAL)
LOSS = crossentropy()


def noisy() -> keras.Model:
    layers = keras.layers
    hidden = [layers.Dense(8, "tanh"), layers.Dropout(0.4, seed=3), layers.Dense(8, "tanh")]
    return network(6, *hidden, layers.GaussianNoise(0.3, seed=4), layers.Dense(3))


sgd = functools.partial(keras.optimizers.SGD, 0.1)
XLA = {"jit_compile": True}


# Fails if draws are for other rows of a batch that TensorFlow cut, or whose number of rows is known
# while tracing.
def test_however_a_batch_is_cut() -> None:
    pair = Pair(lambda: Training(noisy(), sgd(), LOSS), (X, Y), strategy_of(2), verify=False)
    pair.plain.train(cut((X, Y), (8, 8)))
    whole = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(8, drop_remainder=True)
    assert whole.element_spec[0].shape[0] == 8
    for shards in pair.strategy.experimental_distribute_dataset(whole):
        pair.step(shards)
    pair.assert_same(rtol=1e-6, atol=1e-6)
    pair.ours.assign(pair.start)
    iterator = iter(tmg.distribute_dataset(whole, pair.strategy))
    assert [int(pair.step.run(iterator, 1)["steps"]) for _ in range(3)] == [1, 1, 0]
    pair.assert_same(rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_draws_of_a_step_compiled_by_xla_are_those_of_one_device_compiled_by_it() -> None:
    """XLA's numbers are others than those without, on one device too."""
    # Few, because XLA compiles for each number of rows; even, because it pairs normal numbers so.
    batches = cut((X, Y), (8, 1))
    weights, losses = [], []
    for replicas, options in ((1, {}), (1, XLA), (2, {**XLA, "micro_batches": 2})):
        step = step_on(replicas, noisy, sgd, LOSS, **options)
        losses.append([float(step(batch)["loss"]) for batch in batches])
        weights.append(step.model.get_weights())
    assert difference(weights[0], weights[1]) > 1e-3
    assert difference(weights[2], weights[1]) <= 1e-6
    np.testing.assert_allclose(losses[2], losses[1], rtol=1e-6, atol=1e-6)


# Fails if draws cost anything where one replica has all rows.
def test_one_replica_without_micro_batches_draws_as_keras_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def operations() -> Counter[str]:
        step = step_on(1, noisy, sgd, LOSS)
        graph = graph_of(step, (X[:4], Y[:4])).as_graph_def()
        nodes = [graph.node, *[function.node_def for function in graph.library.function]]
        return Counter(node.op for some in nodes for node in some)

    with_us = operations()
    monkeypatch.setattr(Draws, "around_model", lambda *_: nullcontext())
    assert with_us == operations()
