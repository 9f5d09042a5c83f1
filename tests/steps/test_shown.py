"""What objects print as: one line with the facts one looks for, and no addresses."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of
from problems import network

import tfmultigpu as tmg
from tfmultigpu.steps.tally import Tally

WHERE = "MirroredStrategy with 2 replica(s)"
ARRAYS = np.ones((10, 3), "float32"), np.ones((10, 1), "float32")


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="small")
        optimizer = keras.optimizers.SGD(0.1)
        window = tmg.GradientAccumulator(model.trainable_variables)
        scale = tmg.LossScale(8.0, growth_steps=100)
    return {
        "strategy": strategy,
        "model": model,
        "optimizer": optimizer,
        "window": window,
        "scale": scale,
        "data": tmg.distribute_dataset(ARRAYS, strategy, batch_size=4),
    }


def line(value: object) -> str:
    text = repr(value)
    assert "\n" not in text
    assert not re.search(r"0x[0-9a-f]{6}", text)
    return text


def make(parts: dict[str, Any], **options: Any) -> Any:
    loss = options.pop("loss", "mse")
    return tmg.make_train_step(
        parts["model"], parts["optimizer"], loss, parts["strategy"], **options
    )


def test_a_train_step_says_what_it_trains_and_what_its_check_found(parts: dict[str, Any]) -> None:
    step = make(parts, clip_norm=2.0, micro_batches=3)
    does = f"mean_squared_error, SGD, micro_batches=3, clip_norm=2.0, {WHERE}"
    assert line(step) == f"<TrainStep of 'small': {does}; not called yet>"
    step(next(iter(parts["data"])))
    assert line(step) == f"<TrainStep of 'small': {does}; as on one device>"

    unchecked = make(parts, verify=False)
    unchecked(next(iter(parts["data"])))
    assert line(unchecked).endswith("; not compared with one device>")


def test_a_step_that_differs_says_where_to_look(parts: dict[str, Any]) -> None:
    def of_rows_minus_their_mean(model: Any, batch: Any, training: bool) -> Any:
        outputs = model(batch[0] * tf.range(tf.cast(tf.shape(batch[0])[0], tf.float32))[:, None])
        return tmg.loss_sum("mse", batch[1], outputs - tf.reduce_mean(outputs))

    step = make(parts, loss=None, forward=of_rows_minus_their_mean)
    with pytest.warns(tmg.ReplicaDependenceWarning):
        step(next(iter(parts["data"])))
    assert "'small': of_rows_minus_their_mean, SGD, " in line(step)
    assert line(step).endswith("; not as on one device: print(step.verification)>")
    assert repr(step.verification) == str(step.verification)


def test_other_steps_say_what_they_compute(parts: dict[str, Any]) -> None:
    model, strategy = parts["model"], parts["strategy"]
    with strategy.scope():
        metric = keras.metrics.MeanAbsoluteError(name="mae")
    evaluate = tmg.make_eval_step(model, "mse", strategy, metrics=[metric])
    assert (
        line(evaluate) == f"<EvalStep of 'small': mean_squared_error, mae, {WHERE}; not called yet>"
    )
    predict = tmg.make_predict_step(model, strategy)
    assert line(predict) == f"<PredictStep of 'small': {WHERE}; not called yet>"
    once = make(parts)
    chain = tmg.chain_steps(once, once, names=("first", "second"))
    assert line(chain) == f"<ChainedStep of 2: first, then second; {WHERE}>"


def test_data_says_what_is_in_it_and_what_takes_it(parts: dict[str, Any]) -> None:
    strategy = parts["strategy"]
    assert line(parts["data"]) == (
        f"<ShardedDataset 3 batches of float32 [rows, 3], float32 [rows, 1] for {WHERE}: write "
        "tmg.fit(model, data), tmg.evaluate or tmg.predict, not model.fit>"
    )
    many = tf.data.Dataset.from_tensor_slices([tf.range(8)] * 6).batch(2).repeat()
    text = line(tmg.distribute_dataset(many, strategy))
    assert text.startswith("<ShardedDataset endless batches of int32 [rows, 8] for")
    five = tmg.distribute_dataset(tuple(np.arange(8) for _ in range(5)), strategy, batch_size=4)
    assert "int64 [rows], int64 [rows], int64 [rows], int64 [rows], ... for" in line(five)


# Keras prints what it was given.
def test_the_fit_of_keras_says_what_takes_the_data(parts: dict[str, Any]) -> None:
    with parts["strategy"].scope():
        model = network(3, keras.layers.Dense(1))
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"write tmg\.fit\(model, data\)"):
        model.fit(parts["data"], verbose=0)


def test_a_window_and_a_scale_say_what_they_hold(parts: dict[str, Any]) -> None:
    window, scale, strategy = parts["window"], parts["scale"], parts["strategy"]
    assert line(window) == f"<GradientAccumulator of 2 variable(s) on {WHERE}: holds nothing>"
    gradients = [tf.zeros((3, 1)), tf.zeros((1,))]

    @tf.function
    def add() -> None:
        strategy.run(lambda: window.add(gradients, 2.0))
        assert "holds what a tf.function adds" in line(window)

    add()
    assert line(window).endswith("holds 1 micro-batch(es)>")
    window.reduce()
    scale.update(tf.constant(True))
    assert line(scale) == "<LossScale 8, dynamic: 1 of 100 good steps until it doubles>"
    assert line(tmg.LossScale(128.0, growth_steps=None)) == "<LossScale 128, fixed>"


def test_a_pair_says_its_numbers(parts: dict[str, Any]) -> None:
    assert line(tmg.LossSum(sum=6.0, weight=3.0)) == "LossSum(sum=6, weight=3)"
    pair = tmg.loss_sum("mse", [[1.0], [2.0]], [[1.0], [4.0]])
    assert line(pair) == "LossSum(sum=4, weight=2)"
    on_replicas = parts["strategy"].run(lambda: tmg.loss_sum("mse", [[1.0]], [[4.0]]))
    assert line(on_replicas) == "LossSum(sum=(9, 9), weight=(1, 1))"
    seen = []

    @tf.function
    def trace() -> None:
        seen.append(line(tmg.loss_sum("mse", [[1.0]], [[4.0]])))

    trace()
    assert seen == ["LossSum(sum=<float32 of a trace>, weight=<float32 of a trace>)"]


def test_a_tally_says_its_sums(parts: dict[str, Any]) -> None:
    assert line(Tally.empty()) == "Tally(of no step)"
    step = make(parts, verify=False)
    _, tallies = step.runner.run(iter(parts["data"]), 3)
    text = line(tallies[""])
    assert text.startswith("Tally(steps=3, rows=10, skipped=0, sums=[")
    assert text.endswith("weights=[10, 10])")
    seen = []

    @tf.function
    def trace() -> None:
        seen.append(line(Tally(None, tf.zeros([9]), tf.zeros([2]))))

    trace()
    assert seen == ["Tally(of a trace)"]


def test_a_profile_prints_its_table(parts: dict[str, Any]) -> None:
    profile = tmg.tuning.profile_step(make(parts, verify=False), parts["data"], steps=1)
    assert repr(profile) == str(profile)
