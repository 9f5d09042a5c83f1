"""A table of embeddings larger than a device: its rows are on several, and it trains as on one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from law.model import FLOAT, Training, cut
from law.pair import LOGS, dataset_of
from law.plain import PlainLoop, assert_values

import tfmultigpu as tmg

IDS, WIDTH, REPLICAS = 5003, 16, 3
BYTES = 8 * IDS * WIDTH
KIND = os.environ.get("TEST_DEVICES", "CPU")
MEMORY = {f"{KIND}:0": 0.4 * BYTES, f"{KIND}:1": 0.3 * BYTES, f"{KIND}:2": 0.8 * BYTES}
SIZES = (7, 1, 2, 5)
optimizers, layers = keras.optimizers, keras.layers
_random = np.random.default_rng(41)
ITEMS = _random.integers(1, IDS, (sum(SIZES), 3)).astype("int32")
ITEMS[:, 0] = IDS - 1  # The last row, from every replica,
ITEMS[1::2, 1] = -2  # one counted from the end, as NumPy does,
ITEMS[::2, 2] = 0  # and the first.
Y = _random.normal(size=(sum(SIZES), 2))


@functools.cache
def strategy_of(replicas: int) -> Any:
    """Returns strategies whose devices hold nothing but what is made here."""
    return tmg.create_strategy(devices=list(MEMORY)[:replicas])


def batches() -> list[Any]:
    return cut((ITEMS, Y), SIZES)


def adam() -> Any:
    """All rows are updated; the norm that is clipped is of the table and not of its parts."""
    return optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.02)


def adagrad() -> Any:
    """The rows of a batch are updated."""
    return optimizers.Adagrad(0.5, clipvalue=0.01)


def build(optimizer: Callable[[], Any], clip_norm: float | None = None) -> Training:
    keras.utils.set_random_seed(3)
    ids = keras.Input((3,), dtype="int32")
    table = layers.Embedding(IDS, WIDTH, "he_normal", embeddings_regularizer="l2", **FLOAT)
    if clip_norm is not None:
        table = layers.Embedding(IDS, WIDTH, **FLOAT)
    hidden = layers.Dense(4, "tanh", **FLOAT)(layers.Flatten(**FLOAT)(table(ids)))
    model = keras.Model(ids, layers.Dense(2, **FLOAT)(hidden))
    training = Training(
        model, optimizer(), keras.losses.MeanSquaredError(**FLOAT), clip_norm=clip_norm
    )
    model.compile(training.optimizer, training.loss)
    return training


def build_divided(optimizer: Callable[[], Any], replicas: int, *limits: float | None) -> Training:
    memory = {name: MEMORY[name] for name in list(MEMORY)[:replicas]}
    if replicas == 2:
        memory = dict.fromkeys(memory, 1.5 * BYTES)
    with strategy_of(replicas).scope(), tmg.sharded_variables(memory=memory):
        return build(optimizer, *limits)


def step_of(training: Training, replicas: int, **options: Any) -> Any:
    return tmg.make_train_step(
        training.model, training.optimizer, training.loss, strategy_of(replicas),
        clip_norm=training.clip_norm, **options,
    )  # fmt: skip


def shards(replicas: int) -> Any:
    return tmg.distribute_dataset(dataset_of(batches, batches()[0]), strategy_of(replicas))


@functools.cache
def truth() -> tuple[Training, list[dict[str, float]]]:
    """One device after one pass."""
    training = build(adam)
    return training, PlainLoop(training, batches()[0]).train(batches())


@functools.cache
def trained() -> tuple[Training, list[dict[str, float]]]:
    """Three devices, of which none has room for the table, after one pass."""
    training = build_divided(adam, REPLICAS)
    step = step_of(training, REPLICAS, verify=False)
    logs: list[dict[str, float]] = []
    for shard in shards(REPLICAS):
        logs.append({name: float(value) for name, value in step(shard).items()})
    return training, logs


# Fails if rows or slots of one device are read or updated by another's ids, an update is of the
# rows of a batch alone, each part is clipped by itself, or a penalty is counted once a replica.
def test_a_table_that_no_device_holds_trains_as_on_one() -> None:
    (ours, logs), (plain, expected) = trained(), truth()
    assert max(MEMORY.values()) < BYTES
    for log, of_one in zip(logs, expected, strict=True):
        for name, value in of_one.items():
            np.testing.assert_allclose(log[name], value, **LOGS, err_msg=name)
    assert_values(ours.values(), plain.values(), plain.variables())


@pytest.mark.more
# Fails if what a list of rows is of is lost: over micro-batches, in the norm, or in the update.
def test_lists_of_its_rows_train_as_on_one_device() -> None:
    plain = build(adagrad, 0.05)
    expected = PlainLoop(plain, batches()[0]).train(batches())
    ours = build_divided(adagrad, 2, 0.05)
    step = step_of(ours, 2, micro_batches=2, verify=False)
    for shard, of_one in zip(shards(2), expected, strict=True):
        logs = step(shard)
        for name, value in of_one.items():
            np.testing.assert_allclose(logs[name], value, **LOGS, err_msg=name)
    assert_values(ours.values(), plain.values(), plain.variables())


# Keras' own reading of variables.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
# Fails if a file has the parts, or rows come back in another order, or slots without their rows.
def test_it_is_saved_as_one_array_and_read_on_other_devices(tmp_path: Path) -> None:
    ours, _ = trained()
    table = ours.model.get_weights()[0]
    assert table.shape == (IDS, WIDTH)
    ours.model.save(tmp_path / "model.keras")
    tmg.Checkpoints(tmp_path / "steps", model=ours.model, optimizer=ours.optimizer).save()
    alone = keras.models.load_model(tmp_path / "model.keras")
    pairs = zip(
        [*alone.variables, *alone.optimizer.variables],
        [*ours.model.variables, *ours.optimizer.variables],
        strict=True,
    )
    for one, other in pairs:
        np.testing.assert_array_equal(one.numpy(), other.numpy(), other.path)

    two = build_divided(adam, 2)
    checkpoints = tmg.Checkpoints(tmp_path / "steps", model=two.model, optimizer=two.optimizer)
    assert checkpoints.restore() == len(SIZES)
    np.testing.assert_equal(two.values(), ours.values())
    two.model.set_weights([np.zeros_like(value) for value in two.model.get_weights()])
    ours.model.save_weights(tmp_path / "table.weights.h5")
    two.model.load_weights(tmp_path / "table.weights.h5")
    np.testing.assert_equal(two.values(), ours.values())


# Fails if evaluation or prediction reads a part by ids of the table.
def test_evaluation_and_predictions_are_those_of_one_device() -> None:
    (ours, _), (plain, _) = trained(), truth()
    predicted = tmg.predict(ours.model, dataset_of(batches, batches()[0]))
    np.testing.assert_allclose(predicted, plain.model(ITEMS).numpy(), rtol=1e-7, atol=1e-12)


# Fails if an optimizer updates each part by itself, of which the norm of the table decides.
def test_an_optimizer_that_needs_the_whole_table_is_refused() -> None:
    ours = build_divided(optimizers.Lamb, 2)
    with pytest.raises(tmg.TfMultiGpuError, match=r"Lamb for '.*embeddings'[\s\S]*Adam\(\)"):
        step_of(ours, 2)(batches()[0])
