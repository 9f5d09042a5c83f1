"""Checkpoints of two workers: resumed to the bit, on one process too; folders that go wrong."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import this_worker
from law.pair import strategy_of
from problems import network, normal_rows

import tfmultigpu as tmg

pytestmark = pytest.mark.slow
X, Y = normal_rows(22, 4, 1)


def build(strategy: Any) -> tuple[Any, Any]:
    """Returns a model whose statistics differ between the workers, and its optimizer."""
    layers = keras.layers
    keras.utils.set_random_seed(1)
    with strategy.scope():
        hidden = [layers.Dense(3, use_bias=False), layers.BatchNormalization(), layers.Dropout(0.3)]
        model = network(4, *hidden, layers.Dense(1))
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer.build(model.trainable_variables)
    return model, optimizer


def train(folder: str, leave: int | None = None) -> tuple[int | None, list[np.ndarray]]:
    """Trains from the newest checkpoint on; returns its step and all variables at the end."""
    model, optimizer = build(this_worker.strategy())
    warnings.simplefilter("ignore", tmg.ReplicaDependenceWarning)
    step = tmg.make_train_step(model, optimizer, "mse", this_worker.strategy())
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(22, seed=3)
    checkpoints = tmg.Checkpoints(folder, model, optimizer, rows.batch(4))
    restored = checkpoints.restore()
    for _ in checkpoints.epochs(3):
        for batch in checkpoints.data:
            step(batch)
            checkpoints.after_step()
            if checkpoints.step == leave:
                checkpoints.save()
                return restored, model.get_weights()
    return restored, [v.numpy() for v in [*model.variables, *optimizer.variables]]


def test_a_run_resumes_to_the_bit_on_each_worker_and_on_one_process(
    both: Any, tmp_path: Path
) -> None:
    whole = both(train, str(tmp_path / "whole"))
    left = both(train, str(tmp_path / "left"), 8)
    resumed = both(train, str(tmp_path / "left"))
    for (_, expected), (restored, values) in zip(whole, resumed, strict=True):
        assert restored == 8
        np.testing.assert_equal(values, expected)
    strategy = strategy_of(2)
    model, optimizer = build(strategy)
    assert tmg.Checkpoints(tmp_path / "left", model, optimizer).restore() == 8
    copies = strategy.experimental_local_results(model.variables[3].value)
    statistics = np.stack([weights[3] for _, weights in left])
    assert (statistics[0] != statistics[1]).any()
    np.testing.assert_array_equal(np.stack([copy.numpy() for copy in copies]), statistics)


def save_where_it_fails(folder: str) -> tuple[str, str]:
    """Returns what is said of folders that are not shared, and of one that is not to be had."""
    model, optimizer = build(this_worker.strategy())
    optimizer.iterations.assign(3)
    own = f"{folder}/own-{this_worker.index()}"
    tmg.Checkpoints(own, model, optimizer).save()
    optimizer.iterations.assign(4)
    with pytest.raises(tmg.CheckpointError) as not_shared:
        tmg.Checkpoints(own, model, optimizer).restore()
    assert optimizer.iterations.numpy() == 4
    with pytest.raises(tmg.CheckpointError) as failed:
        tmg.Checkpoints(f"{folder}/file/run", model).save()
    return str(not_shared.value), str(failed.value)


def test_folders_that_cannot_be_saved_to_are_an_error_on_both(both: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = both(save_where_it_fails, str(tmp_path))
    for not_shared, _ in told:
        assert "different checkpoints in " in not_shared
        assert re.search(r"step of each worker: \[3, -1\]\. Give", not_shared)
    assert "The chief cannot save step" in told[0][1]
    assert "Not a directory" in told[0][1]
    assert "see the output of the chief" in told[1][1]


def fit_until_a_callback_ends_it(folder: str) -> list[Any]:
    """Fits twice, of which the second one resumes; the chief has one callback more."""
    found = []
    for _ in range(2):
        model, optimizer = build(this_worker.strategy())
        model.compile(optimizer, "mse")
        run = tmg.Checkpoints(f"{folder}/ended", model, optimizer)
        run.restore()
        stopping = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9)
        logger = [keras.callbacks.CSVLogger(f"{folder}/ended.csv")][this_worker.index() :]
        callbacks = [stopping, *logger, run.callback()]
        fitted = tmg.fit(model, (X, Y), epochs=5, callbacks=callbacks, verify=False, verbose=0)
        found.append((fitted.epoch, [weight.tolist() for weight in model.get_weights()]))
    return found


def test_a_run_that_a_callback_ended_is_over_on_both(both: Any, tmp_path: Path) -> None:
    for first, again in both(fit_until_a_callback_ends_it, str(tmp_path)):
        assert again == first
        assert first[0] == [0, 1]
