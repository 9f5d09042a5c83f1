"""``tmg.sharded_variables``: each large variable on one device alone, trained as on one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.model import FLOAT, Training, cut
from law.pair import LOGS, dataset_of, strategy_of
from law.plain import PlainLoop, assert_values

import tfmultigpu as tmg

REPLICAS = 3
SIZES = (7, 1, 2, 5)
_random = np.random.default_rng(31)
IDS = _random.integers(0, 7000, (sum(SIZES), 3)).astype("int32")
IDS[:, 0] = 4  # The same row of the table from every replica.
LABELS = _random.normal(size=(sum(SIZES), 2))


def batches() -> list[Any]:
    return cut((IDS, LABELS), SIZES)


def build() -> Training:
    """Two tables of 3.6 MB and a kernel of 1.2 MB: large variables; and small ones."""
    keras.utils.set_random_seed(3)
    ids = keras.Input((3,), dtype="int32")
    tables = [keras.layers.Embedding(7000, 64, **FLOAT)(ids) for _ in range(2)]
    hidden = keras.layers.Flatten(**FLOAT)(keras.layers.Concatenate(**FLOAT)(tables))
    hidden = keras.layers.Dense(400, "tanh", **FLOAT)(hidden)
    model = keras.Model(ids, keras.layers.Dense(2, **FLOAT)(hidden))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    training = Training(model, optimizer, keras.losses.MeanSquaredError(**FLOAT))
    model.compile(optimizer, training.loss)
    return training


def build_sharded() -> Training:
    with strategy_of(REPLICAS).scope(), tmg.sharded_variables():
        return build()


def make_step(training: Training) -> Any:
    strategy = strategy_of(REPLICAS)
    return tmg.make_train_step(training.model, training.optimizer, training.loss, strategy)


def shards() -> Any:
    return tmg.distribute_dataset(dataset_of(batches, batches()[0]), strategy_of(REPLICAS))


@functools.cache
def truth() -> tuple[Training, list[dict[str, float]]]:
    """One device after one pass."""
    training = build()
    return training, PlainLoop(training, batches()[0]).train(batches())


@functools.cache
def trained() -> tuple[Training, list[dict[str, float]]]:
    """Three replicas after one pass."""
    training = build_sharded()
    step = make_step(training)
    return training, [{n: float(v) for n, v in step(shard).items()} for shard in shards()]


def bytes_by_device(variables: Any, least: int = 0) -> list[int]:
    """Counts what the variables of a model hold on each device."""
    counts: dict[str, int] = {}
    for variable in variables:
        for local in strategy_of(REPLICAS).experimental_local_results(variable.value):
            size = local.dtype.size * local.shape.num_elements()
            if size >= least:
                device = tf.DeviceSpec.from_string(local.device)
                name = f"{device.device_type}:{device.device_index}"
                counts[name] = counts.get(name, 0) + size
    return sorted(counts.values())


# Fails if a device holds what another one holds too, of weights or of the optimizer's slots.
def test_each_large_variable_is_on_one_device_alone() -> None:
    training, _ = trained()
    large = [v for v in training.model.trainable_variables if v.shape.num_elements() > 100_000]
    assert len(large) == 3
    sizes = sorted(8 * v.shape.num_elements() for v in large)
    assert bytes_by_device(large) == sizes  # One on each of three devices.
    slots = [v for v in training.optimizer.variables if v.shape.num_elements() > 100_000]
    assert bytes_by_device(slots) == sizes


# Fails if an owner is skipped or updates twice, or gets the gradient of its own rows alone.
def test_training_is_that_of_one_device() -> None:
    (ours, logs), (plain, expected) = trained(), truth()
    for log, truth_of_step in zip(logs, expected, strict=True):
        for name, value in truth_of_step.items():
            np.testing.assert_allclose(log[name], value, **LOGS, err_msg=name)
    assert_values(ours.values(), plain.values(), plain.variables())


# Fails if evaluation or prediction reads another device's copy that was never trained.
def test_evaluation_and_predictions_are_those_of_one_device() -> None:
    (ours, _), (plain, _) = trained(), truth()
    data = dataset_of(batches, batches()[0])
    loss = tmg.evaluate(ours.model, data)
    expected = plain.model.evaluate(IDS, LABELS, batch_size=len(IDS), verbose=0)
    np.testing.assert_allclose(loss, expected, **LOGS)
    predicted = tmg.predict(ours.model, data)
    np.testing.assert_allclose(predicted, plain.model(IDS).numpy(), rtol=1e-7, atol=1e-12)


def lora(mode: str) -> tuple[Any, Any]:
    """Returns a model whose large kernels are quantized, with LoRA, and its optimizer."""
    keras.utils.set_random_seed(4)
    hidden = [keras.layers.Dense(256, "relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((256,)), *hidden, keras.layers.Dense(2)])
    for layer in hidden:
        layer.quantize(mode)
        layer.enable_lora(2)
    return model, keras.optimizers.SGD(0.1)


# Keras' own quantizers read variables so.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
# Fails if a kernel that ``layer.quantize`` has made is held by several devices, or is read wrong.
def test_a_quantized_kernel_is_on_one_device_alone() -> None:
    strategy, x = strategy_of(REPLICAS), np.linspace(-1, 1, 7 * 256, dtype="float32")
    batch = x.reshape(7, 256), x[:14].reshape(7, 2)
    for mode, size in (("int8", 256 * 256), ("int4", 256 * 256 // 2)):
        model, optimizer = lora(mode)
        plain = PlainLoop(Training(model, optimizer, keras.losses.MeanSquaredError()), batch)
        expected = [plain.step(batch)["loss"] for _ in range(2)]
        with strategy.scope(), tmg.sharded_variables(at_least=2**14):
            ours, optimizer = lora(mode)
        kernels = [v for v in ours.variables if v.dtype == "int8" and v.shape.rank == 2]
        kernels = [v for v in kernels if v.shape.num_elements() >= 2**14]
        assert len(kernels) == 3
        assert sum(bytes_by_device(kernels)) == 3 * size  # Where there is most room.
        step = tmg.make_train_step(ours, optimizer, "mse", strategy, verify=False)
        losses = [float(step(batch)["loss"]) for _ in range(2)]
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        for variable, other in zip(ours.variables, model.variables, strict=True):
            np.testing.assert_allclose(variable, other, rtol=1e-4, atol=1e-6)


# Fails if a shard or its slot is not in a checkpoint, or comes back on another device or on all.
def test_they_are_saved_and_restored(tmp_path: Path) -> None:
    ours, _ = trained()
    tmg.Checkpoints(tmp_path, model=ours.model, optimizer=ours.optimizer).save()
    other = build_sharded()
    for variable in other.model.variables:
        variable.assign(tf.zeros_like(variable))
    step = make_step(other)
    checkpoints = tmg.Checkpoints(tmp_path, model=other.model, optimizer=other.optimizer)
    assert checkpoints.restore() == len(SIZES)
    np.testing.assert_equal(ours.values(), other.values())
    assert bytes_by_device(other.model.variables) == bytes_by_device(ours.model.variables)
    first = next(iter(shards()))
    again = make_step(ours)
    assert float(step(first)["loss"]) == float(again(first)["loss"])
    np.testing.assert_equal(ours.values(), other.values())
