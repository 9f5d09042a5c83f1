"""An address is known to be dead in seconds, before TensorFlow waits for it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

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
