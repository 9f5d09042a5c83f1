"""Several processes train as one device does; one that is lost or wrong is an error, no hang."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from law import worker_functions
from law.pair import strategy_of
from law.processes import (
    SECONDS,
    Worker,
    WorkerRaised,
    call_all,
    pool,
    tf_config,
    unused_addresses,
    wait_until_printed,
)


@pytest.fixture(scope="module")
def pair() -> Any:
    """Two workers that have joined and stay."""
    workers = pool().cluster(2)
    assert call_all(workers, worker_functions.join) == [2, 2]
    yield workers
    for worker in workers:
        worker.end()


def assert_equal_bits(results: list[list[np.ndarray]]) -> None:
    for first, *others in zip(*results, strict=True):
        for other in others:
            np.testing.assert_array_equal(other, first)


# Fails if workers add something twice or not at all, draw other numbers than their rows of those of
# one device, normalise by their own rows, or count a batch of one row on each of them.
def test_everything_at_once(pair: list[Worker]) -> None:
    assert_equal_bits(call_all(pair, worker_functions.everything_at_once))


# Fails if what the optimizer clips is each worker's part, or nothing: workers add gradients by
# collectives, which is another way through the code than that of one process.
def test_clipping_set_on_the_optimizer_and_shares(pair: list[Worker]) -> None:
    assert_equal_bits(call_all(pair, worker_functions.clipping_set_on_the_optimizer))


# Fails if the rows of an id on two workers are not added, or go to other rows or to one worker.
@pytest.mark.parametrize("optimizer", ["adagrad", pytest.param("adam", marks=pytest.mark.more)])
def test_tables_of_embeddings(pair: list[Worker], optimizer: str) -> None:
    assert_equal_bits(call_all(pair, worker_functions.table, optimizer))


# Fails if a loop over batches, of which each has another number of ids, sends lists of one length.
def test_tables_of_embeddings_in_fit(pair: list[Worker]) -> None:
    assert_equal_bits(call_all(pair, worker_functions.table_in_fit))


# Fails if a worker draws by its own count of rows or passes, or reads rows of another one.
def test_each_worker_preprocesses_its_own_rows(pair: list[Worker]) -> None:
    alone = worker_functions.preprocessed(strategy_of(1))
    first, second = call_all(pair, worker_functions.preprocessed)
    assert sorted(first + second) == sorted(alone)
    assert len(set(alone)) == 2 * 16


# Fails if the History, evaluation or predictions are those of one worker's rows, or if a checkpoint
# holds another state than was saved.
def test_fit_evaluate_predict_and_checkpoints(pair: list[Worker], tmp_path: Path) -> None:
    results = call_all(pair, worker_functions.loops, str(tmp_path))
    assert_equal_bits([result["weights"] for result in results])
    assert results[0]["history"] == results[1]["history"]


def training_workers() -> list[Worker]:
    workers = pool().cluster(2)
    call_all(workers, worker_functions.join)
    for worker in workers:
        worker.begin(worker_functions.train_until_alone)
    wait_until_printed("trains", *workers)
    return workers


# Fails if the survivor waits, or gets an error that does not say which worker it waits for.
def test_a_killed_worker_is_named_to_the_other() -> None:
    survivor, killed = training_workers()
    killed.send_signal(signal.SIGKILL)
    with pytest.raises(WorkerRaised) as raised:
        survivor.result(60.0)
    assert raised.value.kinds[0] == "WorkerLostError", raised.value.text
    assert "worker 1 of 2" in raised.value.text
    assert killed.wait() == -signal.SIGKILL
    survivor.end()
    survivor.wait()


# Fails if Ctrl-C on one worker leaves the other one waiting, or is swallowed.
def test_an_interrupt_of_one_worker_ends_both() -> None:
    interrupted, other = training_workers()
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.wait(60.0) != 0
    with pytest.raises(WorkerRaised) as raised:
        other.result(60.0)
    assert raised.value.kinds[0] == "WorkerLostError", raised.value.text
    other.end()
    other.wait()


# Fails if a worker waits for one that never starts, or does not say where it should be.
def test_a_worker_that_never_starts_is_named() -> None:
    addresses = unused_addresses(2)
    worker = pool().start(TF_CONFIG=tf_config(addresses, 0))
    with pytest.raises(WorkerRaised) as raised:
        worker.call(worker_functions.join, 2.0)
    assert raised.value.kinds[0] == "ClusterError", raised.value.text
    assert addresses[1] in raised.value.text
    worker.end()


# Fails if workers that were told different clusters meet nevertheless, or wait for one another.
def test_workers_that_disagree_are_told() -> None:
    first, second, third = unused_addresses(3)
    workers = [
        pool().start(TF_CONFIG=tf_config([first, second], 0)),
        pool().start(TF_CONFIG=tf_config([first, second, third], 1)),
    ]
    for worker in workers:
        worker.begin(worker_functions.join, 5.0)
    for worker in workers:
        with pytest.raises(WorkerRaised) as raised:
            worker.result(60.0)
        assert raised.value.kinds[0] == "ClusterError", raised.value.text
        worker.end()


def cluster(task: Any = None, **more: Any) -> str:
    addresses = ["127.0.0.1:2222", "127.0.0.1:2223"]
    task = {"type": "worker", "index": 0} if task is None else task
    return json.dumps({"cluster": {"worker": addresses}, "task": task} | more)


# Fails if a TF_CONFIG that TensorFlow takes for one machine, or hangs on, is accepted, or if the
# error does not name what is wrong in it.
def test_a_wrong_configuration_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        own = f"127.0.0.1:{taken.getsockname()[1]}"
        facts = {
            "{": "JSON",
            "[1, 2]": "TF_CONFIG",
            "{}": "cluster",
            cluster(task={"type": "worker", "index": 2}): "2",
            cluster(task={"type": "worker", "index": -1}): "-1",
            cluster(task={"type": "worker"}): "index",
            cluster(cluster={"worker": ["127.0.0.1", "127.0.0.1:2223"]}): "127.0.0.1",
            cluster(cluster={"worker": ["http://a:1", "127.0.0.1:2223"]}): "http://a:1",
            cluster(cluster={"worker": ["127.0.0.1:2222"] * 2}): "127.0.0.1:2222",
            cluster(cluster={"worker": [own, "127.0.0.1:2223"]}): own,
        }
        worker = pool().start()
        errors = worker.call(worker_functions.errors_of_configurations, list(facts))
        worker.end()
    wrong = [
        (configuration, fact, error)
        for (configuration, fact), error in zip(facts.items(), errors, strict=True)
        if error[0] != "ClusterError" or fact not in error[1]
    ]
    assert not wrong


# Fails if the launcher takes models that never met for one training.
@pytest.mark.more
def test_the_launcher_tells_that_a_script_never_joined(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("import tensorflow as tf\nimport tfmultigpu\nprint(tf.constant(1) + 1)\n")
    launch = [sys.executable, "-m", "tfmultigpu", "launch", "--workers", "2", str(script)]
    ended = subprocess.run(launch, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert ended.returncode != 0 or "create_strategy" in ended.stdout + ended.stderr
