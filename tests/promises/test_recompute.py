"""keras.remat and keras.RematScope save memory, and train what the model without them trains.

The truth is the same model without them, by plain Keras on one device: computed once, so nothing
in it is drawn, read or assigned a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.model import Training, cut
from law.pair import Pair, strategy_of

import tfmultigpu as tmg

pytestmark = pytest.mark.usefixtures("float64")

SIZES = (7, 4, 2)  # The last has fewer rows than three replicas.
_random = np.random.default_rng(31)
X, Y = _random.normal(size=(sum(SIZES), 3, 4)), _random.normal(size=(sum(SIZES), 2))
BATCHES = cut((X, Y), SIZES)
layers = keras.layers
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@tf.custom_gradient  # type: ignore[untyped-decorator]
def halved(x: Any) -> Any:
    """Returns x, and half its gradient: a custom gradient that is not rematerialization."""
    return tf.identity(x), lambda upstream: upstream / 2


class Noisy(layers.Layer):
    """Draws twice by one generator and once without a seed, and adds a loss of what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(8)

    def call(self, x: Any) -> Any:
        first, second = (keras.random.uniform(tf.shape(x), seed=self.seeds) for _ in range(2))
        x = x * first + second * keras.random.normal(tf.shape(x), stddev=0.1)
        self.add_loss(0.3 * tf.reduce_mean(tf.square(x)))
        return x


class Model(keras.Model):
    """All kinds of layers that a second call changes, in functions wrapped at three times.

    Those whose calls count or meet are left out on demand, for micro-batches.
    """

    def __init__(self, wrap: Wrap, norm: bool) -> None:
        super().__init__()
        self.wrap = wrap
        self.dense = layers.Dense(4, "tanh", activity_regularizer="l2")
        self.noisy, self.dropout = Noisy(), layers.Dropout(0.4)
        self.normed: list[Any] = [layers.Dense(4)]
        if norm:
            batch_norm = layers.BatchNormalization(synchronized=True, epsilon=0.1)
            self.normed = [layers.SpectralNormalization(layers.Dense(4)), batch_norm]
        self.attention = layers.MultiHeadAttention(2, 3, dropout=0.3, seed=5)
        self.out = layers.Dense(2)
        self.first = wrap(self.draws)

    def build(self, shape: Any) -> None:
        self.attend = self.wrap(self.attention)
        for layer in (self.dense, *self.normed, self.out):
            layer.build((*shape[:-1], 4))
        self.attention.build(shape, shape)
        self.built = True

    def draws(self, x: Any) -> Any:
        return halved(self.dropout(self.dense(x), training=True))

    def norms(self, x: Any, scale: Any) -> Any:
        for layer in self.normed:
            x = layer(x, training=True)
        # One in the other.
        return self.wrap(self.noisy)(x) * scale

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return self.out(self.dense(x))[:, 0]
        x = halved(self.first(x))
        x = self.wrap(self.norms)(x, scale=2.0 * tf.reduce_mean(x, -1, keepdims=True))
        mask = tf.ones([1, 3, 3], tf.bool)
        x = self.attend(query=x, value=x, attention_mask=mask, training=True)
        return self.out(x)[:, 0]


def build(wraps: Any, norm: bool) -> Training:
    model = Model(next(wraps), norm)
    model.build((None, 3, 4))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    return Training(model, optimizer, keras.losses.MeanSquaredError())


def begin() -> None:
    """Has Keras make its generator for draws without a seed anew, as a program that starts."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(11)


# Fails if what is computed again draws other numbers, moves a seed on, reads what the forward pass
# has assigned or assigns it again; if a loss that it adds has no gradient or counts twice; if a
# named argument is refused; or if other custom gradients change.
@pytest.mark.parametrize(
    ("replicas", "norm", "sharded", "options"),
    [
        (1, True, False, {}),
        pytest.param(3, True, False, {"loss_scale": 8.0}, marks=pytest.mark.more),
        pytest.param(
            *(2, False, True, {"micro_batches": 2, "verify": False}), marks=pytest.mark.more
        ),
    ],
    ids=["N=1", "N=3, verified", "N=2, sharded micro-batches"],
)
def test_recomputing_trains_what_computing_once_trains(
    replicas: int, norm: bool, sharded: bool, options: dict[str, Any]
) -> None:
    both = functools.partial(build, iter([as_it_is, keras.remat]), norm)
    pair = Pair(both, BATCHES[0], replicas, sharded=sharded, **options)
    begin()
    pair.plain.train(BATCHES)
    begin()
    for shards in pair.shards(BATCHES):
        pair.step(shards)
    pair.assert_same(rtol=1e-11, atol=1e-12)


def scoped(scope: Any) -> Any:
    with scope:
        stack = [
            layers.Dense(6, "tanh"),
            layers.Dropout(0.5, seed=3),
            layers.BatchNormalization(synchronized=True, epsilon=0.1),
            layers.Dense(2),
        ]
        return keras.Sequential([keras.Input((4,)), *stack])


# Fails if a RematScope is refused in a graph, or trains, evaluates or predicts something else.
def test_a_remat_scope_changes_nothing() -> None:
    x, options = X[:, 0], {"batch_size": 5, "verbose": 0}
    keras.utils.set_random_seed(2)
    once = scoped(keras.RematScope(None))
    once.compile(keras.optimizers.SGD(0.1), "mse")
    once.fit(x, Y, shuffle=False, **options)

    keras.utils.set_random_seed(2)
    with strategy_of(2).scope():
        again = scoped(keras.RematScope("full"))
        again.compile(keras.optimizers.SGD(0.1), "mse")
    tmg.fit(again, x, Y, shuffle=False, **options)

    close = {"rtol": 1e-11, "atol": 1e-12}
    for weight, truth in zip(again.get_weights(), once.get_weights(), strict=True):
        np.testing.assert_allclose(weight, truth, **close)
    loss = tmg.evaluate(again, x, Y, **options)
    np.testing.assert_allclose(loss, once.evaluate(x, Y, **options), rtol=1e-6)
    try:
        predicted = tmg.predict(again, x, **options)
    except ValueError as error:  # In a graph TensorFlow refuses the names of Keras' arguments.
        pytest.fail(str(error))
    np.testing.assert_allclose(predicted, once.predict(x, verbose=0), **close)


class Around(keras.Model):
    """A layer, and a function of its own that the model wraps."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.second = layers.Dense(4), layers.Dense(2)
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float64, 0.0)
        self.draws = tf.random.Generator.from_seed(1)
        self.function = function

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        self.second.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        x = self.first(x)
        return keras.remat(lambda y: self.second(y) * self.function(self, x))(x)


def looked_up(model: Any, _: Any) -> Any:
    return tf.ensure_shape(model.table.lookup(tf.constant(1, tf.int64)), [])


def drawn(model: Any, x: Any) -> Any:
    return model.draws.normal([2], dtype=x.dtype)


def captured(_: Any, x: Any) -> Any:
    return tf.reduce_mean(x, -1, keepdims=True)


# Fails if what cannot be repeated trains something else without a word.
@pytest.mark.parametrize(
    ("function", "said", "line"),
    [
        (captured, "does not get as an argument", "keras.remat(function)(x, tensor)"),
        (looked_up, "LookupTableFindV2", "keras.remat(function)(x, result)"),
        (drawn, "RngReadAndSkip", "keras.random.SeedGenerator"),
    ],
    ids=["captured", "table", "generator"],
)
def test_what_cannot_be_repeated_is_an_error(function: Any, said: str, line: str) -> None:
    with strategy_of(1).scope():
        model = Around(function)
        model.build((None, 4))
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(model, optimizer, "mse", strategy_of(1))
    before = model.get_weights()
    with pytest.raises(tmg.TfMultiGpuError, match=r"keras\.remat") as error:
        step((X[:, 0], Y))
    assert said in str(error.value)
    assert line in str(error.value)
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
