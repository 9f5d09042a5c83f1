"""Dropout, noise and augmentation on replicas: the numbers that one device draws, bit for bit."""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import ByHand, Replicated, as_dataset, assert_same, cut, strategy_of

import tfmultigpu as tmg
from tfmultigpu.steps import (
    forward_backward as replicas_module,
)
from tfmultigpu.steps.random_draws import ReplicaRows, drawing_rows
from tfmultigpu.steps.seeds import GlobalSeeds

layers, draw = keras.layers, keras.random
_random = np.random.default_rng(8)
X = _random.normal(size=(40, 6)).astype("float32")
SEQUENCES = _random.normal(size=(40, 5, 4)).astype("float32")
IMAGES = _random.uniform(size=(40, 8, 8, 3)).astype("float32")
Y = _random.integers(0, 3, 40)
SIZES = (7, 1, 9, 2, 8)  # even and uneven over 2, 3 and 4; fewer rows than replicas; each its mask


# Rows of a draw -----------------------------------------------------------------------------------

DRAWS = {
    **{
        f"uniform {dtype.name}": functools.partial(lambda d, s: tf.random.stateless_uniform(
            s, (7, 3), -1.5, 2.5, d), dtype)
        for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64)
    },
    **{
        f"normal {dtype.name}": functools.partial(lambda d, s: tf.random.stateless_normal(
            s, (7, 3), 0.5, 2.0, d), dtype)
        for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64)
    },
    **{
        f"integers {dtype.name}": functools.partial(lambda d, s: tf.random.stateless_uniform(
            s, (7, 3), -5, 100_000, d), dtype)
        for dtype in (tf.int32, tf.int64)
    },
    **{
        f"all integers {dtype.name}": functools.partial(lambda d, s: tf.random.stateless_uniform(
            s, (7, 3), None, None, d), dtype)
        for dtype in (tf.int32, tf.int64, tf.uint32, tf.uint64)
    },
    "another algorithm": lambda s: tf.random.stateless_uniform(s, (7, 3), alg="philox"),
    "truncated normal": lambda s: tf.random.stateless_truncated_normal(s, (7, 3), 1.0, 2.0),
    "gamma": lambda s: tf.random.stateless_gamma(s, (7, 3), 0.7, 2.0),
    "gamma by column": lambda s: tf.random.stateless_gamma(s, (7, 3), tf.range(1.0, 4.0)),
    "binomial": lambda s: tf.random.stateless_binomial(s, (7, 3), 20.0, 0.3),
    "poisson": lambda s: tf.random.stateless_poisson(s, (7, 3), 2.5),
    "poisson by column": lambda s: tf.random.stateless_poisson(s, (7, 3), tf.range(1.0, 4.0)),
    "truncated normal between": lambda s: tf.random.stateless_parameterized_truncated_normal(
        s, (7, 3), 0.5, 2.0, -1.0, 4.0),
    "truncated normal by column": lambda s: tf.random.stateless_parameterized_truncated_normal(
        s, (7, 3), tf.range(3.0), 1.0, -1.0, 4.0),
    "seeds": lambda s: tf.random.split((7, 3), s[0]),
}  # fmt: skip


def held(first, count, total):
    numbers = (tf.cast(one, tf.int64) for one in (first, count, total))
    places = [functools.partial(tf.identity, number) for number in numbers]
    return ReplicaRows(*places, seeds=GlobalSeeds(tf.distribute.get_strategy()))


def test_rows_drawn_by_themselves_are_those_of_the_whole_draw():
    number = tf.TensorSpec([], tf.int32)

    @tf.function(input_signature=[number] * 3)
    def rows(first, count, total):
        with drawing_rows(held(first, count, total)):
            return [make(tf.stack([count, 3])) for make in DRAWS.values()]

    whole = [make(tf.constant([29, 3])).numpy() for make in DRAWS.values()]
    differ = set()
    for first, count in ((0, 29), (0, 1), (1, 2), (5, 10), (13, 7), (28, 1)):
        parts = zip(DRAWS, rows(first, count, 29), whole, strict=True)
        differ |= {
            name
            for name, part, every in parts
            if not np.array_equal(part.numpy(), every[first : first + count])
        }
    assert not differ


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64], ids=lambda dtype: dtype.name)
def test_rows_far_on_in_a_large_draw(dtype):
    """Past 2**31 numbers a count in 32 bits would begin again."""
    wide = 2**20

    @tf.function(input_signature=[tf.TensorSpec([], tf.int32)])
    def row(first):
        one = tf.where(first < 0, 2, 1)
        with drawing_rows(held(first, one, 5000)):
            return tf.random.stateless_uniform(tf.stack([one, wide]), (7, 3), dtype=dtype)[0, :4]

    def by_counter(number):
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=(7, 3))
        blocks = number * wide // (2 if dtype == tf.float64 else 4)
        counter += tf.constant([blocks, 0], tf.uint64)
        return tf.raw_ops.StatelessRandomUniformV2(
            shape=[4], key=key, counter=counter, alg=1, dtype=dtype
        )

    assert 4999 * wide > 2**32
    np.testing.assert_array_equal(row(4999), by_counter(4999))


def test_draws_of_known_shape_are_those_of_one_device():
    def draws():
        return [
            one
            for shape in [(), (3,), (2, 3)]
            for one in (
                tf.random.stateless_uniform(shape, (7, 3)),
                tf.random.stateless_normal(shape, (7, 3)),
                tf.random.stateless_truncated_normal(shape, (7, 3)),
                tf.random.stateless_gamma(shape, (7, 3), 2.0),
                tf.random.stateless_binomial(shape, (7, 3), 20.0, 0.3),
            )
        ]

    @tf.function(input_signature=[tf.TensorSpec([], tf.int32)] * 3)
    def drawn(first, count, total):
        with drawing_rows(held(first, count, total)):
            return draws()

    for ours, theirs in zip(drawn(4, 2, 10), draws(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_draw_that_is_no_multiple_of_the_rows_is_made_as_it_is():
    @tf.function(input_signature=[tf.TensorSpec([], tf.int32)])
    def drawn(size):
        with drawing_rows(held(4, 2, 10)):
            return [
                tf.random.stateless_uniform([size], (7, 3)),
                tf.random.stateless_truncated_normal([size], (7, 3)),
            ]

    uniform, truncated = drawn(5)
    np.testing.assert_array_equal(uniform, tf.random.stateless_uniform([5], (7, 3)))
    np.testing.assert_array_equal(truncated, tf.random.stateless_truncated_normal([5], (7, 3)))


# Layers -------------------------------------------------------------------------------------------


class Active(keras.layers.Layer):
    """A layer as it is in training, also in predictions, where outputs can be compared."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.attends = isinstance(inner, layers.MultiHeadAttention)

    def build(self, shape):
        self.inner.build(*[shape] * (2 if self.attends else 1))

    def call(self, x):
        return self.inner(*[x] * (2 if self.attends else 1), training=True)


class Sampling(keras.layers.Layer):
    """Draws at inference too, as the middle of a variational autoencoder does."""

    def __init__(self, sample):
        super().__init__()
        self.sample = sample
        self.seeds = keras.random.SeedGenerator(11)

    def call(self, x):
        return x + tf.cast(self.sample(x, self.seeds), x.dtype)

    def compute_output_spec(self, x):
        return keras.KerasTensor(tuple(x.shape), x.dtype)


def active(make, **options):
    return lambda: Active(make(**options, seed=1))


def sampling(sample):
    return lambda: Sampling(sample)


size = keras.ops.shape
LAYERS = {
    "dropout": (X, active(layers.Dropout, rate=0.5)),
    "dropout in float16": (X, active(layers.Dropout, rate=0.5, dtype="float16")),
    "dropout of rows": (X, active(layers.Dropout, rate=0.5, noise_shape=(None, 1))),
    "flip": (IMAGES, active(layers.RandomFlip)),
    "one for each row": (
        X,
        sampling(lambda x, seed: draw.normal((size(x)[0],), seed=seed)[:, None]),
    ),
    "one for all": (X, sampling(lambda x, seed: draw.uniform((), seed=seed))),
    "rows and steps in one axis": (
        SEQUENCES,
        sampling(
            lambda x, seed: tf.reshape(draw.normal((size(x)[0] * 5, 4), seed=seed), size(x))
        ),
    ),
    "categorical": (X, sampling(lambda x, seed: draw.categorical(x, 1, seed=seed))),
    "binomial": (
        X,
        sampling(lambda x, seed: draw.binomial(size(x), 10.0, tf.sigmoid(x), seed=seed)),
    ),
    "crop by TensorFlow": (
        IMAGES,
        sampling(lambda x, seed: tf.image.resize_with_crop_or_pad(
            tf.image.stateless_random_crop(x, [size(x)[0], 5, 4, 3], seed.next()), 8, 8)),
    ),
    "a seed for each row": (
        IMAGES,
        sampling(lambda x, seed: tf.map_fn(
            lambda one: tf.image.stateless_random_contrast(one[0], 0.1, 0.9, one[1]),
            (x, tf.random.split(seed.next(), size(x)[0])), fn_output_signature=x.dtype)),
    ),
    # From here on arithmetic between draws rounds differently in shards of other sizes.
    "LSTM": (SEQUENCES, active(layers.LSTM, units=3, dropout=0.3, recurrent_dropout=0.4)),
    "attention": (
        SEQUENCES,
        active(layers.MultiHeadAttention, num_heads=2, key_dim=3, dropout=0.4),
    ),
}  # fmt: skip
ROUNDED = {"LSTM", "attention"}


def of_one_layer(make, x):
    keras.utils.set_random_seed(5)
    inputs = keras.Input(x.shape[1:], dtype=x.dtype.name)
    return keras.Model(inputs, make()(inputs))


def on_one_device(make, x):
    model = of_one_layer(make, x)
    predict = tf.function(
        lambda x: model(x, training=False),
        input_signature=[tf.TensorSpec([None, *x.shape[1:]], x.dtype)],
        autograph=False,
    )
    return [predict(batch).numpy() for (batch,) in cut((x,), SIZES)]


def on_replicas(make, x, replicas):
    strategy = strategy_of(replicas)
    with strategy.scope():
        model = of_one_layer(make, x)
    predict = tmg.make_predict_step(model, strategy)
    return [predict(batch).numpy() for (batch,) in cut((x,), SIZES)]


@pytest.mark.parametrize(("name", "replicas"), [("dropout", 2), *((one, 3) for one in LAYERS)])
def test_layers_draw_what_one_device_draws(name, replicas):
    x, make = LAYERS[name]
    expected = on_one_device(make, x)
    tolerance = 1e-6 if name in ROUNDED else 0
    for ours, theirs in zip(on_replicas(make, x, replicas), expected, strict=True):
        # In float32, which holds the shorter ones exactly: NumPy does not compare bfloat16.
        wide = [np.asarray(one, "float32") for one in (ours, theirs)]
        np.testing.assert_allclose(*wide, rtol=0, atol=tolerance)
    first, others = expected[0], [batch[: len(expected[0])] for batch in expected[1:]]
    assert all(not np.array_equal(first[: len(other)], other) for other in others), "it draws"


@pytest.mark.filterwarnings("ignore:The result depends on how the batch was cut")
def test_a_layer_that_mixes_rows_differs_between_replicas_and_is_reproducible():
    """MixUp pairs each row with another of its shard: no replica can do what one device does."""
    rows = np.tile(IMAGES[:1], (8, 1, 1, 1)) * np.arange(8).reshape(8, 1, 1, 1).astype("float32")
    (once, *_), (again, *_) = (on_replicas(active(layers.MixUp), rows, 2) for _ in range(2))
    np.testing.assert_array_equal(once, again)
    ratios = (once / IMAGES[0]).mean(axis=(1, 2, 3)) - np.arange(7)
    assert not np.allclose(ratios[:3], ratios[3:6]), "both replicas mixed alike"


# Training -----------------------------------------------------------------------------------------


def noisy():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "tanh"),
            layers.Dropout(0.4, seed=3),
            layers.Dense(8, "tanh"),
            layers.GaussianNoise(0.3, seed=4),
            layers.Dense(3),
        ]
    )


def sgd():
    return keras.optimizers.SGD(0.1)


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


BATCHES = cut((X, Y), (7, 8, 1, 5, 3))


@functools.cache
def expected_of(build):
    return ByHand(build, sgd, crossentropy()).train(BATCHES)


@functools.cache
def trained(build, replicas, **options):
    return Replicated(replicas, build, sgd, crossentropy(), **options)


def test_shares_reach_a_step_called_in_a_function_of_the_user():
    run = trained(noisy, 2, micro_batches=1)
    data = tmg.distribute_dataset(
        as_dataset(BATCHES), run.strategy, shares=(1, 3), prefetch_to_device=True
    )
    run.reset()
    iterator = iter(data)
    step = tf.function(lambda iterator: run.step(next(iterator)), autograph=False)
    losses = [float(step(iterator)["loss"]) for _ in BATCHES]
    assert_same(run.result(losses), expected_of(noisy))


def test_batches_cut_by_tensorflow():
    batches = cut((X, Y), (8, 4, 7, 6))  # 7 rows: 4 and 3
    expected = ByHand(noisy, sgd, crossentropy()).train(batches)
    run = trained(noisy, 2, micro_batches=1)
    data = run.strategy.experimental_distribute_dataset(as_dataset(batches))
    assert_same(run.train(data), expected)


def with_turns():
    """Replicas take turns at each synchronization: their draws must not get mixed up."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "tanh"),
            layers.Dropout(0.4, seed=3),
            layers.BatchNormalization(synchronized=True),
            layers.GaussianNoise(0.3, seed=4),
            layers.BatchNormalization(synchronized=True),
            layers.Dropout(0.4, seed=5),
            layers.Dense(3),
        ]
    )


def test_replicas_that_take_turns():
    run = trained(with_turns, 3)
    # A variance of few rows amplifies rounding in the statistics.
    assert_same(run.train(BATCHES), expected_of(with_turns), weights=5e-6, loss=5e-6)


class Unseeded(keras.layers.Layer):
    """Draws without a seed: from the one generator of the process."""

    def call(self, x, training=False):
        return x + 0.3 * keras.random.normal(keras.ops.shape(x)) if training else x

    def compute_output_spec(self, x, training=False):
        return keras.KerasTensor(tuple(x.shape), x.dtype)


def unseeded():
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "tanh"), Unseeded(), layers.Dense(3)]
    )


# A generator that was used before goes on from its state however many replicas there are: once it
# is tried unused.
@pytest.mark.parametrize(
    ("replicas", "micro_batches", "used_before"), [(2, 1, False), (3, 2, True)]
)
def test_draws_without_a_seed(replicas, micro_batches, used_before):
    def train(kind, *args, **options):
        run = kind(*args, unseeded, sgd, crossentropy(), **options)
        keras.utils.set_random_seed(9)
        if used_before:
            keras.random.normal((2,))
        # The other variables begin from the seed of the harness.
        return run.train(BATCHES), keras.random.normal((2,)).numpy()

    expected, next_expected = train(ByHand)
    result, next_drawn = train(Replicated, replicas, micro_batches=micro_batches)
    assert_same(result, expected)
    np.testing.assert_array_equal(next_drawn, next_expected, "the generator went on alike")


@pytest.mark.slow
def test_draws_of_a_step_compiled_by_xla_are_those_of_one_device_compiled_by_it():
    """XLA's numbers are others than those without, on one device too."""
    # Few, because XLA compiles for each number of rows; even, because it pairs normal numbers so.
    batches = cut((X, Y), (8, 1))
    expected = trained(noisy, 1, jit_compile=True).train(batches)
    without = ByHand(noisy, sgd, crossentropy()).train(batches)
    assert np.abs(expected.weights[0] - without.weights[0]).max() > 1e-3
    run = trained(noisy, 2, jit_compile=True, micro_batches=2)
    assert_same(run.train(batches), expected)


def test_evaluation_draws_what_one_device_draws():
    def build():
        return of_one_layer(LAYERS["one for each row"][1], X)

    losses = {}
    for replicas in (1, 3):
        strategy = strategy_of(replicas)
        with strategy.scope():
            model = build()
        step = tmg.make_eval_step(model, "mse", strategy)
        losses[replicas] = [float(step(batch)["loss"]) for batch in cut((X, X), SIZES)]
    np.testing.assert_allclose(losses[3], losses[1], rtol=1e-6)


# Generators outside the model ---------------------------------------------------------------------


class Noisy:
    """A model, noise on its inputs, and a factor for all rows, from generators beside it."""

    def __init__(self, strategy):
        with strategy.scope():
            keras.utils.set_random_seed(7)
            self.model, self.optimizer = noisy(), sgd()
            self.generators = [keras.random.SeedGenerator(11), keras.random.SeedGenerator(12)]

    def scores(self, model, x):
        rows, factor = self.generators
        x += 0.3 * draw.normal(size(x), seed=rows)
        return model(x, training=True) * draw.uniform((1,), 0.5, 1.0, seed=factor)

    def states(self):
        return [one.numpy() for one in [*self.model.variables, *(g.state for g in self.generators)]]


@functools.cache
def noisy_on_one_device():
    on_one = Noisy(tf.distribute.get_strategy())

    @functools.partial(
        tf.function,
        input_signature=[tf.TensorSpec([None, 6]), tf.TensorSpec([None], tf.int64)],
        autograph=False,
    )
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = crossentropy()(y, on_one.scores(on_one.model, x))
        trained = on_one.model.trainable_variables
        on_one.optimizer.apply(tape.gradient(loss, trained), trained)
        return loss

    losses = [float(step(*batch)) for batch in BATCHES]
    return losses, on_one.states()


@pytest.mark.parametrize(("replicas", "micro_batches"), [(1, 3), (3, (1, 2, 1))], ids=str)
def test_generators_outside_the_model_advance_once_a_step(replicas, micro_batches):
    strategy = strategy_of(replicas)
    run = Noisy(strategy)

    def forward(model, batch, training):
        return tmg.loss_sum(crossentropy(), batch[1], run.scores(model, batch[0]))

    step = tmg.make_train_step(
        run.model, run.optimizer, None, strategy, forward=forward, micro_batches=micro_batches
    )
    losses, states = noisy_on_one_device()
    result = [float(step(batch)["loss"]) for batch in BATCHES]
    np.testing.assert_allclose(result, losses, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(run.states(), states, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert [int(state[1]) for state in states[-2:]] == [len(BATCHES)] * 2


def forward_with(generator):
    """A forward pass that draws from what ``generator()`` returns."""

    def forward(model, batch, training):
        x = batch[0] + draw.normal(size(batch[0]), seed=generator())
        return tmg.loss_sum(crossentropy(), batch[1], model(x, training=training))

    return forward


def test_a_generator_outside_the_scope_is_refused_on_several_replicas():
    outside = keras.random.SeedGenerator(1, name="beside")
    losses = []
    for replicas in (1, 2):
        strategy = strategy_of(replicas)
        run = Noisy(strategy)
        step = tmg.make_train_step(
            run.model, run.optimizer, None, strategy, forward=forward_with(lambda: outside)
        )
        if replicas == 1:
            losses.append(float(step(BATCHES[0])["loss"]))
            continue
        with pytest.raises(tmg.ScopeError, match=r"(?s)'beside', .* 2 replica.*SeedGenerator\("):
            step(BATCHES[0])
    assert np.isfinite(losses).all()


def test_a_generator_made_at_each_call_is_refused_with_micro_batches():
    strategy = strategy_of(2)
    run = Noisy(strategy)
    forward = forward_with(lambda: keras.random.SeedGenerator(1))
    step = tmg.make_train_step(
        run.model, run.optimizer, None, strategy, forward=forward, micro_batches=2
    )
    with pytest.raises(tmg.TfMultiGpuError, match=r"another seed generator each.*in the scope"):
        step(BATCHES[0])


@pytest.mark.filterwarnings("ignore:The result depends on how the batch was cut")
def test_shuffles_along_rows_stay_within_a_shard():
    """What goes over from one replica to another would have to be sent: nothing is lost or made."""
    x = np.arange(14.0, dtype="float32").reshape(7, 2)

    def shuffled(x, seed):
        return tf.random.experimental.stateless_shuffle(draw.shuffle(x, seed=seed), seed.next()) - x

    ours = on_replicas(sampling(shuffled), x, 2)[0]
    for rows in np.split(np.arange(7), [3]):
        np.testing.assert_array_equal(np.sort(ours[rows], axis=0), x[rows])


# What it costs ------------------------------------------------------------------------------------


def operations(build, replicas, **options):
    run = Replicated(replicas, build, sgd, crossentropy(), **options)
    run.step((X[:4], Y[:4]))  # everything is built
    spec = [tf.TensorSpec([None, 6]), tf.TensorSpec([None], tf.int64)]
    step = tf.function(lambda x, y: run.step((x, y)), input_signature=spec, autograph=False)
    graph = step.get_concrete_function().graph.as_graph_def()
    nodes = [graph.node, *[function.node_def for function in graph.library.function]]
    return Counter(node.op for some in nodes for node in some)


def test_one_replica_without_micro_batches_draws_as_keras_does(monkeypatch):
    with_us = operations(noisy, 1)
    monkeypatch.setattr(replicas_module, "drawing_rows", lambda held: nullcontext())
    assert with_us == operations(noisy, 1)


def test_each_replica_draws_no_more_than_its_rows():
    """Three numbers more, to begin in the middle of a count: so that XLA knows the size."""

    @tf.function(input_signature=[tf.TensorSpec([], tf.int32)])
    def sizes(count):
        with drawing_rows(held(40, count, 1000)):
            tf.random.stateless_uniform(tf.stack([count, 6]), (7, 3))
            tf.random.stateless_normal(tf.stack([count, 6]), (7, 3))
            tf.nn.experimental.stateless_dropout(tf.zeros([count, 6]), 0.5, (7, 3))
        made = tf.compat.v1.get_default_graph().get_operations()
        return [op.inputs[0] for op in made if op.type.startswith("StatelessRandom")
                and op.type.endswith("V2")]  # fmt: skip

    np.testing.assert_array_equal(sizes(10), [[63]] * 3)


# A number of rows that is known beforehand --------------------------------------------------------


def test_batches_whose_number_of_rows_is_known_while_tracing():
    x = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
    arrays = (x, x[:, :1])
    fixed = tf.data.Dataset.from_tensor_slices(arrays).batch(4, drop_remainder=True)
    assert fixed.element_spec[0].shape[0] == 4
    losses = []
    for replicas in (1, 2):
        strategy = strategy_of(replicas)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5, seed=1)])
            model.add(keras.layers.Dense(1))
            step = tmg.make_train_step(model, keras.optimizers.SGD(0.1), "mse", strategy)
        iterator = iter(tmg.distribute_dataset(fixed, strategy))
        losses.append([float(step.run(iterator, 1)["loss"]) for _ in range(2)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


class NoisyPositions(keras.layers.Layer):
    """Noise for each position of a sequence, the same for all rows."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, x):
        positions = keras.ops.shape(x)[1]
        return x + keras.random.uniform((positions, 1), seed=self.seed_generator)


def test_noise_for_positions_is_not_taken_for_rows():
    """On two replicas there are as many positions as rows of a shard, on four twice as many."""
    x = np.random.default_rng(0).normal(size=(8, 4, 2)).astype("float32")
    losses = []
    for replicas in (1, 2, 4):
        strategy = strategy_of(replicas)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((None, 2)), NoisyPositions()])
            model.add(keras.layers.Dense(1))
            step = tmg.make_train_step(model, keras.optimizers.SGD(0.1), "mse", strategy)
        losses.append([float(step((x, x[..., :1]))["loss"]) for _ in range(2)])
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-6)
