"""An address is known to be dead in seconds, before TensorFlow waits for it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import tensorflow as tf
from law.processes import pool, unused_addresses

import tfmultigpu as tmg
from tfmultigpu.devices.configure import devices_started
from tfmultigpu.strategies.tpu import Tpu, find_tpu


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    """A socket with a port; connecting is refused until it listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield one


def test_an_address_answers_or_is_named(bound: socket.socket) -> None:
    address = f"grpc://127.0.0.1:{bound.getsockname()[1]}"
    dead = find_tpu({"TPU_NAME": address.removeprefix("grpc://")})
    assert dead.address == address
    assert str(dead.missing).startswith(f"TPU_NAME='{address[7:]}': nothing answers there")
    bound.listen()
    assert find_tpu({"TPU_NAME": address}) == Tpu(address, None)


def test_a_name_costs_the_timeout_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *_: threading.Event().wait())
    start = time.monotonic()
    tpu = find_tpu({"TPU_NAME": "my-tpu"}, timeout=0.5)
    assert time.monotonic() - start < 30
    assert "only Google Cloud can look up" in str(tpu.missing)
    assert "no answer within 0.5 s" in str(tpu.missing)


# In processes: a server of TensorFlow without a TPU, and a program that meets it ------------------

_served = []


def serve(address: str) -> None:
    cluster = tf.train.ClusterSpec({"worker": [address]})
    _served.append(tf.distribute.Server(cluster, job_name="worker", task_index=0))


def error_of_a_tpu_at(address: str) -> str:
    """Plans, which must start nothing, and returns what creating a strategy raises."""
    before = dict(os.environ)
    for prefer in ("auto", "tpu", "multi_worker", "mirrored", "one_device"):
        tmg.plan_strategy(prefer)
    assert not devices_started()
    assert dict(os.environ) == before
    os.environ["TPU_NAME"] = f"grpc://{address}"
    assert tmg.plan_strategy().kind == "tpu"
    try:
        tmg.create_strategy()
    except tmg.errors.StrategyUnavailableError as error:
        return str(error)
    raise AssertionError("no TPU is there")


@pytest.mark.slow
def test_planning_starts_nothing_and_a_grpc_server_is_no_tpu() -> None:
    """A TPU address that is TensorFlow without a TPU: TensorFlow connects, so no way back."""
    (address,) = unused_addresses(1)
    server, program = pool().start(), pool().start()
    server.call(serve, address)
    said = program.call(error_of_a_tpu_at, address)
    assert "answers, but TensorFlow finds no TPU there" in said
    assert "Correct TPU_NAME, or unset it, and start again." in said
    for worker in (server, program):
        worker.end()
