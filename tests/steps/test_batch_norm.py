"""Batch normalization over all replicas: behind masks, and in models one did not write."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import ByHand, Replicated, assert_same, cut, difference, strategy_of

import tfmultigpu as tmg
from tfmultigpu._patch import patching
from tfmultigpu.steps.batch_norm import moments_of_replicas

layers = keras.layers
_random = np.random.default_rng(4)
TOKENS = _random.integers(0, 6, (30, 5))
TOKENS[7:12] = 0  # All of the rows of one replica are masked, and those of whole batches.
STEPS = np.where(TOKENS[..., None] > 0, _random.normal(size=(30, 5, 3)), 0.0).astype("float32")
Y = _random.integers(0, 3, 30)
SIZES = (7, 1, 2, 9, 1, 8)
# A variance of few elements amplifies rounding: in float64 the formula is seen to be the same. What
# Keras adds to the number of elements, 1e-7, is less to that of one row on each of three replicas.
EXACT = {"weights": 2e-7, "loss": 5e-7}

norm = functools.partial(layers.BatchNormalization, synchronized=True, momentum=0.7, epsilon=0.1)


def behind_an_embedding(dtype="float64", **options):
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(6, 3, mask_zero=True, dtype=dtype),
            norm(dtype=dtype, **options),
            layers.Dense(3, "tanh", dtype=dtype),
            norm(dtype=dtype, **options),
            layers.Lambda(lambda x: keras.ops.reshape(x, (-1, 15)), mask=lambda *_: None),
            layers.Dense(3, dtype=dtype),
        ]
    )


def behind_masking():
    with_mask = [layers.Masking(dtype="float64"), norm(dtype="float64", name="first")]
    recurrent = [layers.SimpleRNN(3, dtype="float64"), norm(dtype="float64", name="second")]
    return keras.Sequential(
        [keras.Input((5, 3)), *with_mask, *recurrent, layers.Dense(3, dtype="float64")]
    )


def renormalized():
    return behind_an_embedding(renorm=True, renorm_momentum=0.6)


def sgd():
    return keras.optimizers.SGD(0.05)


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


CASES = {
    "embedding": (behind_an_embedding, TOKENS),
    "masking": (behind_masking, STEPS),
    "renormalized": (renormalized, TOKENS),
}


def batches_of(x, sizes=SIZES):
    return cut((x, Y), sizes)


@functools.cache
def expected_of(name):
    build, x = CASES[name]
    return ByHand(build, sgd, crossentropy()).train(batches_of(x))


@pytest.mark.parametrize(
    ("name", "replicas"),
    [("embedding", 3), ("masking", 2), ("renormalized", 2)],
)
def test_behind_a_mask_replicas_normalize_as_one_device_does(name, replicas):
    build, x = CASES[name]
    run = Replicated(replicas, build, sgd, crossentropy())
    assert_same(run.train(batches_of(x)), expected_of(name), **EXACT)
    for variable in run.model.non_trainable_variables:
        copies = [one.numpy() for one in run.strategy.experimental_local_results(variable.value)]
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0], err_msg=variable.path)


def test_in_lower_precision():
    """Keras computes moments in float32 whatever the layer computes in."""
    build = functools.partial(behind_an_embedding, "mixed_float16")
    batches = batches_of(TOKENS, (7, 8, 9))[:1]  # Rounding is amplified from step to step.
    expected = ByHand(build, sgd, crossentropy()).train(batches)
    result = Replicated(2, build, sgd, crossentropy()).train(batches)
    assert_same(result, expected, weights=2e-3, loss=2e-3)


def test_micro_batches_meet_behind_a_mask():
    """Each sees its own rows, as documented: two of one replica are two smaller batches."""
    batches = batches_of(TOKENS)
    run = Replicated(2, behind_an_embedding, sgd, crossentropy(), micro_batches=2)
    with pytest.warns(tmg.ReplicaDependenceWarning, match="the rows of one micro-batch"):
        result = run.train(batches)
    assert np.isfinite(result.losses).all()
    for variable in run.model.non_trainable_variables:
        one, other = run.strategy.experimental_local_results(variable.value)
        np.testing.assert_array_equal(one.numpy(), other.numpy(), err_msg=variable.path)


@pytest.mark.parametrize(("axis", "channels"), [(-1, 1), (1, 4)])
def test_the_formula_is_that_of_keras(axis, channels):
    """On two replicas with the rows of one device: gradients, moments, nothing left by a mask."""
    x = _random.normal(size=(6, 4, channels))
    masks = [None, _random.random((6, 4)) < 0.6, np.zeros((6, 4), bool), np.ones((6, 4), bool)]
    layer = layers.BatchNormalization(axis=axis, dtype="float64", synchronized=True)
    layer.build(x.shape)
    strategy = strategy_of(2)

    def moments(compute, x, mask):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = compute(layer, x, mask)
            total = tf.reduce_sum(found[0]) + tf.reduce_sum(tf.sin(found[1]))
        return [*found, tape.gradient(total, x)]

    keras_own = type(layer)._moments
    for mask in masks:
        given = None if mask is None else tf.constant(mask)
        mean, variance, gradient = moments(keras_own, tf.constant(x), given)

        def on_a_replica(mask=mask):
            own = slice(2) if replica_id() == 0 else slice(2, 6)
            compute = functools.partial(moments_of_replicas, keras_own)
            given = None if mask is None else tf.constant(mask[own])
            return moments(compute, tf.constant(x[own]), given)

        results = tf.function(lambda run=on_a_replica: strategy.run(run), autograph=False)()
        means, variances, gradients = map(strategy.experimental_local_results, results)
        for one, other in zip(means, variances, strict=True):
            np.testing.assert_allclose(np.squeeze(one), mean, atol=1e-12)
            np.testing.assert_allclose(np.squeeze(other), variance, atol=1e-12)
        # Two replicas each ask for the gradient of their own copy of the total.
        both = np.concatenate(gradients)
        np.testing.assert_allclose(both, 2 * gradient.numpy(), atol=1e-12)


def replica_id():
    return tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)


def test_keras_computes_moments_by_a_method_that_can_be_replaced():
    given = []

    def replacement(original, layer, inputs, mask):
        given.append((layer, inputs.dtype, mask))
        return original(layer, inputs, mask)

    layer = norm(dtype="float16")
    x, mask = tf.ones([2, 3, 4], tf.float16), tf.constant([[True, False, True]] * 2)
    own = keras.layers.BatchNormalization._moments
    with patching(keras.layers.BatchNormalization, "_moments", replacement):
        layer(x, training=True, mask=mask)
        layer(x, training=True)
        layer(x, training=False)
    assert [(one, dtype) for one, dtype, _ in given] == [(layer, tf.float32)] * 2, (
        "Keras no longer calls BatchNormalization._moments(inputs, mask) in float32: behind a mask "
        "each replica would normalize by its own rows"
    )
    assert given[0][2] is mask
    assert given[1][2] is None
    assert keras.layers.BatchNormalization._moments is own


def test_keras_does_not_synchronize_behind_a_mask_by_itself():
    """Were it to, the half of ``moments_of_replicas`` for masks could go."""
    strategy = strategy_of(2)
    with strategy.scope():
        layer = norm(dtype="float64")
        layer.build((None, 2, 1))

    def mean():
        x = tf.fill([3, 2, 1], tf.constant([1.0, 5.0], tf.float64)[replica_id()])
        return layer._moments(x, tf.ones([3, 2], tf.bool))[0]

    means = strategy.experimental_local_results(tf.function(lambda: strategy.run(mean))())
    np.testing.assert_allclose([one.numpy() for one in means], [1.0, 5.0], atol=1e-6)


# Models one did not write -------------------------------------------------------------------------


class Block(layers.Layer):
    """Holds layers in a list, where ``model.layers`` does not show them."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inner = [layers.Dense(3), layers.BatchNormalization(momentum=0.7)]

    def call(self, x, training=False):
        return self.inner[1](self.inner[0](x), training=training)


def not_written_for_replicas():
    inner = keras.Sequential([keras.Input((3,)), Block(), layers.BatchNormalization(momentum=0.7)])
    inputs = keras.Input((6,))
    hidden = inner(layers.Dense(3, "tanh")(inputs))
    return keras.Model(inputs, layers.Dense(3)(layers.BatchNormalization()(hidden)))


def normalizations(model):
    found = [one for one in model._flatten_layers() if isinstance(one, layers.BatchNormalization)]
    assert found
    return found


def test_every_batch_normalization_of_a_model_is_synchronized():
    x = _random.normal(size=(30, 6)).astype("float32")
    batches = cut((x, Y), (7, 8, 9))

    def build():
        model = not_written_for_replicas()
        before = [one.numpy() for one in model.variables]
        assert tmg.synchronize_batch_norm(model) is model
        assert [one.synchronized for one in normalizations(model)] == [True] * 3
        assert difference(before, [one.numpy() for one in model.variables]) == 0.0
        return model

    expected = ByHand(build, sgd, crossentropy()).train(batches)
    result = Replicated(3, build, sgd, crossentropy()).train(batches)
    assert_same(result, expected, weights=5e-6, loss=5e-6)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras saving.
def test_models_of_keras_cloned_and_loaded_ones(tmp_path):
    model = keras.applications.MobileNetV2(
        input_shape=(32, 32, 3), alpha=0.35, weights=None, classes=3
    )
    assert not any(one.synchronized for one in normalizations(model))
    tmg.synchronize_batch_norm(model)
    assert all(one.synchronized for one in normalizations(model))
    assert all(one.synchronized for one in normalizations(keras.models.clone_model(model)))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert all(one.synchronized for one in normalizations(loaded))
    for layer in normalizations(loaded):
        layer.synchronized = False
    tmg.synchronize_batch_norm(loaded)
    assert all(one.synchronized for one in normalizations(loaded))


def test_something_else_is_refused():
    with pytest.raises(TypeError, match=r"must be a Keras model or layer\. Received: .*model"):
        tmg.synchronize_batch_norm([layers.Dense])
