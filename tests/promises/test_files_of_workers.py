"""Several workers do not write one file, and one of them makes no call alone: lines that help."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law import file_functions, worker_functions
from law.processes import Worker, WorkerRaised, call_all, pool

import tfmultigpu as tmg

CLOSE = {"rtol": 1e-6, "atol": 1e-8}  # The losses of `compile` are float32.


@pytest.fixture(scope="module")
def pair() -> Any:
    """Two workers that have joined and stay."""
    workers = pool().cluster(2)
    assert call_all(workers, worker_functions.join) == [2, 2]
    yield workers
    for worker in workers:
        worker.end()


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Keras gives on one device: the weights after each epoch, and the losses."""
    weights: dict[str, Any] = {}
    model = file_functions.compiled()

    def keep(epoch: int, logs: Any) -> None:
        weights[f"{epoch + 1}"] = model.get_weights()

    keep_all = keras.callbacks.LambdaCallback(on_epoch_end=keep)
    x, y = file_functions.data()
    options = {"batch_size": 4, "epochs": file_functions.EPOCHS, "shuffle": False, "verbose": 0}
    weights["loss"] = model.fit(x, y, callbacks=[keep_all], **options).history["loss"]
    return weights


def assert_close(values: Any, expected: Any) -> None:
    for value, truth in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, truth, **CLOSE)


# Fails if a callback of Keras or of a user writes to one path on both workers, by whichever name;
# if one worker alone raises, something is written or trained before, or a line of the message does
# not give the files of one device, once each.
def test_one_path_on_two_workers_is_an_error_whose_lines_help(
    pair: list[Worker], tmp_path: Path, one_device: dict[str, Any]
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "new").mkdir()
    first, second = call_all(pair, file_functions.one_path_for_all, str(tmp_path))
    assert first.keys() == second.keys()
    for errors in (first, second):
        for name, error in errors.items():
            assert "workers 0, 1 write to one path" in error, name
    assert "ModelCheckpoint with filepath=" in first["{epoch}.keras"]
    assert "CSVLogger with filename='losses.csv'" in second["relative"]
    assert "Writes with log_dir=" in second["of a user"]
    assert "all.csv" in first["one of two"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "new"]

    weights, others = call_all(
        pair, file_functions.run_the_lines, str(tmp_path), first["{epoch}.keras"]
    )
    assert not [error for error in (weights, others) if isinstance(error, str)]
    assert_close(weights, one_device["2"])
    assert_close(others, one_device["2"])
    for epoch in ("1", "2"):
        for name in (f"{epoch}.keras", f"alone-{epoch}.keras"):
            assert_close(keras.saving.load_model(tmp_path / name).get_weights(), one_device[epoch])
        model = file_functions.compiled()
        model.load_weights(tmp_path / f"{epoch}.weights.h5")
        assert_close(model.get_weights(), one_device[epoch])
    with (tmp_path / "losses.csv").open() as file:
        assert_close([float(row["loss"]) for row in csv.DictReader(file)], one_device["loss"])
    events = [path for path in (tmp_path / "events").rglob("*") if path.is_file()]
    assert len(events) == 1, "of the first worker alone"
    assert all((tmp_path / name / "losses.csv").exists() for name in ("first", "second"))


# Fails if the first worker alone begins to save a model with a variable that all workers have to
# read, which ends in an error of TensorFlow; or if the way for all saves another sum.
def test_a_model_that_all_workers_have_to_save(pair: list[Worker], tmp_path: Path) -> None:
    first, second = call_all(pair, file_functions.saved_by_all, str(tmp_path))
    for result in (first, second):
        assert (
            "ModelCheckpoint on workers 0 of 2, and variables saved/counts_rows/rows"
            in (result["error"])
        )
        assert_close(result["read"], result["weights"])
    rows = float(file_functions.ROWS * file_functions.EPOCHS)
    assert rows in [float(weight) for weight in first["weights"] if weight.ndim == 0]

    kinds = {"CountsRows": file_functions.CountsRows}
    for name in ("model.keras", "after.keras"):
        read = keras.saving.load_model(tmp_path / name, custom_objects=kinds)
        assert_close(read.get_weights(), first["weights"])
    model = file_functions.compiled(file_functions.CountsRows(dtype="float64"))
    model.load_weights(tmp_path / "after.weights.h5")
    assert_close(model.get_weights(), first["weights"])
    x, _ = file_functions.data()
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    assert_close(exported.serve(x), model(x))


# Fails if a worker whose last call the others do not make is told to start all again, which would
# end in the same way. The pair is over after it.
def test_a_last_call_of_one_worker_is_not_to_be_started_again(pair: list[Worker]) -> None:
    call_all(pair, file_functions.keep_a_model)
    caller, ended = pair
    ended.end()
    assert ended.wait() == 0
    with pytest.raises(WorkerRaised) as raised:
        caller.call(file_functions.evaluate_it)
    assert raised.value.kinds[0] == "WorkerLostError", raised.value.text
    assert "worker 1 of 2" in raised.value.text
    assert "Every worker must make this call" in raised.value.text
    assert "Start all workers again" not in raised.value.text


# Fails if a program that trains alone is given another path, or is not the first of its workers.
def test_alone_a_process_is_the_first_worker() -> None:
    assert tmg.workers.is_first()
    assert tmg.workers.own_path(Path("folder/{epoch}.keras")) == "folder/{epoch}.keras"
