"""Each cause of "one GPU only" that a program can have, provoked, and the report's first lines."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from diagnosed import provoke

import tfmultigpu as tmg
from tfmultigpu.addons import diagnostics

PRELUDE = """
virtual_cpus(2)
x, y = np.ones((64, 3), "float32"), np.ones((64, 1), "float32")
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).prefetch(2)

def two():
    return tmg.create_strategy(devices=["CPU:0", "CPU:1"])

def build(*layers):
    return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])

def explain(*arguments, **options):
    return diagnostics.explain(*arguments, **{"seconds": 0, **options})
"""
UNDER = "strategy = two()\nwith strategy.scope():\n    "


def case(code: str, says: str, change: str, severity: str, setup: str, **environment: str):
    return code, says, change, severity, {"code": PRELUDE + setup, "environment": environment}


CASES = {
    "no-strategy": case(
        "no-strategy",
        "There is no strategy: the model is on one device, and 2 are here: CPU:0, CPU:1",
        "strategy = tmg.create_strategy(), then build the model",
        "error",
        "report = explain(build())",
    ),
    "mirrored-of-one": case(
        "strategy-of-one",
        "MirroredStrategy has one replica, on CPU:0, and 2 devices are here: CPU:0, CPU:1",
        "tmg.create_strategy(devices=['CPU:0', 'CPU:1'])",
        "error",
        "strategy = tf.distribute.MirroredStrategy(['CPU:0'])\n"
        "with strategy.scope(): model = build()\n"
        "report = explain(model, strategy=strategy)",
    ),
    "model-outside": case(
        "model-scope",
        "The model was created outside the scope of the strategy: 2 of 2 variables, such as "
        "'sequential/dense/kernel', are on CPU:0 alone",
        "with strategy.scope(): model = ...",
        "error",
        "model = build(); report = explain(model, strategy=two())",
    ),
    "both-outside": case(
        "optimizer-scope",
        "The optimizer was created outside the scope of the strategy: 2 of 2 variables",
        "with strategy.scope(): optimizer = ...",
        "error",
        "model = build(); model.compile('sgd', 'mse')\nreport = explain(model, strategy=two())",
    ),
    "optimizer-outside": case(
        "optimizer-scope",
        "The optimizer was created outside the scope of the strategy: 2 of 2 variables, such as",
        "with strategy.scope(): optimizer = ...",
        "error",
        UNDER + "model = build()\nreport = explain(model, keras.optimizers.SGD(0.1))",
    ),
    "another-strategy": case(
        "other-strategy",
        "The model was created under another strategy, MirroredStrategy with 2 replica(s)",
        "Create one strategy, and under it",
        "error",
        UNDER + "model = build()\nreport = explain(model, strategy=two())",
    ),
    "another-model": case(
        "optimizer-of-another-model",
        "The optimizer was built for the variables of another model: it knows none of the 2",
        "optimizer = ...",
        "error",
        UNDER + "model = build(); optimizer = keras.optimizers.SGD(0.1)\n"
        "    optimizer.build(build().trainable_variables)\n"
        "report = explain(model, optimizer)",
    ),
    "missing-device": case(
        "copies-together",
        "The 2 copies of each weight are on CPU:0: the strategy was made for CPU:0, CPU:5",
        "tmg.create_strategy(devices=[...])",
        "error",
        "strategy = tf.distribute.MirroredStrategy(['CPU:0', 'CPU:5'],\n"
        "    tf.distribute.ReductionToOneDevice())\n"
        "with strategy.scope(): model = build()\n"
        "report = explain(model)",
    ),
    "on-the-cpu": case(
        "variables-on-cpu",
        "The weights are on CPU:0, and 2 GPU(s) are here: GPU:0, GPU:1",
        "no tf.device('CPU:0') around the model",
        "error",
        "strategy = tf.distribute.OneDeviceStrategy('CPU:0')\n"
        "with strategy.scope(): model = build()\n"
        "from tfmultigpu.addons.diagnostics import placement\n"
        "placement.list_logical_devices = lambda kind: ('GPU:0', 'GPU:1')\n"
        "report = explain(model)",
    ),
    "hidden-gpus": case(
        "gpus-hidden",
        "CUDA_VISIBLE_DEVICES='-1' hides every GPU from TensorFlow: it sees none of the 4 GPU(s)",
        "unset CUDA_VISIBLE_DEVICES",
        "error",
        "driver(4)\n" + UNDER + "model = build()\nreport = explain(model)",
        CUDA_VISIBLE_DEVICES="-1",
    ),
    "small-batch": case(
        "small-batch",
        "A batch has 1 example(s) for 2 replicas",
        "dataset.batch(64)",
        "error",
        UNDER + "model = build()\n"
        "report = explain(model, dataset=tf.data.Dataset.from_tensor_slices((x, y)).batch(1))",
    ),
    "uneven-batch": case(
        "uneven-batch",
        "A batch has 9 examples, not divisible by 2 replicas",
        "dataset.batch(8)",
        "warning",
        UNDER + "model = build()\n"
        "report = explain(model, dataset=tf.data.Dataset.from_tensor_slices((x, y)).batch(9))",
    ),
    "unbatched": case(
        "unbatched",
        "The dataset does not yield batches: The dataset is not batched",
        "dataset.batch(global_batch_size)",
        "error",
        UNDER + "model = build()\n"
        "report = explain(model, dataset=tf.data.Dataset.from_tensor_slices((x, y[:, 0])))",
    ),
    "empty": case(
        "no-data",
        "The dataset is empty",
        "Check that the files are found",
        "error",
        UNDER + "model = build()\nreport = explain(model, dataset=data.take(0))",
    ),
    "missing-files": case(
        "data-fails",
        "Reading the dataset fails with NotFoundError.",
        "for batch in dataset: pass",
        "error",
        UNDER + "model = build()\n"
        "report = explain(model, dataset=tf.data.TFRecordDataset(['/home/ada/x']).batch(4))\n"
        "assert 'ada' not in str(report)",
    ),
    "arrays": case(
        "data-not-read",
        "explain does not read a tuple.",
        "tf.data.Dataset.from_tensor_slices((x, y)).batch(",
        "note",
        UNDER + "model = build()\nreport = explain(model, dataset=(x, y))",
    ),
    "sharded": case(
        "data-sharded",
        "dataset.shard(...) has divided the dataset, and a strategy divides it again",
        "Remove .shard(...)",
        "warning",
        UNDER + "model = build()\n"
        "slices = tf.data.Dataset.from_tensor_slices((x, y))\n"
        "report = explain(model, dataset=slices.shuffle(9).shard(2, 0).batch(8).prefetch(1))",
    ),
    "input-bound": case(
        "input-bound",
        "The devices wait for data ",
        "dataset.map(f, num_parallel_calls=tf.data.AUTOTUNE); dataset.prefetch(tf.data.AUTOTUNE)",
        "warning",
        "import time\n"
        "def slow(x, y):\n"
        "    (x,) = tf.numpy_function(lambda x: [time.sleep(0.2), x][1:], [x], [tf.float32])\n"
        "    return tf.ensure_shape(x, [8, 3]), y\n" + UNDER + "model = build()\n"
        "slices = tf.data.Dataset.from_tensor_slices((x, y))\n"
        "report = explain(model, dataset=slices.batch(8, True).map(slow), seconds=1)",
    ),
    "in-order": case(
        "in-order",
        "Model, optimizer and dataset are on 2 replicas as they should be",
        "tmg.tuning.profile_step(step, data)",
        "note",
        UNDER + "model = build(*[keras.layers.Dense(1500) for _ in range(3)])\n"
        "    model.compile('sgd', 'mse', metrics=['mae'])\n"
        "before = [v.numpy() for v in model.variables]\n"
        "report = explain(model, dataset=data.cache().prefetch(2), seconds=1)\n"
        "assert all((v.numpy() == b).all() for v, b in zip(model.variables, before))\n"
        "assert not model.optimizer.built or model.optimizer.iterations == 0",
    ),
}


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    return provoke({name: settings for name, (*_, settings) in CASES.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_cause_is_named_in_the_first_three_lines(reports: Any, name: str) -> None:
    code, says, change, severity, _ = CASES[name]
    report = reports[name]
    (finding,) = [one for one in report["findings"] if one["code"] == code]
    assert finding["severity"] == severity
    assert says in finding["what"]
    assert change in finding["change"]
    assert finding["why"]
    assert finding["why"].rstrip(".") in report["text"]
    first = "\n".join(report["text"].splitlines()[:3])
    if severity != "note":
        assert code in first
    if finding == report["findings"][0]:
        assert says in first


@pytest.mark.slow
def test_what_is_no_cause_is_not_said(reports: Any) -> None:
    found = {name: [one["code"] for one in reports[name]["findings"]] for name in CASES}
    assert found["in-order"] == ["in-order"]
    assert found["arrays"] == ["data-not-read", "in-order"]
    assert "Model and optimizer are on 2 replicas" in reports["arrays"]["text"]
    assert found["both-outside"] == ["model-scope", "optimizer-scope"]
    for name in ("no-strategy", "mirrored-of-one", "model-outside", "missing-device"):
        assert found[name] == [CASES[name][0]], name
    assert found["input-bound"] == ["input-bound"]
    assert reports["in-order"]["title"].endswith("explain: 2 replica(s) on 2 device(s)")
    model = reports["in-order"]["facts"]["model"]
    assert model["copies of a weight"] == "2, on CPU:0, CPU:1"
    # The model is compiled, so Keras' own fit may be meant.
    assert "use tmg.fit: Keras' own fit may fail" in reports["in-order"]["text"]
    assert "use tmg.fit" not in reports["arrays"]["text"]
    stages = reports["sharded"]["facts"]["dataset"]["stages"]
    assert stages == "TensorSlice > Shuffle > Shard > Batch > Prefetch"


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be a Keras model\. Received: 'model"):
        diagnostics.explain("model.keras")
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(TypeError, match=r"optimizer must be a Keras optimizer\. Received: 'adam'"):
        diagnostics.explain(model, "adam")
    with pytest.raises(TypeError, match=r"must be a tf.distribute.Strategy\. Received: 'mirrored'"):
        diagnostics.explain(model, strategy="mirrored")
    for seconds in (-1, None, "1", float("nan")):
        with pytest.raises(ValueError, match=f"0 measures nothing. Received: seconds={seconds!r}"):
            diagnostics.explain(model, seconds=seconds)
        with pytest.raises(ValueError, match=f"wait for a batch. Received: patience={seconds!r}"):
            diagnostics.explain(model, patience=seconds)


def test_another_backend_is_all_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    report = diagnostics.explain(keras.Sequential([keras.layers.Dense(1)]))
    assert report.codes == ("keras-backend",)
    assert str(report).startswith("tfmultigpu explain: 1 error (keras-backend)")


def test_inside_a_function_there_is_nothing_to_look_at() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(tmg.TfMultiGpuError, match=r"Call tmg\.explain outside of it"):
        tf.function(lambda: tmg.explain(model))()


def test_a_step_is_reported_with_its_optimizer() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    step = tmg.make_train_step(model, keras.optimizers.SGD(0.25), "mse")
    data = tf.data.Dataset.from_tensors((tf.zeros([2, 3]), tf.zeros([2, 1]))).repeat(3)
    report = diagnostics.explain(step, dataset=data)
    assert report.facts["dataset"]["examples in a batch"] == "2"
    assert report.facts["optimizer"]["learning rate"] == "0.25"
    assert ".numpy()" in report.facts["optimizer"]["read it in a callback"]
    with pytest.raises(TypeError, match=r"optimizer=_RepeatDataset\. .*dataset=data\)"):
        diagnostics.explain(step, data)
