"""A run that is gone on with ends as one that was never interrupted."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import difference, strategy_of
from problems import network, normal_rows

import tfmultigpu as tmg

X, Y = normal_rows(22, 4, 1, seed=5)


def test_two_models_resume_together(tmp_path: Path) -> None:
    """With metrics; the second optimizer is not built."""

    def train(directory: Path, kill: int | None = None) -> list[np.ndarray]:
        strategy = strategy_of(2)
        keras.utils.set_random_seed(2)
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(22, seed=3).batch(4)
        with strategy.scope():
            seeds = keras.random.SeedGenerator(4)
            layers = keras.layers
            models = [network(4, layers.Dropout(0.3), layers.Dense(1)) for _ in range(2)]
            optimizers = [keras.optimizers.Adam(rate) for rate in (0.05, 0.01)]
            metrics = [keras.metrics.MeanAbsoluteError(), keras.metrics.R2Score()]

        def noisy(model: Any, batch: Any, training: bool) -> tmg.LossSum:
            x = batch[0] + keras.random.normal((4,), seed=seeds)
            return tmg.loss_sum(keras.losses.MeanSquaredError(), batch[1], model(x, training=True))

        options: dict[str, Any] = {"loss_scale": "dynamic", "verify": False}
        first = options | {"metrics": metrics}
        step = tmg.chain_steps(
            tmg.make_train_step(models[0], optimizers[0], "mse", strategy, **first),
            tmg.make_train_step(models[1], optimizers[1], None, strategy, forward=noisy, **options),
            names=["g", "d"],
        )
        extra = {"seeds": [seeds.state]}
        run = tmg.Checkpoints(directory, data=data, train_step=step, extra=extra)
        run.restore()
        for _ in run.epochs(2):
            for batch in run.data:
                if run.step == kill:
                    os.kill(os.getpid(), signal.SIGTERM)
                step(batch)
                run.after_step()
        owners = [*models, *optimizers, *metrics]
        return [np.asarray(variable.numpy()) for owner in owners for variable in owner.variables]

    expected = train(tmp_path / "whole")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "run", kill=6)
    assert (ended.value.code, signal.getsignal(signal.SIGTERM)) == (143, before)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000007.npz"]
    for here, there in zip(train(tmp_path / "run"), expected, strict=True):
        np.testing.assert_array_equal(here, there)


# What follows needs no training: counting steps is enough.


def small(units: int = 2, optimizer: str = "adam", name: str = "dense") -> tuple[Any, Any]:
    return network(3, keras.layers.Dense(units, name=name)), keras.optimizers.get(optimizer)


def test_draws_without_a_seed_come_back(tmp_path: Path) -> None:
    keras.utils.set_random_seed(3)
    keras.random.uniform([2])
    tmg.Checkpoints(tmp_path, *small()).save()
    expected = keras.random.uniform([2]).numpy()
    for forget in (lambda: None, keras.utils.clear_session):
        forget()
        assert tmg.Checkpoints(tmp_path, *small()).restore() == 0
        np.testing.assert_array_equal(keras.random.uniform([2]).numpy(), expected)


def test_values_that_differ_on_replicas_are_kept_apart(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    def build(replicas: int) -> tuple[tf.distribute.Strategy, Any, Any, tmg.Checkpoints]:
        strategy = strategy_of(replicas)
        with strategy.scope():
            model = network(2, keras.layers.BatchNormalization())
            metric = keras.metrics.Mean()
        extra = {"mean": metric}
        return strategy, model, metric, tmg.Checkpoints(tmp_path, model, extra=extra, keep=1)

    def copies(strategy: tf.distribute.Strategy, variable: Any) -> list[list[float]]:
        local = strategy.experimental_local_results(variable.value)
        return [copy.numpy().tolist() for copy in local]

    for saved, on in (
        # Where it is restored: averaged statistics, and the sum of a metric.
        (2, {2: ([[1.0, 1.0], [3.0, 3.0]], [1.0, 3.0]), 3: ([[2.0, 2.0]] * 3, [4.0, 0.0, 0.0])}),
        (2, {1: ([[2.0, 2.0]], [4.0])}),
        (1, {1: ([[1.0, 1.0]], [1.0]), 3: ([[1.0, 1.0]] * 3, [1.0, 0.0, 0.0])}),
    ):
        with subtests.test(saved=saved):
            strategy, model, metric, run = build(saved)
            for variable in (model.variables[2], metric.variables[1]):
                for i, copy in enumerate(strategy.experimental_local_results(variable.value)):
                    copy.assign(tf.zeros_like(copy) + 1.0 + 2.0 * i)
            run.save()
            for replicas, (averaged, summed) in on.items():
                strategy, model, metric, run = build(replicas)
                assert run.restore() == 0
                assert copies(strategy, model.variables[2]) == averaged
                assert copies(strategy, metric.variables[1]) == summed
                assert copies(strategy, model.variables[0]) == [[1.0, 1.0]] * replicas


class Counting(keras.layers.Layer):
    """Holds variables that Keras does not track, or not as variables of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = tf.Variable(0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        self.tables = {
            "mean": [tf.Variable([0.0, 0.0], synchronization=tf.VariableSynchronization.ON_READ)]
        }
        self.same, self.module = self.calls, tf.Module()
        self.module.factor = tf.Variable(1.0)
        self.metric = keras.metrics.Mean()
        self.inner = keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs)


def test_variables_of_every_kind_are_saved(tmp_path: Path) -> None:
    def build() -> tuple[tmg.Checkpoints, Counting, Any]:
        with strategy_of(2).scope():
            layer = Counting()
            model = network(3, layer)
            wave = tf.Variable(tf.constant([0j], tf.complex64))
            short = tf.Variable(tf.constant([[0.0], [0.0]], tf.bfloat16))
            optimizer = keras.optimizers.SGD()
        extra = {"wave": wave, "short": [short]}
        return tmg.Checkpoints(tmp_path, model, optimizer, extra=extra), layer, (wave, short)

    run, layer, (wave, short) = build()
    layer.calls.assign(7)
    layer.module.factor.assign(0.5)
    wave.assign([1 + 2j])
    short.assign([[1.5], [-0.25]])
    local = strategy_of(2).experimental_local_results
    for number, copy in enumerate(local(layer.tables["mean"][0])):
        copy.assign([number, 1.0])
    for number, copy in enumerate(local(layer.metric.variables[0].value)):
        copy.assign(number + 3.0)
    with np.load(run.save()) as arrays:
        found = [name.split("/", 2)[2] for name in arrays if name.startswith("attributes/")]
    assert len(found) == 3
    again, other, (wave, short) = build()
    again.restore()
    assert (other.calls.numpy(), other.module.factor.numpy()) == (7, 0.5)
    assert [copy.numpy() for copy in local(other.metric.variables[0].value)] == [3.0, 4.0]
    assert wave.numpy().tolist() == [1 + 2j]
    assert short.numpy().tolist() == [[1.5], [-0.25]]
    means = local(other.tables["mean"][0]), local(layer.tables["mean"][0])
    for here, there in zip(*means, strict=True):
        np.testing.assert_array_equal(here.numpy(), there.numpy())


def test_the_generator_of_a_layer_draws_on(tmp_path: Path) -> None:
    def build() -> tuple[tmg.Checkpoints, Any]:
        model, optimizer = small()
        model.layers[0].generator = tf.random.Generator.from_seed(3)
        return tmg.Checkpoints(tmp_path, model, optimizer), model.layers[0].generator

    run, generator = build()
    generator.normal([2])
    run.save()
    again, other = build()
    again.restore()
    np.testing.assert_array_equal(other.normal([2]), generator.normal([2]))


def test_another_model_is_refused_before_anything_changes(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    tmg.Checkpoints(tmp_path, *small()).save()
    for build, text in (
        (
            lambda: small(3),
            "dense/kernel is float32 of shape (3, 2), and here float32 of shape (3, 3)",
        ),
        (lambda: small(name="other"), "12 variables differ: model/0000/sequential/dense/kernel is"),
        (lambda: small(optimizer="sgd"), "Build the same ones as when it was saved"),
        (lambda: (small()[0], None), "6 variables differ: optimizer/0000/"),
    ):
        with subtests.test(text):
            model, optimizer = build()
            before = [variable.numpy() for variable in model.variables]
            with pytest.raises(tmg.CheckpointError, match=re.escape(text)):
                tmg.Checkpoints(tmp_path, model, optimizer).restore()
            assert difference(before, [variable.numpy() for variable in model.variables]) == 0


def test_names_that_keras_counts_in_a_process_do_not_matter(tmp_path: Path) -> None:
    def make(*names: str) -> Any:
        return network(2, *[keras.layers.Dense(2, name=name) for name in names])

    tmg.Checkpoints(tmp_path, make("block_1", "block_2")).save()
    assert tmg.Checkpoints(tmp_path, make("block_2", "block_3")).restore() == 0


def said_of_a_resume(folder: Path, caplog: Any, logical: int | None = None) -> str:
    """Resumes a run of one step by hand, saves it, and returns what was logged."""
    with strategy_of(2).scope():
        model, optimizer = network(4, keras.layers.Dense(1)), keras.optimizers.SGD()
    options: Any = {"verify": False, "logical_replicas": logical}
    step = tmg.make_train_step(model, optimizer, "mse", strategy_of(2), **options)
    checkpoints = tmg.Checkpoints(folder, train_step=step)
    caplog.clear()
    checkpoints.restore()
    step((X, Y))
    checkpoints.after_step()
    checkpoints.save()
    said: str = caplog.text
    return said


# Fails if a run goes on with kernels that may add in another order, and nobody is told.
def test_other_kernels_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert "computed by" not in said_of_a_resume(tmp_path, caplog)
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "97")
    told = re.search(
        r"computed by CPU with \d+ threads, and .* CPU with 97 threads",
        said_of_a_resume(tmp_path, caplog),
    )
    assert told is not None
    assert "computed by" not in said_of_a_resume(tmp_path, caplog)


# Fails if a loop by hand goes on with another cut, so that its bits end otherwise, unsaid.
def test_another_number_of_logical_replicas_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = "For the same bits write logical_replicas=2, in tmg.fit or tmg.make_train_step."
    for logical, told in ((None, False), (2, False), (2, False), (4, True), (4, False)):
        assert (line in said_of_a_resume(tmp_path, caplog, logical)) == told
    assert "goes on with None" in said_of_a_resume(tmp_path, caplog)
