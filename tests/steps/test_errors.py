"""What a step refuses, when, and with which words: never a hang, never a silently other result."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import as_dataset, cut, strategy_of

import tfmultigpu as tmg

_random = np.random.default_rng(29)
X = _random.normal(size=(16, 6)).astype("float32")
Y = _random.integers(0, 3, 16)


def classifier() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def crossentropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_step(strategy=None, **options):
    strategy = strategy_of(2) if strategy is None else strategy
    with strategy.scope():
        model, optimizer = classifier(), sgd()
    return tmg.make_train_step(model, optimizer, crossentropy(), strategy, **options)


@pytest.fixture(scope="module")
def step():
    return make_step()


@pytest.fixture
def untouched(step):
    """Holds that a refused batch changed nothing and that the step still works after it."""
    before = [variable.numpy() for variable in step.model.variables]
    count = int(step.optimizer.iterations.numpy())
    yield
    for variable, value in zip(step.model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert int(step.optimizer.iterations.numpy()) == count
    assert float(step((X, Y))["weight"]) == len(X)


# Created elsewhere --------------------------------------------------------------------------------


def test_a_model_from_outside_the_scope():
    strategy = strategy_of(2)
    model = classifier()
    with strategy.scope():
        optimizer = sgd()
    with pytest.raises(tmg.ScopeError) as caught:
        tmg.make_train_step(model, optimizer, "mse", strategy)
    message = str(caught.value)
    assert "The model was created outside the scope of the strategy" in message
    assert "kernel" in message
    assert "MirroredStrategy with 2 replica(s)" in message
    assert "with strategy.scope():\n        model = ..." in message


def test_a_model_of_another_strategy():
    with strategy_of(3).scope():
        model = classifier()
    with strategy_of(2).scope():
        optimizer = sgd()
    with pytest.raises(
        tmg.ScopeError, match=r"scope of another strategy than the one given\. .*3 "
    ):
        tmg.make_train_step(model, optimizer, "mse", strategy_of(2))


def test_a_model_built_outside_the_scope_by_its_first_call():
    strategy = strategy_of(2)
    with strategy.scope():
        model, optimizer = keras.Sequential([keras.layers.Dense(3)]), sgd()
    model(X)
    with pytest.raises(tmg.ScopeError, match="The model was created outside the scope"):
        tmg.make_train_step(model, optimizer, "mse", strategy)


def test_an_optimizer_from_outside_the_scope():
    strategy = strategy_of(2)
    with strategy.scope():
        model = classifier()
    with pytest.raises(tmg.ScopeError) as caught:
        tmg.make_train_step(model, sgd(), "mse", strategy)
    message = str(caught.value)
    assert "The optimizer was created outside the scope of the strategy" in message
    assert "with strategy.scope():\n        optimizer = ..." in message


def test_an_optimizer_built_for_another_model():
    strategy = strategy_of(2)
    with strategy.scope():
        model, other, optimizer = classifier(), classifier(), sgd()
        optimizer.build(other.trainable_variables)
    with pytest.raises(tmg.ScopeError) as caught:
        tmg.make_train_step(model, optimizer, "mse", strategy)
    message = str(caught.value)
    assert "The optimizer was built for other variables. It does not know:" in message
    assert model.trainable_variables[0].path in message
    assert "Create a new optimizer for this model, inside strategy.scope()" in message
    assert "optimizer.build(a.trainable_variables + b.trainable_variables)" in message


def test_a_metric_from_outside_the_scope():
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    with pytest.raises(tmg.ScopeError, match="The metric was created outside the scope"):
        make_step(metrics=[accuracy])
    with pytest.raises(tmg.ScopeError, match="The metric was created outside the scope"):
        make_step(weighted_metrics=[accuracy])


def test_a_model_that_its_first_batch_cannot_build():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, inputs):
            return self.dense(inputs["features"])

    strategy = strategy_of(2)
    with strategy.scope():
        model, optimizer = Model(), sgd()
    step = tmg.make_train_step(model, optimizer, crossentropy(), strategy)
    with (
        pytest.warns(UserWarning, match="looks like it has unbuilt state"),
        pytest.raises(tmg.ScopeError) as caught,
    ):
        step((X, Y))
    assert "could not be built from the batch" in str(caught.value)
    assert "with strategy.scope(): model.build(input_shape)" in str(caught.value)


def test_another_backend(monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    for make in (
        make_step,
        lambda: tmg.make_eval_step(None, "mse"),
        lambda: tmg.make_predict_step(None),
    ):
        with pytest.raises(tmg.TfMultiGpuError) as caught:
            make()
        assert "Received: the 'jax' backend" in str(caught.value)
        assert 'os.environ["KERAS_BACKEND"] = "tensorflow"' in str(caught.value)


# Arguments ----------------------------------------------------------------------------------------


def test_arguments_out_of_range():
    for options, text in (
        ({"micro_batches": 0}, "micro_batches is a whole number, at least 1"),
        ({"clip_norm": 0.0}, r"clip_norm is positive. Received: clip_norm=0\.0"),
        ({"clip_norm": float("nan")}, "clip_norm is positive. Received: clip_norm=nan"),
    ):
        with pytest.raises(ValueError, match=text):
            make_step(**options)
    strategy = strategy_of(2)
    with strategy.scope():
        model = classifier()
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
    with pytest.raises(tmg.TfMultiGpuError, match="pass micro_batches=4 to make_train_step"):
        tmg.make_train_step(model, optimizer, "mse", strategy)


def test_nothing_to_minimise():
    strategy = strategy_of(2)
    with strategy.scope():
        model, optimizer = classifier(), sgd()
    step = tmg.make_train_step(model, optimizer, None, strategy)
    with pytest.raises(tmg.errors.LossError, match="no loss was given and no layer adds one"):
        step((X, Y))
    assert int(optimizer.iterations.numpy()) == 0


# Batches ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("untouched")
def test_what_is_no_batch(step):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    for batch, text in (
        ((X[:0], Y[:0]), "A batch has no rows"),
        ((X, Y[:9]), "differ in their number of rows"),
        ((X[0], Y[0]), "a component of this one is a single number"),
        ((1.0, 2.0), "a component of this one is a single number"),
        (("text", Y), "A batch is a tensor or a tuple or dict of tensors. Received: str"),
        ((X, Y, Y, Y), "Received: a tuple of 4 elements"),
        (X, "There is a loss but no labels"),
        ((), "no tensors"),
        (dataset, r"Received: .*Dataset"),
        (tmg.distribute_dataset(dataset, step.strategy), "Received: ShardedDataset"),
    ):
        with pytest.raises((tmg.errors.DataError, tmg.errors.LossError), match=text):
            step(batch)


@pytest.mark.usefixtures("untouched")
def test_a_batch_cut_for_another_strategy(step):
    (batch,) = tmg.distribute_dataset((X, Y), strategy_of(3), batch_size=16)
    with pytest.raises(tmg.errors.DataError, match="another strategy"):
        step(batch)
    (batch,) = tmg.distribute_dataset((X, Y), step.strategy, batch_size=16)
    with pytest.raises(tmg.errors.DataError, match="another strategy"):
        make_step(strategy_of(3))(batch)


def test_batches_that_tensorflow_cut():
    """Each row is in one shard: fine, as long as no shard is empty."""
    step = make_step(strategy_of(3))
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    for batch in step.strategy.experimental_distribute_dataset(dataset):
        assert float(step(batch)["weight"]) == 8.0
    two = step.strategy.experimental_distribute_dataset(dataset.unbatch().batch(2))
    with pytest.raises(tmg.errors.DataError) as caught:
        step(next(iter(two)))
    assert "Replica 2 got no rows. Received: shards of [1, 1, 0] rows" in str(caught.value)
    assert "tmg.distribute_dataset" in str(caught.value)


def test_a_batch_given_to_a_function_of_the_user():
    """What is not known there is how many rows the whole batch has."""
    step = make_step()
    (batch,) = tmg.distribute_dataset((X, Y), step.strategy, batch_size=16)
    with pytest.raises(tmg.errors.DataError, match=r"call step\(next\(iterator\)\)"):
        tf.function(lambda shards: step(shards))(batch)


def test_labels_a_loss_cannot_take_are_an_error_of_tensorflow(step):
    """Errors that are not ours keep their own words."""
    with pytest.raises(tf.errors.InvalidArgumentError, match="label value"):
        step((X, np.full(16, 7)))


# Many steps in one call ---------------------------------------------------------------------------


@pytest.mark.usefixtures("untouched")
def test_what_are_no_steps(step):
    iterator = iter(tf.data.Dataset.from_tensor_slices((X, Y)).batch(4))
    for steps in (0, -3):
        with pytest.raises(ValueError, match=f"steps is a whole number.* Received: steps={steps}"):
            step.run(iterator, steps)
    with pytest.raises(tmg.errors.DataError, match=r"takes an iterator.* Received: int\. Write"):
        step.run(3, iterator)
    with pytest.raises(ValueError, match=r"steps is a whole number.* steps=OwnedIterator\."):
        step.run(iterator, iterator)


@pytest.mark.usefixtures("untouched")
def test_what_is_no_iterator(step):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    for given, name in (
        (dataset, ".*Dataset"),
        (tmg.distribute_dataset(dataset, step.strategy), "ShardedDataset"),
        (iter([(X, Y)]), "list_iterator"),
        ((X, Y), "tuple"),
    ):
        with pytest.raises(tmg.errors.DataError, match=f"Received: {name}. Write iterator = "):
            step.run(given, 2)
    data = tmg.distribute_dataset((X, Y), strategy_of(3), batch_size=4)
    with pytest.raises(tmg.errors.DataError) as caught:
        step.run(iter(data), 2)
    message = str(caught.value)
    assert "data for MirroredStrategy with 3 replica(s); a step for Mirrored" in message


def test_an_empty_batch_among_others():
    step = make_step()
    batches = [*cut((X, Y), (4, 4)), (X[:0], Y[:0]), *cut((X, Y), (4,))]
    iterator = iter(tmg.distribute_dataset(as_dataset(batches), step.strategy))
    with pytest.raises(tmg.errors.DataError, match="A batch has no rows"):
        step.run(iterator, 4)
    assert int(step.optimizer.iterations.numpy()) == 2
    with pytest.raises(tmg.errors.DataError, match="A batch has no rows"):
        step.run(iter(as_dataset(batches)), 4)
    assert int(step.optimizer.iterations.numpy()) == 4


# Outputs ------------------------------------------------------------------------------------------


def two_heads() -> keras.Model:
    inputs = keras.Input((6,))
    kind = keras.layers.Dense(3, name="kind")(inputs)
    return keras.Model(inputs, {"kind": kind, "size": keras.layers.Dense(1, name="size")(inputs)})


def test_losses_and_labels_that_do_not_fit_the_outputs():
    for loss, y, text in (
        (
            {"kin": "mse"},
            {"kind": X, "size": X},
            r"losses for outputs that .* not have. Received: \['kin'\]",
        ),
        (["mse"], {"kind": X, "size": X}, "The model has 2 outputs .*but there are 1 losses"),
        ("mse", X, "The model has 2 outputs .*but the labels are a single value"),
        ("mse", {"kind": X[:, :3]}, "There is a loss but no labels"),
    ):
        with strategy_of(2).scope():
            model, optimizer = two_heads(), sgd()
        step = tmg.make_train_step(model, optimizer, loss, strategy_of(2))
        with pytest.raises(tmg.errors.LossError, match=text):
            step((X, y))
    with strategy_of(2).scope():
        model, optimizer = classifier(), sgd()
    step = tmg.make_train_step(model, optimizer, ["mse", "mae"], strategy_of(2))
    with pytest.raises(
        tmg.errors.LossError, match="The model has one output, but there are 2 losses"
    ):
        step((X, X[:, :3]))
