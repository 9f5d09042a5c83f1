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
from one_device import as_dataset, cut, step_on, strategy_of
from problems import crossentropy, labelled, networks

import tfmultigpu as tmg
from tfmultigpu.steps.batches import cut_batch
from tfmultigpu.steps.failures import explaining_failures

OURS = tmg.TfMultiGpuError
LossError, DataError, ScopeError = tmg.errors.LossError, tmg.errors.DataError, tmg.ScopeError
X, Y, _ = labelled(16, 6, 3, seed=29)
LOSS = crossentropy()
SGD = keras.optimizers.SGD


classifier = networks(6, lambda: keras.layers.Dense(3))


def make_step(replicas: int = 2, build: Any = classifier, loss: Any = LOSS, **options: Any) -> Any:
    sgd = lambda: SGD(0.1)  # noqa: E731
    return step_on(replicas, build, sgd, loss, verify=False, **options)


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


def test_what_was_made_elsewhere_or_is_something_else(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model, optimizer = classifier(), SGD(0.1)
    accuracy = [keras.metrics.SparseCategoricalAccuracy()]
    make = functools.partial(tmg.make_train_step, strategy=strategy)
    for call, kind, texts in (
        (lambda: make(model, optimizer, tmg.steps.Objective(LOSS, weighted_metrics=accuracy)),
         ScopeError, ("The metric was created outside the scope of the strategy",)),
        (lambda: make("net", optimizer, "mse"), TypeError,
         (r"model must be a Keras model\. Received: 'net'",)),
    ):  # fmt: skip
        with subtests.test(call=call), refused(kind, *texts):
            call()
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    for call in (
        make_step,
        lambda: tmg.make_eval_step(None, "mse"),
        lambda: tmg.make_predict_step(None),
    ):
        words = "Received: the 'jax' backend", r'KERAS_BACKEND"\] = "tensorflow"'
        with subtests.test(call=call), refused(OURS, *words):
            call()


# Models, losses and outputs -----------------------------------------------------------------------


def two_heads() -> keras.Model:
    inputs = keras.Input((6,))
    kind = keras.layers.Dense(3, name="kind")(inputs)
    return keras.Model(inputs, {"kind": kind, "size": keras.layers.Dense(1, name="size")(inputs)})


def test_losses_and_labels_that_do_not_fit(subtests: pytest.Subtests) -> None:
    both = {"kind": X[:, :3], "size": X[:, :1]}
    names = r"outputs \['kind', 'size'\], and the losses .* Received: \['kin'\]"
    over_rows = lambda t, p: tf.reduce_mean(tf.square(t - p), axis=0)  # noqa: E731
    for build, loss, y, text in (
        (classifier, ["mse", "mae"], X[:, :3], "one output, and the losses do not fit"),
        (classifier, over_rows, X[:, :3], r"Received: shape \(3,\) from "),
        (two_heads, {"kin": "mse"}, both, names),
        (two_heads, ["mse"], both, r"2 outputs .* losses do not fit. Received: \[<"),
        (two_heads, "mse", X, r"2 outputs .* labels do not fit\. Received: Tensor"),
        (two_heads, "mse", {"kind": X[:, :3]}, r"no labels.* y=None of output 'size'"),
    ):
        with subtests.test(text):
            made = make_step(build=build, loss=loss)
            with refused(LossError, text):
                made((X, y))
            assert int(made.optimizer.iterations.numpy()) == 0


# Batches, and iterators for many steps in one call ------------------------------------------------


@pytest.mark.usefixtures("untouched")
def test_what_is_no_batch(step: Any, subtests: pytest.Subtests) -> None:
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    (foreign,) = tmg.distribute_dataset((X, Y), strategy_of(3), batch_size=16)
    for batch, text in (
        (("text", Y), r"a tuple or dict of tensors with rows\. Received: str"),
        (dataset, r"Received: .*Dataset"),
        (tmg.distribute_dataset(dataset, step.strategy), "Received: ShardedDataset"),
        (foreign, "distributed for another strategy"),
    ):
        with subtests.test(text), refused((DataError, LossError), text):
            step(batch)
    with refused(ValueError, r"Of single examples make a batch: dataset\.batch\("):
        step((X[0], Y[:1]))
    with refused(ScopeError, r"Call step\(batch\) outside of strategy\.run"):
        tf.function(lambda: step.strategy.run(lambda: step((X, Y))["loss"]))()
    with step.strategy.scope():
        step.run(iter(dataset.take(0)), 1)


@pytest.mark.usefixtures("untouched")
def test_what_is_no_iterator_and_what_are_no_steps(step: Any, subtests: pytest.Subtests) -> None:
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    iterator = iter(dataset)
    for given, steps, kind, text in (
        (iterator, -3, ValueError, "steps must be a whole number.* Received: steps=-3"),
        (iterator, iterator, ValueError, "steps must be a whole number.* steps=.*OwnedIterator"),
        (3, iterator, DataError, r"takes an iterator.* Received: int\. Write iterator = "),
        (tmg.distribute_dataset(dataset, step.strategy), 2, DataError, "Received: ShardedDataset"),
        (iter([(X, Y)]), 2, DataError, "Received: list_iterator"),
    ):
        with subtests.test(text), refused(kind, text):
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
