"""Strategies are created on the devices named, one after the other, or the reason is said."""

from __future__ import annotations

import logging
import socket
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf
import tpu_processes
from each import each
from law.processes import pool, unused_addresses

from tfmultigpu.errors import (
    ClusterError,
    DeviceNotFoundError,
    StrategyFallbackWarning,
    StrategyUnavailableError,
)
from tfmultigpu.strategies.factory import create_strategy, plan_strategy


@pytest.fixture(autouse=True)
def _nothing_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TF_CONFIG", "TPU_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield one.getsockname()[1]  # Bound and not listening: connecting is refused.


def sums(strategy: tf.distribute.Strategy) -> list[float]:
    """The ranks, from 1, added over the replicas and assigned: eagerly, and in a tf.function."""
    with strategy.scope():
        total = tf.Variable(tf.zeros([3]))

    def replica() -> Any:
        context = tf.distribute.get_replica_context()
        rank = tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0
        added = context.all_reduce(tf.distribute.ReduceOp.SUM, [tf.fill([3], rank), rank])
        total.assign_add(added[0])
        return added[1]

    @tf.function
    def compiled() -> Any:
        return strategy.run(replica)

    found = []
    for call in (lambda: strategy.run(replica), compiled):
        found += [float(one) for one in strategy.experimental_local_results(call())]
    for copy in strategy.experimental_local_results(total):
        found += [float(one) / 2.0 for one in copy.numpy()]
    return found


def triangle(count: int) -> float:
    return count * (count + 1) / 2


# What is created -------------------------------------------------------------------------------


@each(
    ("communication", "count"),
    [
        ("auto", 3),
        ("one_device", 3),
        ("hierarchical_copy", 4),
        ("hierarchical_copy", 6),
    ],
)
def test_every_way_to_add_gives_the_sum(communication: str, count: int) -> None:
    strategy = create_strategy(devices=count, communication=communication)
    assert set(sums(strategy)) == {triangle(count)}


@each("count", [3, 5])
def test_tensorflows_hierarchical_copy_still_loses_the_last_of_an_odd_number(count: int) -> None:
    """Why it is declined there; when this fails, TensorFlow has mended it."""
    stock = tf.distribute.MirroredStrategy(
        [f"CPU:{index}" for index in range(count)], tf.distribute.HierarchicalCopyAllReduce()
    )
    assert set(sums(stock)) == {triangle(count - 1)}
    with pytest.warns(StrategyFallbackWarning, match="leaves out the gradients of the last"):
        ours = create_strategy(devices=count, communication="hierarchical_copy")
    assert set(sums(ours)) == {triangle(count)}


def test_auto_without_a_gpu_is_the_cpu_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("needs a machine without a GPU")
    with caplog.at_level(logging.WARNING, "tfmultigpu"):
        strategy = create_strategy()
    assert isinstance(strategy, tf.distribute.OneDeviceStrategy)
    assert strategy.extended.worker_devices[0].endswith("CPU:0")
    (record,) = caplog.records
    assert record.getMessage().startswith("Training runs on CPU:0, without a GPU: ")


@each("value", ["", "-1", "7"])
def test_the_variable_that_hides_gpus_is_in_every_message(
    value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("needs a machine without a GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    said = f"CUDA_VISIBLE_DEVICES={value!r}"
    cure = "unset it before Python starts"
    plan = plan_strategy()
    assert said in plan.reason
    messages = [str(plan), str(plan_strategy("mirrored"))]
    with caplog.at_level(logging.WARNING, "tfmultigpu"):
        create_strategy()
    messages.append(caplog.text)
    for request in ({"devices": 2, "communication": "nccl"},):
        with pytest.warns(StrategyFallbackWarning) as warned:
            create_strategy(**request)
        messages.append(str(warned[0].message))
        with pytest.raises(StrategyUnavailableError) as refused:
            create_strategy(**request, fallback=False)
        messages.append(str(refused.value))
    for devices in (["GPU:0"], 99):
        with pytest.raises(DeviceNotFoundError) as missing:
            create_strategy(devices=devices)
        messages.append(str(missing.value))
    assert [one for one in messages if said not in one or cure not in one] == []


# What is refused -------------------------------------------------------------------------------


def test_what_cannot_be_had_warns_or_raises() -> None:
    with pytest.warns(StrategyFallbackWarning) as caught:
        strategy = create_strategy(devices=2, communication="nccl")
    (warning,) = caught
    assert str(warning.message).startswith(
        "Requested but unavailable on this machine: communication='nccl': NCCL runs on GPUs only, "
        "and these are CPUs"
    )
    assert str(warning.message).endswith(
        " Running mirrored on CPU:0, CPU:1, gradients added by one_device instead. Pass "
        "fallback=False to get an error."
    )
    assert warning.filename == __file__
    assert set(sums(strategy)) == {3.0}
    with pytest.raises(StrategyUnavailableError) as refused:
        create_strategy(devices=2, communication="nccl", fallback=False)
    assert "NCCL runs on GPUs only" in str(refused.value)
    assert "fallback=True to run mirrored on CPU:0, CPU:1" in str(refused.value)


def test_a_wrong_cluster_is_an_error_even_with_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a"]}}')
    for call in (plan_strategy, create_strategy):
        with pytest.raises(ClusterError, match="TF_CONFIG"):
            call()
    # It is no business of a strategy on devices of this machine.
    assert create_strategy(prefer="mirrored", devices=2).num_replicas_in_sync == 2


def test_the_evaluator_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 0}}'
    monkeypatch.setenv("TF_CONFIG", text)
    plan = plan_strategy(prefer="multi_worker")
    assert plan.rejected["multi_worker"].startswith("this process is the evaluator")
    assert create_strategy().num_replicas_in_sync == plan.num_replicas


def test_a_worker_after_tensorflow_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tf.zeros([])
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
    monkeypatch.setenv(
        "TF_CONFIG",
        f'{{"cluster": {{"worker": ["{address}"]}}, "task": {{"type": "worker", "index": 0}}}}',
    )
    with pytest.raises(ClusterError, match="TensorFlow had started its devices before") as caught:
        create_strategy(prefer="multi_worker")
    assert "Move create_strategy up, directly after the imports" in str(caught.value)
    assert create_strategy().num_replicas_in_sync == 1  # One worker alone needs no cluster.


# TPU -------------------------------------------------------------------------------------------


def test_a_dead_tpu_falls_back_within_seconds(
    monkeypatch: pytest.MonkeyPatch, closed_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TPU_NAME", f"grpc://127.0.0.1:{closed_port}")
    with pytest.warns(StrategyFallbackWarning, match="nothing answers there"):
        create_strategy(prefer="tpu")
    with pytest.raises(StrategyUnavailableError, match="nothing answers there"):
        create_strategy(prefer="tpu", fallback=False)
    # Not asked for in the program: a log line, no warning.
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "tfmultigpu"):
        warnings.simplefilter("error")
        create_strategy()
    assert f"No TPU: TPU_NAME='grpc://127.0.0.1:{closed_port}': nothing answers" in caplog.text


# In a process of its own -----------------------------------------------------------------------


@pytest.mark.slow
def test_planning_starts_nothing_and_a_grpc_server_is_no_tpu() -> None:
    """A TPU address that is TensorFlow without a TPU: TensorFlow connects, so no way back."""
    (address,) = unused_addresses(1)
    server, program = pool().start(), pool().start()
    server.call(tpu_processes.serve, address)
    said = program.call(tpu_processes.error_of_a_tpu_at, address)
    assert "answers, but TensorFlow finds no TPU there" in said
    assert "Correct TPU_NAME, or unset it, and start again." in said
    for worker in (server, program):
        worker.end()
