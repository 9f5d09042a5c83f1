"""An address is known to be dead in seconds, before TensorFlow waits for it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from each import each

from tfmultigpu.strategies.tpu import find_tpu, probe_address


@contextlib.contextmanager
def server(answer: bytes | None) -> Iterator[int]:
    """Something that listens, and answers so, or never."""
    held: list[socket.socket] = []

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                held.append(connection)
                if answer is not None:
                    connection.recv(64)
                    connection.sendall(answer)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in held:
        connection.close()


def closed_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_a_grpc_server_answers() -> None:
    with server(b"\x00\x00\x00\x04\x00\x00\x00\x00\x00") as port:
        assert probe_address("127.0.0.1", port, timeout=30.0) is None
        tpu = find_tpu({"TPU_NAME": f"grpc://127.0.0.1:{port}"})
        assert (tpu.address, tpu.source, tpu.missing) == (
            f"grpc://127.0.0.1:{port}",
            "TPU_NAME",
            None,
        )


def test_another_program_is_no_tpu() -> None:
    with server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        problem = probe_address("127.0.0.1", port, timeout=30.0)
    assert problem == "a program answers there that does not speak gRPC"


def test_a_closed_port_is_named() -> None:
    port = closed_port()
    tpu = find_tpu({"COLAB_TPU_ADDR": f"127.0.0.1:{port}"})
    assert tpu.missing == f"COLAB_TPU_ADDR='127.0.0.1:{port}': nothing listens there"
    assert tpu.address == f"grpc://127.0.0.1:{port}"


def test_a_silent_program_costs_the_timeout_and_no_more() -> None:
    with server(None) as port:
        start = time.monotonic()
        problem = probe_address("127.0.0.1", port, timeout=2.0)
        assert time.monotonic() - start > 1.9
    assert problem is not None
    assert problem.startswith("no answer")


def test_a_name_that_does_not_resolve() -> None:
    problem = probe_address("no-such-host.invalid", 8470, timeout=2.0)
    assert problem in ("the name does not resolve", "no answer within 2 s")


@each("local", [0, 8])
def test_where_tpus_are_looked_for(local: int) -> None:
    unnamed = find_tpu({}, local=local)
    named = find_tpu({"TPU_NAME": "local"}, local=local)
    if local:
        assert (unnamed.address, unnamed.missing) == ("local", None)
        assert (named.address, named.missing) == ("local", None)
    else:
        assert "TPU_NAME and COLAB_TPU_ADDR are not set" in str(unnamed.missing)
        assert named.missing == "TPU_NAME='local', but this machine has no TPU device"


def test_an_address_in_the_program_comes_before_the_environment() -> None:
    port = closed_port()
    tpu = find_tpu({"TPU_NAME": "local"}, address=f"grpc://127.0.0.1:{port}")
    assert tpu.source == "devices"
    assert str(tpu.missing).endswith("nothing listens there")
