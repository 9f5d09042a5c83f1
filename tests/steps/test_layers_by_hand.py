"""Layers placed by hand: computed where their weights are, alone or as a pipeline."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu import _compat
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.steps import op_placement
from tfmultigpu.steps.op_placement import computing_at_weights, devices_of
from tfmultigpu.steps.train_step import TrainStep

layers = keras.layers
PLACES = ("CPU:1", "CPU:2")
_random = np.random.default_rng(5)
X, Y = (_random.normal(size=(30, size)).astype("float32") for size in (6, 1))


def build(places: tuple[str, ...] = PLACES) -> keras.Model:
    """Two blocks with normalization and dropout, and a sum of activations of both."""
    keras.utils.set_random_seed(2)
    x = inputs = keras.Input((6,))
    for i, place in enumerate(places):
        with tf.device(place):
            inner = layers.Dense(6, "tanh", kernel_regularizer="l2", name=f"block_{i}")(x)
            inner = layers.LayerNormalization()(layers.Dropout(0.2, seed=i)(inner))
            x = layers.Add()([x, inner])
    with tf.device(places[-1]):
        return keras.Model(inputs, layers.Dense(1, name="block_2")(x))


def devices_of_operations(
    monkeypatch: pytest.MonkeyPatch, model: keras.Model, **options: Any
) -> dict[str, set[str]]:
    """Returns the devices of products of matrices in the graph of a step, by name of a layer."""
    graphs: list[Any] = []
    compute = TrainStep._compute

    def noting(self: Any, shards: Any) -> Any:
        logs = compute(self, shards)
        graphs.append(tf.compat.v1.get_default_graph())
        return logs

    monkeypatch.setattr(TrainStep, "_compute", noting)
    sgd = keras.optimizers.SGD(0.1)
    tmg.make_train_step(model, sgd, "mse", verify=False, **options)((X[:6], Y[:6]))
    found: dict[str, set[str]] = {}
    for operation in graphs[-1].get_operations():
        if operation.type in ("MatMul", "TanhGrad", "BiasAddGrad", "ResourceApplyGradientDescent"):
            layer = next(part for part in operation.name.split("/") if part.startswith("block_"))
            device = operation.device and parse_device_name(operation.device)
            found.setdefault(layer[:7], set()).add(device)
    return found


def test_forward_and_backward_are_computed_where_the_weights_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build()
    assert devices_of(model) == PLACES
    assert devices_of_operations(monkeypatch, model) == {
        "block_0": {"CPU:1"},
        "block_1": {"CPU:2"},
        "block_2": {"CPU:2"},
    }


def test_the_micro_batches_of_a_pipeline_are_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    found = devices_of_operations(monkeypatch, build(), micro_batches=3, pipeline=True)
    assert found == {"block_0": {"CPU:1"}, "block_1": {"CPU:2"}, "block_2": {"CPU:2"}}


def test_on_one_device_tensorflow_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = devices_of_operations(monkeypatch, build(("CPU:0", "CPU:0")))
    assert set.union(*found.values()) == {""}


def test_a_device_in_call_is_kept() -> None:
    model = build()

    @tf.function
    def forward(x: Any) -> Any:
        with computing_at_weights(tf.distribute.get_strategy(), model):
            with tf.device("CPU:0"):
                kept = x @ model.layers[1].kernel.value
            return kept, x @ model.layers[1].kernel.value

    graph = forward.get_concrete_function(tf.TensorSpec((None, 6))).graph
    products = [one.device for one in graph.get_operations() if one.type == "MatMul"]
    assert [parse_device_name(one) for one in products] == ["CPU:0", "CPU:1"]


def test_tensorflow_names_the_operation_of_a_gradient() -> None:
    @tf.function
    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape, tf.name_scope("layer"):
            tape.watch(x)
            y = tf.tanh(x)
        return tape.gradient(y, x)

    graph = gradient.get_concrete_function(tf.TensorSpec(())).graph
    found = {one.type: _compat.forward_scope(one) for one in graph.get_operations()}
    assert found["TanhGrad"] == "layer"
    assert found["Tanh"] is None


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.02, momentum=0.9)),
}


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("scaled", {"micro_batches": 3}), ("adam", {"micro_batches": 3, "pipeline": True})],
    ids=["loop", "pipeline"],
)
def test_training_is_that_of_one_device(optimizer: str, options: dict[str, Any]) -> None:
    found = {}
    for places in (PLACES, ("CPU:0", "CPU:0")):
        model, made = build(places), OPTIMIZERS[optimizer]()
        given = options if places == PLACES else {}
        step = tmg.make_train_step(
            model, made, "mse", metrics=[keras.metrics.MeanSquaredError()], **given
        )
        losses, begin = [], 0
        for rows in (8, 7, 1, 2, 9):  # Also fewer rows than micro-batches.
            batch = X[begin : begin + rows], Y[begin : begin + rows]
            weights = np.zeros(rows, "float32") if rows == 7 else np.arange(1.0, rows + 1) / rows
            losses.append(float(step((*batch, weights.astype("float32")))["loss"]))
            begin += rows
        metrics = [float(one.result()) for one in step.metrics]
        found[places] = [*model.get_weights(), np.array(losses), np.array(metrics)]
        if places == PLACES:
            for variable in model.trainable_variables:
                slots = [one for one in made.variables if one.shape == variable.shape]
                assert variable.value.device in {one.value.device for one in slots} or not slots
    one, other = found.values()
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_fit_with_a_pipeline_and_a_batch_that_ends_with_none() -> None:
    step = tmg.make_train_step(
        build(), keras.optimizers.SGD(0.1), "mse", micro_batches=3, pipeline=True
    )
    history = tmg.fit(step.model, (X, Y), step=step, batch_size=8, shuffle=False, verbose=0)
    logs = step((X, Y, None))

    alone = tmg.make_train_step(build(("CPU:0", "CPU:0")), keras.optimizers.SGD(0.1), "mse")
    losses = [float(alone((X[i : i + 8], Y[i : i + 8]))["loss"]) for i in range(0, 30, 8)]
    mean = np.average(losses, weights=[8, 8, 8, 6])
    np.testing.assert_allclose(history.history["loss"], [mean], rtol=1e-5)
    np.testing.assert_allclose(logs["loss"], alone((X, Y))["loss"], rtol=1e-5)
    for one, other in zip(step.model.get_weights(), alone.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_after_a_strategy_was_created() -> None:
    """As in a notebook that tried replicas before."""
    strategy = tmg.create_strategy(devices=2)
    model = build()
    step = tmg.make_train_step(
        model, keras.optimizers.SGD(0.1), "mse", tf.distribute.get_strategy()
    )
    tmg.fit(model, (X, Y), step=step, verbose=0)
    model.compile(loss="mse")
    assert tmg.predict(model, X).shape == (30, 1)
    assert tmg.evaluate(model, X, Y)["loss"] > 0.0
    with pytest.raises(tmg.ScopeError, match="outside the scope of every strategy"):
        tmg.predict(build(("CPU:0", "CPU:0")), X)
    assert strategy.num_replicas_in_sync == 2


def test_a_pipeline_resumes_on_one_device(tmp_path: Any) -> None:
    def run(places: tuple[str, ...], steps: int, **options: Any) -> list[np.ndarray]:
        model, adam = build(places), keras.optimizers.Adam(0.01)
        step = tmg.make_train_step(model, adam, "mse", **options)
        checkpoints = tmg.Checkpoints(tmp_path / "saved", model, adam)
        for i in range(checkpoints.restore() or 0, steps):
            step((X[6 * i : 6 * i + 6], Y[6 * i : 6 * i + 6]))
        if steps == 2:
            checkpoints.save()
        return [one.numpy() for one in [*model.variables, *adam.variables]]

    whole = run(PLACES, 4, micro_batches=2, pipeline=True)
    run(PLACES, 2, micro_batches=2, pipeline=True)
    for one, other in zip(whole, run(("CPU:0", "CPU:0"), 4), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_evaluate_and_predict_are_those_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[str] = []
    device_of = op_placement._Places.device_of

    def noting(self: Any, operation: Any) -> str:
        device = device_of(self, operation)
        if operation.type == "MatMul":
            products.append(parse_device_name(device))
        return device

    monkeypatch.setattr(op_placement._Places, "device_of", noting)
    model, alone = build(), build(("CPU:0", "CPU:0"))
    for one in (model, alone):
        one.compile("sgd", "mse")
    np.testing.assert_allclose(tmg.predict(model, X), tmg.predict(alone, X), atol=1e-6)
    assert products
    assert set(zip(products[::3], products[1::3], products[2::3], strict=True)) == {
        ("CPU:1", "CPU:2", "CPU:2")
    }
    products.clear()
    found, expected = (tmg.evaluate(one, X, Y, batch_size=7) for one in (model, alone))
    np.testing.assert_allclose(found["loss"], expected["loss"], atol=1e-6)
    assert set(products) == {"CPU:1", "CPU:2"}


def test_what_cannot_overlap_is_refused() -> None:
    cases: list[tuple[int, Any, dict[str, Any], str]] = [
        (2, None, {"micro_batches": 2}, "pipeline=True and 2 replicas"),
        (1, PLACES, {}, "micro_batches=1"),
        (1, PLACES, {"micro_batches": 2, "jit_compile": True}, "jit_compile=True"),
        (1, ("CPU:0", "CPU:0"), {"micro_batches": 2}, "all weights .* on CPU:0"),
    ]
    for replicas, places, options, says in cases:
        with strategy_of(replicas).scope():
            dense = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
            model = build(places) if places else dense
            sgd = keras.optimizers.SGD(0.1)
        with pytest.raises(tmg.TfMultiGpuError, match=says):
            tmg.make_train_step(model, sgd, "mse", strategy_of(replicas), pipeline=True, **options)
    with pytest.raises(tmg.TfMultiGpuError, match=r"weights on CPU:1, CPU:2\. Leave jit_compile"):
        tmg.make_train_step(build(), keras.optimizers.SGD(0.1), "mse", jit_compile=True)
