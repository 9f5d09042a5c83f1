"""Each cause of "one GPU only" that a program can have: named first, with the line to change."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import step_on, strategy_of
from problems import network, networks

import tfmultigpu as tmg
from tfmultigpu.addons.diagnostics import explain
from tfmultigpu.strategies.process_state import process_state

X, Y = np.ones((64, 3), "float32"), np.ones((64, 1), "float32")
ROWS = tf.data.Dataset.from_tensor_slices((X, Y))


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Strategies of other tests in this process are not meant."""
    process_state.forget()
    yield
    process_state.forget()


def built(replicas: int) -> tuple[Any, Any]:
    with strategy_of(replicas).scope():
        model = network(3, keras.layers.Dense(1))
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    return model, optimizer


def in_scope(dataset: Any) -> Any:
    return explain(*built(2), dataset, strategy_of(2))


def on_missing_devices() -> Any:
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:77"], tf.distribute.ReductionToOneDevice()
    )
    with strategy.scope():
        return explain(network(3, keras.layers.Dense(1)))


def on_one_device_by_request() -> Any:
    strategy = tmg.create_strategy(prefer="one_device")
    with strategy.scope():
        return explain(network(3, keras.layers.Dense(1)))


def outside_a_strategy_that_exists() -> Any:
    strategy = tmg.create_strategy(devices=2)
    report = explain(built(1)[0])
    assert strategy.num_replicas_in_sync == 2
    return report


CASES = {
    "no strategy": (
        lambda: explain(built(1)[0]),
        *("no-strategy", "The model is on one device, by TensorFlow's default strategy"),
        "strategy = tmg.create_strategy(devices=['CPU:0', 'CPU:1', ",
    ),
    "one device by request": (
        on_one_device_by_request,
        *("no-strategy", "The model is on one device, by OneDeviceStrategy with 1 replica(s)"),
        "strategy = tmg.create_strategy(devices=['CPU:0', 'CPU:1', ",
    ),
    "a strategy of one": (
        lambda: explain(built(1)[0], strategy=tf.distribute.OneDeviceStrategy("CPU:0")),
        *("model-scope", "on one device, and OneDeviceStrategy with 1 replica(s)."),
        "with strategy.scope(): model = ...",
    ),
    "a model outside": (
        lambda: explain(built(1)[0], strategy=strategy_of(2)),
        *("model-scope", "Received: variable 'sequential"),
        "with strategy.scope(): model = ...",
    ),
    "a model outside every scope": (
        outside_a_strategy_that_exists,
        *("model-scope", "on one device, and MirroredStrategy with 2 replica(s)."),
        "with strategy.scope(): model = ...",
    ),
    "a model of another strategy": (
        lambda: explain(built(3)[0], strategy=strategy_of(2)),
        *("model-scope", "on MirroredStrategy with 3 replica(s)"),
        "with strategy.scope(): model = ...",
    ),
    "a model without variables": (
        lambda: explain(keras.Sequential([keras.layers.Dense(1)]), strategy=strategy_of(2)),
        *("model-scope", "The model has no variables yet", "model(x[:1])"),
    ),
    "copies on one device": (
        on_missing_devices,
        *("model-scope", "The 2 copies of a weight are all on CPU:0"),
        "tmg.create_strategy(devices=['CPU:0', ",
    ),
    "an optimizer outside": (
        lambda: explain(built(2)[0], built(1)[1], strategy=strategy_of(2)),
        *("optimizer-scope", "Received: variable 'sgd"),
        "with strategy.scope(): optimizer = ...",
    ),
    "an optimizer of another model": (
        lambda: explain(built(2)[0], built(2)[1], strategy=strategy_of(2)),
        *("optimizer-scope", "built for another model", "with strategy.scope(): optimizer = ..."),
    ),
    "a batch of one row": (
        lambda: in_scope(ROWS.batch(1)),
        *("small-batch", "A batch has 1 example(s) for 2 replicas", "dataset.batch(64)"),
    ),
    "the same, distributed": (
        lambda: in_scope(tmg.distribute_dataset(ROWS.batch(1), strategy_of(2))),
        *("small-batch", "A batch has 1 example(s) for 2 replicas", "dataset.batch(64)"),
    ),
    "no batches": (
        lambda: in_scope(tf.data.Dataset.from_tensor_slices((X, Y[:, 0]))),
        *("small-batch", "has no batch for this strategy", ".batch(global_batch_size)"),
    ),
    "no data": (
        lambda: in_scope(ROWS.batch(4).take(0)),
        *("small-batch", "The dataset is empty", "Check that its files exist"),
    ),
    "no files": (
        lambda: in_scope(tf.data.TFRecordDataset(["/home/ada/x"]).batch(4)),
        *("small-batch", "reading it fails with NotFoundError", "tmg.distribute_dataset"),
    ),
    "data of another strategy": (
        lambda: in_scope(tmg.distribute_dataset(ROWS.batch(6), strategy_of(3))),
        *("small-batch", "distributed for MirroredStrategy with 3 replica(s)"),
        "tmg.distribute_dataset(",
    ),
    "nothing": (
        lambda: in_scope(ROWS.batch(9)),
        *("in-order", "Everything that you passed is on every replica, 2 in all"),
        "print(tmg.tuning.profile_step(step, data))",
    ),
    "arrays": (
        lambda: in_scope((X, Y)),
        *(
            "in-order",
            "Everything that you passed is on every replica, 2 in all",
            "Train with tmg.fit",
        ),
    ),
}


# Fails if a cause is missed or another one is told, or without the values and the line to write.
@pytest.mark.parametrize("name", CASES)
def test_each_cause_is_the_only_one_that_is_told(name: str) -> None:
    make_report, code, says, change = CASES[name]
    report = make_report()
    (finding,) = report.findings
    harmless = ("a model without variables", "one device by request", "nothing", "arrays")
    severity = "note" if name in harmless else "error"
    assert (finding.severity, finding.code) == (severity, code), str(report)
    assert says in finding.what, str(report)
    assert change in finding.change
    assert ("Each replica then computes all" in finding.why) == says.startswith("A batch has")
    assert "ada" not in str(report)


def test_weights_on_the_cpu_beside_gpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[explain.__module__]
    monkeypatch.setattr(module, "list_logical_devices", lambda _=None: ("GPU:0", "GPU:1"))
    (finding,) = explain(*built(2), strategy=strategy_of(2)).findings
    assert "The weights are on CPU:0, CPU:1, and GPUs are here: GPU:0, GPU:1" in finding.what
    assert "no tf.device('CPU:0')" in finding.change


def test_a_compiled_model_outside_has_both_mistakes() -> None:
    model, _ = built(1)
    model.compile("sgd", "mse")
    assert explain(model, strategy=strategy_of(2)).codes == ("model-scope", "optimizer-scope")


def test_what_the_machine_hides_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{")
    assert explain(built(1)[0], strategy=strategy_of(2)).codes == ("cluster", "model-scope")


# Fails if a worker that trains alone, because it forgot to join, is told that all is in order.
def test_a_cluster_that_comes_too_late_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"type": "worker", "index": 0}
    config = {"cluster": {"worker": ["ada:1", "ada:2"]}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    (finding,) = explain(*built(2), strategy=strategy_of(2)).findings
    assert "TensorFlow started before it joined" in finding.what
    assert "directly after the imports" in finding.change


def test_hidden_gpus_are_told_though_no_driver_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    report = explain(*built(2), strategy=strategy_of(2))
    assert report.codes == ("gpus-hidden",)
    assert "unset CUDA_VISIBLE_DEVICES" in report.findings[0].change


def test_another_backend_is_all_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    assert explain(built(1)[0]).codes == ("keras-backend",)


# Fails if the variables that owners update are taken for those of another scope.
@pytest.mark.parametrize("shard_update", [True, False])
def test_a_step_is_reported_with_its_model_and_optimizer(shard_update: bool) -> None:
    build = networks(3, lambda: keras.layers.Dense(1))
    adam = lambda: keras.optimizers.Adam(0.1)  # noqa: E731
    step = step_on(2, build, adam, "mse", shard_update=shard_update)
    step((X[:4], Y[:4]))
    report = explain(step, dataset=ROWS.batch(4))
    assert report.codes == ("in-order",)
    assert report.facts[f"model {step.model.name}"]["copies of a weight"] == "CPU:0, CPU:1"


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"optimizer must be a Keras optimizer\. Received: 'adam'"):
        explain(built(1)[0], "adam")
    with pytest.raises(TypeError, match=r"must be a tf.distribute.Strategy\. Received: 'mirrored'"):
        explain(built(1)[0], strategy="mirrored")


# Fails if a table that is updated as a whole goes unmentioned, or one whose rows are is named.
def test_a_table_that_is_updated_as_a_whole_is_named() -> None:
    rows = keras.layers.Embedding(5000, 16)
    model = network(2, rows, dtype="int32")
    for optimizer, whole in (("Adam", True), ("Adagrad", False)):
        report = tmg.explain(model, getattr(keras.optimizers, optimizer)(0.1))
        found = [each for each in report.findings if each.code == "whole-table"]
        assert len(found) == whole
        if whole:
            assert "5,000 rows" in found[0].what
            assert "320,000 bytes" in found[0].what
