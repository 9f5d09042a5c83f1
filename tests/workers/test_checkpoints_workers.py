"""Checkpoints of two workers: resumed to the bit, on one process too; folders that go wrong."""

from __future__ import annotations

import re
import time
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import this_worker
from law import worker_functions
from law.pair import strategy_of
from law.processes import pool
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


def save_where_it_fails(folder: str) -> str:
    """Returns what is said of a folder that is not to be had."""
    model, _ = build(this_worker.strategy())
    with pytest.raises(tmg.CheckpointError) as failed:
        tmg.Checkpoints(f"{folder}/file/run", model).save()
    return str(failed.value)


def test_a_folder_that_cannot_be_saved_to_is_an_error_on_both(both: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    chief, other = both(save_where_it_fails, str(tmp_path))
    assert "The chief cannot save step" in chief
    assert "Not a directory" in chief
    assert "see the output of the chief" in other


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


def rows_of_a_worker(kind: str, service: str) -> tf.data.Dataset:
    """Returns data that is not the same on each worker, though it is if one trains alone."""
    rows = tf.data.Dataset.from_tensor_slices((X, Y))
    workers = this_worker.strategy().num_replicas_in_sync
    if kind == "files by worker":
        rows = rows.shard(workers, this_worker.index())
    if kind == "a shuffle without a seed":
        tf.random.set_seed(time.monotonic_ns())  # As in a program that sets none.
        rows = rows.shuffle(22)
    rows = rows.batch(4)
    if kind == "tf.data service":
        policy = tf.data.experimental.service.ShardingPolicy.DYNAMIC
        job = f"of {workers}"  # Shared by all consumers of one start.
        read = tf.data.experimental.service.distribute(policy, service, job_name=job)
        rows = rows.apply(read)
    return rows


def train_on_own_rows(folder: str, kind: str, service: str, leave: int | None = None) -> list[int]:
    """Trains from the newest checkpoint on; returns the steps that were made."""
    model, optimizer = build(this_worker.strategy())
    step = tmg.make_train_step(model, optimizer, "mse", this_worker.strategy(), logical_replicas=2)
    data = rows_of_a_worker(kind, service)
    checkpoints = tmg.Checkpoints(folder, model, optimizer, data)
    checkpoints.restore()
    steps = []
    for _ in checkpoints.epochs(2):
        for batch in checkpoints.data:
            step(batch)
            checkpoints.after_step()
            steps.append(checkpoints.step)
            print("STEP", checkpoints.step, flush=True)
            if checkpoints.step == leave:
                checkpoints.save()
                return steps
    return steps


def resume_on_own_rows(folder: str, kind: str, service: str) -> None:
    worker_functions.join()
    train_on_own_rows(folder, kind, service)


# Fails if a worker that joins a run trains on other rows than the run would have had.
@pytest.mark.parametrize("kind", ["files by worker", "a shuffle without a seed", "tf.data service"])
def test_rows_of_a_worker_are_refused_before_a_step_if_their_number_changes(
    kind: str, tmp_path: Path
) -> None:
    dispatcher = tf.data.experimental.service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    config = tf.data.experimental.service.WorkerConfig(dispatcher_address=address)
    server = tf.data.experimental.service.WorkerServer(config)
    assert train_on_own_rows(str(tmp_path), kind, dispatcher.target, leave=2) == [1, 2]
    workers = pool().cluster(2)
    for worker in workers:
        arguments = str(tmp_path), kind, dispatcher.target
        worker.begin(this_worker.run_as_program, resume_on_own_rows, *arguments)
    assert [worker.wait() for worker in workers] == [1, 1]
    told = "".join(worker.printed() for worker in workers)
    assert "STEP" not in told, told
    # A worker to which the service has given no rows yet has fewer batches.
    refusals = "DataError: The workers read different data|CheckpointError: The data (differs|has)"
    assert re.search(refusals, told), told
    del server
