"""What a step refuses, when, and with which words: never a hang, never a silently other result.

Many more mistakes are in tests/promises/test_bad_input.py, by fewer words.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import as_dataset, cut, strategy_of

import tfmultigpu as tmg
from tfmultigpu.steps.batches import cut_batch
from tfmultigpu.steps.failures import explaining_failures

OURS = tmg.TfMultiGpuError
LossError, DataError, ScopeError = tmg.errors.LossError, tmg.errors.DataError, tmg.ScopeError
_random = np.random.default_rng(29)
X = _random.normal(size=(16, 6)).astype("float32")
Y = _random.integers(0, 3, 16)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SGD = keras.optimizers.SGD


def classifier() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])


def make_step(replicas: int = 2, build: Any = classifier, loss: Any = LOSS, **options: Any) -> Any:
    strategy = strategy_of(replicas)
    with strategy.scope():
        model, optimizer = build(), options.pop("optimizer", lambda: SGD(0.1))()
    return tmg.make_train_step(model, optimizer, loss, strategy, verify=False, **options)


@pytest.fixture(scope="module")
def step() -> Any:
    return make_step()


@pytest.fixture
def untouched(step: Any) -> Iterator[None]:
    """Holds that a refused batch changed nothing and that the step still works after it."""
    before = [variable.numpy() for variable in step.model.variables]
    count = int(step.optimizer.iterations.numpy())
    yield
    for variable, value in zip(step.model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert int(step.optimizer.iterations.numpy()) == count
    assert float(step((X, Y))["weight"]) == len(X)


def refused(kind: Any, *texts: str) -> Any:
    """Holds that an error has all of the texts."""
    return pytest.raises(kind, match="(?s)" + "".join(f"(?=.*{text})" for text in texts))


def test_what_was_made_elsewhere_or_is_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        called_outside = keras.Sequential([keras.layers.Dense(3)])
        model, optimizer, known = classifier(), SGD(0.1), SGD(0.1)
        known.build(classifier().trainable_variables)
    called_outside(X)
    accuracy = [keras.metrics.SparseCategoricalAccuracy()]
    outside = "The {} was created outside the scope of the strategy"
    make = functools.partial(tmg.make_train_step, strategy=strategy)
    for call, kind, texts in (
        (lambda: make(called_outside, optimizer, "mse"), ScopeError, (outside.format("model"),)),
        (lambda: make(model, SGD(0.1), "mse"), ScopeError,
         (outside.format("optimizer"), r"optimizer = \.\.\.  # or model\.compile\(\.\.\.\)")),
        (lambda: make(model, known, "mse"), ScopeError,
         (r"built for other variables\.", model.trainable_variables[0].path,
          r"Create a new one in strategy\.scope\(\)",
          r"optimizer\.build\(a\.trainable_variables \+ b\.trainable_variables\)")),
        (lambda: make(model, optimizer, tmg.steps.Objective(LOSS, weighted_metrics=accuracy)),
         ScopeError, (outside.format("metric"),)),
        (lambda: make("net", optimizer, "mse"), TypeError,
         (r"model must be a Keras model\. Received: 'net'",)),
        (lambda: make(model, optimizer, "mse", shard_update="yes"), ValueError,
         (r"True, False or 'auto'\. Received: shard_update='yes'",)),
        (lambda: make_step(optimizer=lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1)),
                           loss_scale=8.0), ValueError,
         (r"scales dynamically\. Leave out loss_scale=8\.0",)),
    ):  # fmt: skip
        with refused(kind, *texts):
            call()
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    for call in (
        make_step,
        lambda: tmg.make_eval_step(None, "mse"),
        lambda: tmg.make_predict_step(None),
    ):
        with refused(OURS, "Received: the 'jax' backend", r'KERAS_BACKEND"\] = "tensorflow"'):
            call()


# Models, losses and outputs -----------------------------------------------------------------------


class Unbuildable(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs["features"])


def stateful() -> keras.Model:
    inputs = keras.Input(batch_shape=(6, 2, 3))
    hidden = keras.layers.LSTM(2, stateful=True, name="memory")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def quantized() -> keras.Model:
    model = classifier()
    model.layers[0].quantize("float8")
    return model


def test_models_that_replicas_cannot_train() -> None:
    unbuildable = make_step(build=Unbuildable)
    with (
        pytest.warns(UserWarning, match="looks like it has unbuilt state"),
        refused(ScopeError, "could not be built from the batch", r"scope\(\): model\(x\[:1\]\)"),
    ):
        unbuildable((X, Y))
    with refused(ScopeError, r"stateful layer .*\['memory'\].*Drop stateful"):
        make_step(build=stateful)
    for replicas in (1, 2):
        with refused(OURS, "A float8 layer computes its scales", "Leave out layer.quantize"):
            make_step(replicas, quantized)


def two_heads() -> keras.Model:
    inputs = keras.Input((6,))
    kind = keras.layers.Dense(3, name="kind")(inputs)
    return keras.Model(inputs, {"kind": kind, "size": keras.layers.Dense(1, name="size")(inputs)})


def test_losses_and_labels_that_do_not_fit() -> None:
    both = {"kind": X[:, :3], "size": X[:, :1]}
    names = r"outputs \['kind', 'size'\], and the losses .* Received: \['kin'\]"
    over_rows = lambda t, p: tf.reduce_mean(tf.square(t - p), axis=0)  # noqa: E731
    for build, loss, y, text in (
        (classifier, None, Y, r"no loss was given and no layer adds one.*model\.compile\(loss="),
        (classifier, ["mse", "mae"], X[:, :3], "one output, and the losses do not fit"),
        (classifier, over_rows, X[:, :3], r"Received: shape \(3,\) from "),
        (two_heads, {"kin": "mse"}, both, names),
        (two_heads, ["mse"], both, r"2 outputs .* losses do not fit. Received: \[<"),
        (two_heads, "mse", X, r"2 outputs .* labels do not fit\. Received: Tensor"),
        (two_heads, "mse", {"kind": X[:, :3]}, r"no labels.* y=None of output 'size'"),
    ):
        made = make_step(build=build, loss=loss)
        with refused(LossError, text):
            made((X, y))
        assert int(made.optimizer.iterations.numpy()) == 0


# Batches, and iterators for many steps in one call ------------------------------------------------


@pytest.mark.usefixtures("untouched")
def test_what_is_no_batch(step: Any) -> None:
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    (foreign,) = tmg.distribute_dataset((X, Y), strategy_of(3), batch_size=16)
    for batch, text in (
        ((1.0, 2.0), "with rows. Received: float"),
        (("text", Y), r"a tuple or dict of tensors with rows\. Received: str"),
        ((X, Y, Y, Y), "Received: a tuple of 4 elements"),
        (X, "There is a loss but no labels"),
        ((), "no tensors"),
        (dataset, r"Received: .*Dataset"),
        (tmg.distribute_dataset(dataset, step.strategy), "Received: ShardedDataset"),
        (foreign, "distributed for another strategy"),
    ):
        with refused((DataError, LossError), text):
            step(batch)
    with refused(TypeError, "one batch, not 2", r"Write step\(\(x, y\)\)"):
        step(X, Y)
    with refused(ValueError, r"Of single examples make a batch: dataset\.batch\("):
        step((X[0], Y[:1]))
    (known,) = tmg.distribute_dataset((X, Y), step.strategy, batch_size=16)
    with refused(DataError, r"call step\(next\(iterator\)\)"):  # Its rows are not known there.
        tf.function(lambda shards: step(shards))(known)
    with refused(ScopeError, r"Call step\(batch\) outside of strategy\.run"):
        tf.function(lambda: step.strategy.run(lambda: step((X, Y))["loss"]))()
    with strategy_of(3).scope(), refused(ScopeError, "in the scope of Mirrored", "with 3 repl"):
        step((X, Y))
    with step.strategy.scope():
        step.run(iter(dataset.take(0)), 1)


@pytest.mark.usefixtures("untouched")
def test_what_is_no_iterator_and_what_are_no_steps(step: Any) -> None:
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    foreign = tmg.distribute_dataset((X, Y), strategy_of(3), batch_size=4)
    iterator = iter(dataset)
    for given, steps, kind, text in (
        (iterator, -3, ValueError, "steps must be a whole number.* Received: steps=-3"),
        (iterator, iterator, ValueError, "steps must be a whole number.* steps=<.*OwnedIterator"),
        (3, iterator, DataError, r"takes an iterator.* Received: int\. Write iterator = "),
        (dataset, 2, DataError, r"Received: \w*Dataset\. Write iterator = "),
        (tmg.distribute_dataset(dataset, step.strategy), 2, DataError, "Received: ShardedDataset"),
        (iter([(X, Y)]), 2, DataError, "Received: list_iterator"),
        (iter(foreign), 2, DataError, "data for MirroredStrategy with 3 .*; a step for Mirrored"),
    ):
        with refused(kind, text):
            step.run(given, steps)


def test_an_empty_batch_among_others(step: Any) -> None:
    batches = [*cut((X, Y), (4, 4)), (X[:0], Y[:0]), *cut((X, Y), (4,))]
    for data in (as_dataset(batches), tmg.distribute_dataset(as_dataset(batches), step.strategy)):
        before = int(step.optimizer.iterations.numpy())
        with refused(DataError, "A batch has no rows"):
            step.run(iter(data), 4)
        assert int(step.optimizer.iterations.numpy()) == before + 2


# Memory -------------------------------------------------------------------------------------------


def test_a_batch_that_cannot_be_copied_to_a_gpu_is_out_of_memory() -> None:
    job = "/job:localhost/replica:0/task:0"
    said = (
        f"Failed copying input tensor from {job}/device:CPU:0 to {job}/device:GPU:0 in order to "
        "run Identity: Dst tensor is not initialized."
    )
    strategy = tf.distribute.get_strategy()
    start = "^GPU:0 has not enough memory for this step. Received: a global batch of 64"
    with (
        pytest.raises(tmg.OutOfMemoryError, match=f"{start}.*Dst tensor is not initialized"),
        explaining_failures(strategy, lambda: 64),
    ):
        raise tf.errors.InternalError(None, None, said)
    with pytest.raises(tf.errors.InternalError), explaining_failures(strategy):
        raise tf.errors.InternalError(None, None, "cuDNN launch failure")


def test_arrays_are_not_put_on_the_first_gpu_to_be_cut() -> None:
    """The shards of all replicas would take its memory; seen in what is asked for, without one."""
    cut_rows = tf.function(lambda x: cut_batch(strategy_of(2), x)[0], autograph=False)
    graph = cut_rows.get_concrete_function(tf.TensorSpec([None, 3])).graph
    cuts = [op for op in graph.get_operations() if op.type == "GatherV2"]
    of_the_batch = [op for op in cuts if op.inputs[0] is graph.inputs[0]]
    assert [op.device for op in of_the_batch] == ["/device:CPU:0"] * 2
