"""Strategies are created on the devices named, one after the other, or the reason is said.

What was planned is created, and what is missing warns or raises: tests/promises/test_strategies.py.
"""

from __future__ import annotations

import json
import logging
import socket
import warnings
from typing import Any

import pytest
import tensorflow as tf
from law.processes import tf_config, unused_addresses

from tfmultigpu.errors import (
    ClusterError,
    DeviceNotFoundError,
    StrategyFallbackWarning,
    StrategyUnavailableError,
)
from tfmultigpu.strategies import factory
from tfmultigpu.strategies.factory import create_strategy, plan_strategy
from tfmultigpu.strategies.process_state import process_state

WITHOUT_A_GPU = pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="needs a machine without a GPU"
)


@pytest.fixture(autouse=True)
def _nothing_around(monkeypatch: pytest.MonkeyPatch) -> None:
    process_state.forget()  # The first strategy without a GPU says so.
    for name in ("TF_CONFIG", "TPU_NAME"):
        monkeypatch.delenv(name, raising=False)


def sums(strategy: tf.distribute.Strategy) -> set[float]:
    """The ranks, from 1, added over the replicas, as each of them has the sum."""

    def replica() -> Any:
        context = tf.distribute.get_replica_context()
        rank = tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0
        return context.all_reduce("SUM", [tf.fill([3], rank), rank])[1]

    return {float(one) for one in strategy.experimental_local_results(strategy.run(replica))}


@pytest.mark.parametrize("count", [3, 5])
def test_tensorflows_hierarchical_copy_still_loses_the_last_of_an_odd_number(count: int) -> None:
    """Why it is declined there; when this fails, TensorFlow has mended it."""
    stock = tf.distribute.MirroredStrategy(
        [f"CPU:{index}" for index in range(count)], tf.distribute.HierarchicalCopyAllReduce()
    )
    assert sums(stock) == {sum(range(count))}
    with pytest.warns(StrategyFallbackWarning, match="leaves out the gradients of the last"):
        ours = create_strategy(devices=count, communication="hierarchical_copy")
    assert sums(ours) == {sum(range(count + 1))}


def records_without_a_gpu(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The log lines that say that no GPU trains; the plan is another."""
    return [record for record in caplog.records if "without a GPU" in record.getMessage()]


# What is said ----------------------------------------------------------------------------------


@WITHOUT_A_GPU
def test_auto_without_a_gpu_is_the_cpu_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tfmultigpu"):
        strategy = create_strategy()
        create_strategy()
    assert isinstance(strategy, tf.distribute.OneDeviceStrategy)
    assert strategy.extended.worker_devices[0].endswith("CPU:0")
    (record,) = records_without_a_gpu(caplog)  # Once in a process.
    assert record.levelname == "INFO"
    assert record.getMessage().startswith("Training runs on CPU:0, without a GPU: ")


# Fails if a worker of several reads as a program that trains alone.
@WITHOUT_A_GPU
def test_a_worker_says_which_it_is_and_how_many_replicas_there_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TF_CONFIG", tf_config(["a:2222", "b:2222", "c:2222"], 1))
    alone = tf.distribute.OneDeviceStrategy("CPU:0")
    monkeypatch.setattr(factory, "_join", lambda *_: alone)
    with caplog.at_level(logging.INFO, "tfmultigpu"):
        create_strategy()
    (record,) = records_without_a_gpu(caplog)
    assert record.getMessage().startswith(
        "Training runs on CPU:0 of worker 1 of 3 at b:2222 (TF_CONFIG), 3 replicas in all, without"
    )


@WITHOUT_A_GPU
@pytest.mark.parametrize("value", ["", "-1", "7"])
def test_the_variable_that_hides_gpus_is_in_every_message(
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    subtests: pytest.Subtests,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    plan = plan_strategy()
    messages = [plan.reason, str(plan), str(plan_strategy("mirrored"))]
    with caplog.at_level(logging.INFO, "tfmultigpu"):
        create_strategy()
    messages += [record.getMessage() for record in records_without_a_gpu(caplog)]
    nccl: dict[str, Any] = {"devices": 2, "communication": "nccl"}
    with pytest.warns(StrategyFallbackWarning) as warned:
        create_strategy(**nccl)
    messages.append(str(warned[0].message))
    for request in ({**nccl, "fallback": False}, {"devices": ["GPU:0"]}, {"devices": 99}):
        with subtests.test(request=request):
            with pytest.raises((StrategyUnavailableError, DeviceNotFoundError)) as refused:
                create_strategy(**request)
            messages.append(str(refused.value))
    said, cure = f"CUDA_VISIBLE_DEVICES={value!r}", "unset it before Python starts"
    assert [one for one in messages if said not in one or cure not in one] == []


def test_what_cannot_be_had_is_at_the_line_of_the_user_with_what_runs_instead() -> None:
    with pytest.warns(StrategyFallbackWarning) as caught:
        create_strategy(devices=2, communication="nccl")
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
    said = "NCCL runs on GPUs only.*fallback=True to run mirrored on CPU:0, CPU:1"
    with pytest.raises(StrategyUnavailableError, match=said):
        create_strategy(devices=2, communication="nccl", fallback=False)


# Clusters --------------------------------------------------------------------------------------


def test_a_wrong_cluster_is_an_error_even_with_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a"]}}')
    for call in (plan_strategy, create_strategy):
        with pytest.raises(ClusterError, match="TF_CONFIG"):
            call()
    # It is no business of a strategy on devices of this machine.
    assert create_strategy(prefer="mirrored", devices=2).num_replicas_in_sync == 2


def test_the_evaluator_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    plan = plan_strategy(prefer="multi_worker")
    assert plan.rejected["multi_worker"].startswith("this process is the evaluator")
    assert create_strategy().num_replicas_in_sync == plan.num_replicas


def test_a_worker_after_tensorflow_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tf.zeros([])
    monkeypatch.setenv("TF_CONFIG", tf_config(unused_addresses(1), 0))
    said = r"TensorFlow had started its devices before.*Move create_strategy up, directly after the"
    with pytest.raises(ClusterError, match=said):
        create_strategy(prefer="multi_worker")
    assert create_strategy().num_replicas_in_sync == 1  # One worker alone needs no cluster.


# TPU -------------------------------------------------------------------------------------------


def test_a_dead_tpu_falls_back_within_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as closed, warnings.catch_warnings():
        warnings.simplefilter("error")
        closed.bind(("127.0.0.1", 0))  # Bound and not listening: connecting is refused.
        address = f"grpc://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("TPU_NAME", address)
        with pytest.warns(StrategyFallbackWarning, match="nothing answers there"):
            create_strategy(prefer="tpu")
        with pytest.raises(StrategyUnavailableError, match="nothing answers there"):
            create_strategy(prefer="tpu", fallback=False)
        # Not asked for in the program: a log line, no warning.
        with caplog.at_level(logging.WARNING, "tfmultigpu"):
            create_strategy()
    assert f"No TPU: TPU_NAME='{address}': nothing answers" in caplog.text
