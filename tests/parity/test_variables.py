"""Variables of every kind and the optimizers that update them, on several replicas."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import ByHand, Replicated, assert_same, cut, difference, hold

SIZES = (7, 2, 16, 1, 5)

_random = np.random.default_rng(5)
X = _random.normal(size=(32, 6)).astype("float32")
Y = _random.integers(0, 4, 32)
Z = _random.normal(size=(32, 2)).astype("float32")
IDS = _random.integers(1, 5, (32, 3))
BATCHES = cut((X, Y), SIZES)


def sgd(**options: object) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def crossentropy(**options: object) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def mlp() -> keras.Model:
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(4)]
    )


@pytest.mark.parametrize(("replicas", "micro_batches"), [(1, 1), (2, 1), (3, 2)])
def test_an_embedding_with_repeated_ids_under_adam(replicas, micro_batches):
    """Gradients of repeated rows are summed, as the gradient of a dense layer would be."""

    def build():
        return keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(5, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(4),
            ]
        )

    def adam():
        return keras.optimizers.Adam(1e-2)

    batches = cut((IDS, Y), SIZES)
    hold(replicas, build, adam, crossentropy(), batches, micro_batches=micro_batches)


def test_frozen_layers_stay_as_they_are():
    def build():
        model = mlp()
        model.layers[0].trainable = False
        return model

    run = Replicated(2, build, sgd, crossentropy())
    frozen = run.model.layers[0].get_weights()
    expected = ByHand(build, sgd, crossentropy()).train(BATCHES)
    assert_same(run.train(BATCHES), expected)
    assert difference(run.model.layers[0].get_weights(), frozen) == 0.0


def test_an_unbuilt_sequential_model_is_built_by_its_first_batch():
    def build():
        return keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(4)])

    hold(3, build, sgd, crossentropy(), BATCHES)


def test_an_unbuilt_subclassed_model_with_a_dict_of_inputs():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras.layers.Dense(8, activation="tanh")
            self.second = keras.layers.Dense(4)

        def call(self, inputs, training=False):
            return self.second(self.first(inputs["x"]) * inputs["z"][:, :1])

    batches = [({"x": x, "z": z}, y) for x, z, y in cut((X, Z, Y), SIZES)]
    expected = ByHand(Model, sgd, crossentropy()).train(batches)
    assert_same(Replicated(3, Model, sgd, crossentropy()).train(batches), expected)


def test_dropout_runs_and_repeats_with_the_seed():
    def build():
        return keras.Sequential(
            [keras.Input((6,)), keras.layers.Dropout(0.5, seed=3), keras.layers.Dense(4)]
        )

    batches = BATCHES
    first = Replicated(2, build, sgd, crossentropy(), micro_batches=2).train(batches)
    second = Replicated(2, build, sgd, crossentropy(), micro_batches=2).train(batches)
    assert first.losses == second.losses


def test_a_float64_model():
    def build():
        return keras.Sequential(
            [
                keras.Input((6,), dtype="float64"),
                keras.layers.Dense(8, "tanh", dtype="float64", kernel_regularizer="l2"),
                keras.layers.Dense(4, dtype="float64"),
            ]
        )

    loss = crossentropy(dtype="float64")
    batches = cut((X.astype("float64"), Y), SIZES)
    expected = ByHand(build, sgd, loss).train(batches)
    result = Replicated(3, build, sgd, loss, micro_batches=2, clip_norm=0.5)
    truth = ByHand(build, sgd, loss, clip_norm=0.5).train(batches)
    assert difference(result.train(batches).weights, truth.weights) <= 1e-12
    assert difference(expected.weights, truth.weights) > 1e-4, "clipping must do something"


def test_layers_of_different_precision():
    def build():
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, "tanh", dtype="float64"),
                keras.layers.Dense(4),
            ]
        )

    hold(2, build, sgd, crossentropy(), BATCHES)
    run = Replicated(2, build, sgd, crossentropy(), clip_norm=0.1)
    start = [variable.numpy() for variable in run.model.variables]
    result = run.train(BATCHES[:1])
    assert result.logs[0]["gradient_norm"] > 0.2
    moved = [after - before for after, before in zip(result.weights, start, strict=True)]
    assert {part.dtype.name for part in moved} == {"float64", "float32"}
    length = np.sqrt(sum(np.sum(np.square(part)) for part in moved))
    assert length / 0.05 == pytest.approx(0.1, rel=1e-4), "the norm is that of all layers together"


def test_a_layer_that_branches_in_python_is_refused_as_in_fit():
    class Branching(keras.layers.Layer):
        def call(self, inputs):
            if tf.reduce_sum(inputs) > 0:
                return inputs * 2.0
            return inputs

        def compute_output_spec(self, inputs):
            return keras.KerasTensor(inputs.shape, inputs.dtype)

    def build():
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), Branching()])

    model = build()
    model.compile(sgd(), crossentropy())
    with pytest.raises(TypeError, match=r"symbolic `tf\.Tensor` as a Python `bool`"):
        model.fit(X, Y, verbose=0)
    with pytest.raises(TypeError, match=r"symbolic `tf\.Tensor` as a Python `bool`"):
        Replicated(2, build, sgd, crossentropy()).train([(X, Y)])


def test_the_learning_rate_can_be_changed_between_steps():
    run = Replicated(2, mlp, sgd, crossentropy())
    truth = ByHand(mlp, sgd, crossentropy())
    truth.train(BATCHES[:1])
    run.train(BATCHES[:1])
    for each in (truth, run):
        each.optimizer.learning_rate = 0.01
    for batch in BATCHES[1:]:
        truth._compiled(tuple(tf.constant(part) for part in batch))
        run.step(batch)
    weights = [variable.numpy() for variable in truth.model.variables]
    assert difference([v.numpy() for v in run.model.variables], weights) <= 1e-6
