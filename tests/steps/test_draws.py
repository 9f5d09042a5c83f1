"""Random draws in steps: layers of Keras, draws without a seed, generators beside the model.

Draws by row, function by function, are in test_draw_rows.py.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import ByHand, Replicated, as_dataset, assert_same, cut, strategy_of

import tfmultigpu as tmg
from tfmultigpu.steps.draws import Draws

layers, draw = keras.layers, keras.random
size = keras.ops.shape
_random = np.random.default_rng(8)
X = _random.normal(size=(40, 6)).astype("float32")
SEQUENCES = _random.normal(size=(40, 5, 6)).astype("float32")
Y = _random.integers(0, 3, 40)
SIZES = (7, 1, 9, 2, 15)  # Even and uneven over 3; fewer rows than replicas; each has its mask.
BATCHES = cut((X, Y), SIZES)


class Active(layers.Layer):
    """A layer as it is in training, also in predictions, where outputs can be compared."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.times = 2 if isinstance(inner, layers.MultiHeadAttention) else 1

    def build(self, shape: Any) -> None:
        self.inner.build(*[shape] * self.times)

    def call(self, x: Any) -> Any:
        return self.inner(*[x] * self.times, training=True)


class Sampling(layers.Layer):
    """Draws at inference too, as the middle of a variational autoencoder does."""

    def __init__(self, sample: Callable[..., Any]) -> None:
        super().__init__()
        self.sample = sample
        self.seeds = draw.SeedGenerator(11)

    def call(self, x: Any) -> Any:
        return x + tf.cast(self.sample(x, self.seeds), x.dtype)

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(tuple(x.shape), x.dtype)


# What each layer is given, and the layer; beside those of tests/promises/test_draws.py.
LAYERS: dict[str, tuple[np.ndarray, Callable[[], Any], float]] = {
    "one for all": (X, lambda: Sampling(lambda x, seed: draw.uniform((), seed=seed)), 0),
    # Noise that all rows share, for as many positions as a shard of 15 has rows.
    "noise for positions": (
        SEQUENCES, lambda: Sampling(lambda x, seed: draw.uniform((size(x)[1], 1), seed=seed)), 0,
    ),
    # Arithmetic between draws rounds differently in shards of other sizes.
    "LSTM": (
        SEQUENCES,
        lambda: Active(layers.LSTM(3, dropout=0.3, recurrent_dropout=0.4, seed=1)), 1e-6,
    ),
    "attention": (
        SEQUENCES,
        lambda: Active(layers.MultiHeadAttention(2, 3, dropout=0.4, seed=1)), 1e-6,
    ),
}  # fmt: skip


def of_one_layer(make: Callable[[], Any], x: np.ndarray) -> keras.Model:
    keras.utils.set_random_seed(5)
    shape = (None, 6) if x is SEQUENCES else x.shape[1:]
    inputs = keras.Input(shape, dtype=x.dtype.name)
    return keras.Model(inputs, make()(inputs))


# Fails if a layer draws for the rows of another replica, as many numbers as its shard has, or what
# all rows share anew for each replica.
@pytest.mark.parametrize("name", LAYERS)
def test_layers_draw_what_one_device_draws(name: str) -> None:
    x, make, tolerance = LAYERS[name]
    model = of_one_layer(make, x)
    one = tf.function(lambda x: model(x, training=False), reduce_retracing=True, autograph=False)
    batches = [batch for (batch,) in cut((x,), SIZES)]
    expected = [one(batch).numpy() for batch in batches]
    with strategy_of(3).scope():
        copy = of_one_layer(make, x)
    predict = tmg.make_predict_step(copy, strategy_of(3))
    for batch, theirs in zip(batches, expected, strict=True):
        # In float32, which holds the shorter ones exactly.
        ours = predict(batch).numpy().astype("float32")
        np.testing.assert_allclose(ours, theirs.astype("float32"), rtol=0, atol=tolerance)
    first, others = expected[0], [batch[: len(expected[0])] for batch in expected[1:]]
    assert all(not np.array_equal(first[: len(other)], other) for other in others), "it draws"


# Training -----------------------------------------------------------------------------------------


def noisy() -> keras.Model:
    inner = [layers.Dense(8, "tanh"), layers.Dropout(0.4, seed=3), layers.Dense(8, "tanh")]
    inner += [layers.GaussianNoise(0.3, seed=4), layers.Dense(3)]
    return keras.Sequential([keras.Input((6,)), *inner])


def sgd() -> Any:
    return keras.optimizers.SGD(0.1)


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@functools.cache
def expected() -> Any:
    return ByHand(noisy, sgd, LOSS).train(BATCHES)


# Fails if draws are for rows of another share, of a batch that is called in a function of the user,
# that TensorFlow cut, or whose number of rows is known while tracing.
def test_however_a_batch_is_cut() -> None:
    run = Replicated(2, noisy, sgd, LOSS, verify=False)
    data = tmg.distribute_dataset(
        as_dataset(BATCHES), run.strategy, shares=(1, 3), prefetch_to_device=True
    )
    run.reset()
    iterator = iter(data)
    step = tf.function(lambda iterator: run.step(next(iterator)), autograph=False)
    losses = [float(step(iterator)["loss"]) for _ in BATCHES]
    assert_same(run.result(losses), expected())

    even = cut((X, Y), (8, 8))
    truth = ByHand(noisy, sgd, LOSS).train(even)
    whole = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(8, drop_remainder=True)
    assert whole.element_spec[0].shape[0] == 8
    assert_same(run.train(run.strategy.experimental_distribute_dataset(whole)), truth)
    run.reset()
    iterator = iter(tmg.distribute_dataset(whole, run.strategy))
    assert_same(run.result([float(run.step.run(iterator, 1)["loss"]) for _ in even]), truth)


@pytest.mark.slow
def test_draws_of_a_step_compiled_by_xla_are_those_of_one_device_compiled_by_it() -> None:
    """XLA's numbers are others than those without, on one device too."""
    # Few, because XLA compiles for each number of rows; even, because it pairs normal numbers so.
    batches = cut((X, Y), (8, 1))
    truth = Replicated(1, noisy, sgd, LOSS, jit_compile=True).train(batches)
    without = ByHand(noisy, sgd, LOSS).train(batches)
    assert np.abs(truth.weights[0] - without.weights[0]).max() > 1e-3
    run = Replicated(2, noisy, sgd, LOSS, jit_compile=True, micro_batches=2)
    assert_same(run.train(batches), truth)


# Generators outside the model ---------------------------------------------------------------------


class Noisy:
    """A model, noise on its inputs, and a factor for all rows, from generators beside it."""

    def __init__(self, replicas: int) -> None:
        self.strategy = strategy_of(replicas)
        with self.strategy.scope():
            keras.utils.set_random_seed(7)
            self.model, self.optimizer = noisy(), sgd()
            self.generators = [draw.SeedGenerator(11), draw.SeedGenerator(12)]

    def scores(self, x: Any) -> Any:
        rows, factor = self.generators
        x += 0.3 * draw.normal(size(x), seed=rows)
        return self.model(x, training=True) * draw.uniform((1,), 0.5, 1.0, seed=factor)

    def states(self) -> list[np.ndarray]:
        return [one.numpy() for one in [*self.model.variables, *(g.state for g in self.generators)]]

    def step(self, micro_batches: Any) -> Any:
        def forward(model: Any, batch: Any, training: bool) -> Any:
            return tmg.loss_sum(LOSS, batch[1], self.scores(batch[0]))

        return tmg.make_train_step(
            self.model, self.optimizer, None, self.strategy, forward=forward,
            micro_batches=micro_batches,
        )  # fmt: skip


@functools.cache
def noisy_on_one_device() -> tuple[list[float], list[np.ndarray]]:
    on_one = Noisy(1)

    @tf.function(
        input_signature=[tf.TensorSpec([None, 6]), tf.TensorSpec([None], tf.int64)],
        autograph=False,
    )
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = LOSS(y, on_one.scores(x))
        trained = on_one.model.trainable_variables
        on_one.optimizer.apply(tape.gradient(loss, trained), trained)
        return loss

    return [float(step(*batch)) for batch in BATCHES], on_one.states()


# Fails if a generator moves on once for each replica or part, or not at all.
@pytest.mark.parametrize(("replicas", "micro_batches"), [(1, 3), (3, (1, 2, 1))], ids=str)
def test_generators_outside_the_model_advance_once_a_step(
    replicas: int, micro_batches: Any
) -> None:
    run = Noisy(replicas)
    step = run.step(micro_batches)
    losses, states = noisy_on_one_device()
    result = [float(step(batch)["loss"]) for batch in BATCHES]
    np.testing.assert_allclose(result, losses, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(run.states(), states, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert [int(state[1]) for state in states[-2:]] == [len(BATCHES)] * 2


# Fails if a generator that is no state of all replicas is drawn from in silence.
def test_generators_made_outside_the_scope_or_at_each_call_are_refused() -> None:
    outside = draw.SeedGenerator(1, name="beside")
    alone, run = Noisy(1), Noisy(2)
    alone.generators[0] = outside
    assert np.isfinite(float(alone.step(1)(BATCHES[0])["loss"]))
    inside, run.generators[0] = run.generators[0], outside
    with pytest.raises(tmg.ScopeError, match=r"(?s)'beside', .* 2 replica.*SeedGenerator\("):
        run.step(1)(BATCHES[0])
    run.generators[0] = inside

    def forward(model: Any, batch: Any, training: bool) -> Any:
        x = batch[0] + draw.normal(size(batch[0]), seed=draw.SeedGenerator(1))
        return tmg.loss_sum(LOSS, batch[1], model(x, training=training))

    step = tmg.make_train_step(
        run.model, run.optimizer, None, run.strategy, forward=forward, micro_batches=2
    )
    with pytest.raises(tmg.TfMultiGpuError, match=r"something else each time.*in the scope"):
        step(BATCHES[0])


# A discriminator that sees real and fake rows at once: no replica can draw for both as one device
# does. Fails if that is not told with the line that mends it, or if the line does not.
@pytest.mark.parametrize(("replicas", "micro_batches"), [(1, 2), (3, 1)])
def test_real_and_fake_rows_in_one_batch_are_told(replicas: int, micro_batches: int) -> None:
    def together(model: Any, x: Any) -> Any:
        return tf.split(model(tf.concat([x, tf.sin(3.0 * x)], 0), training=True), 2, 0)

    def one_by_one(model: Any, x: Any) -> Any:
        return model(x, training=True), model(tf.sin(3.0 * x), training=True)

    def trained(call: Any, replicas: int, micro_batches: int) -> Any:
        def forward(model: Any, batch: Any, training: bool) -> Any:
            real, fake = call(model, batch[0])
            errors = tf.reduce_sum(tf.nn.softplus(-real) + tf.nn.softplus(fake))
            return tmg.LossSum(errors, tf.cast(tf.shape(real)[0], tf.float32))

        options = {"forward": forward, "micro_batches": micro_batches}
        return Replicated(replicas, noisy, sgd, None, **options).train(BATCHES)

    with pytest.warns(tmg.ReplicaDependenceWarning) as caught:
        trained(together, replicas, micro_batches)
    text = str(caught[0].message)
    assert "Dropout" in text
    assert "Call the model for each: model(real), model(fake)" in text
    assert_same(trained(one_by_one, replicas, micro_batches), trained(one_by_one, 1, 1))


# Fails if draws cost anything where one replica has all rows.
def test_one_replica_without_micro_batches_draws_as_keras_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def operations() -> Counter[str]:
        run = Replicated(1, noisy, sgd, LOSS)
        run.step((X[:4], Y[:4]))  # Everything is built.
        spec = [tf.TensorSpec([None, 6]), tf.TensorSpec([None], tf.int64)]
        step = tf.function(lambda x, y: run.step((x, y)), input_signature=spec, autograph=False)
        graph = step.get_concrete_function().graph.as_graph_def()
        nodes = [graph.node, *[function.node_def for function in graph.library.function]]
        return Counter(node.op for some in nodes for node in some)

    with_us = operations()
    monkeypatch.setattr(Draws, "around_model", lambda *_: nullcontext())
    assert with_us == operations()
