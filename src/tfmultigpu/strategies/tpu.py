"""Finding a TPU: its address is tried first, because TensorFlow waits minutes for a dead one."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

__all__ = ["Tpu", "connect_tpu", "find_tpu", "probe_address"]

_VARIABLES = ("TPU_NAME", "COLAB_TPU_ADDR")
_HOST_PORT = re.compile(r"(?:grpc://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_METADATA = ("metadata.google.internal", 80)
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_SETTINGS_FRAME = 4


class Tpu(NamedTuple):
    """Facts about a TPU, found without connecting TensorFlow.

    Attributes:
        address: ``"grpc://host:port"``, ``"local"``, a name in Google Cloud, or None.
        source: The source of the address, such as ``"TPU_NAME"``.
        missing: Why there is no TPU; None if one answers.
    """

    address: str | None
    source: str
    missing: str | None


def find_tpu(
    environ: Mapping[str, str], *, address: str | None = None, local: int = 0, timeout: float = 4.0
) -> Tpu:
    """Looks for a TPU: at the given address, in the environment, then on this machine.

    Args:
        environ: The environment variables; ``TPU_NAME`` and ``COLAB_TPU_ADDR`` are read.
        address: An address from the program, which replaces that of the environment.
        local: The number of TPU devices that TensorFlow lists on this machine.
        timeout: Seconds that the address may take to answer.

    Example:
        >>> find_tpu({}).missing
        'TPU_NAME and COLAB_TPU_ADDR are not set, and this machine has no TPU device'
    """
    sources = {"devices": address, **{name: environ.get(name) for name in _VARIABLES}}
    source, asked = next(((name, value) for name, value in sources.items() if value), ("", None))
    if asked is None:
        if local:
            return Tpu("local", "this machine", None)
        return Tpu(
            None, "", f"{' and '.join(_VARIABLES)} are not set, and this machine has no TPU device"
        )
    if asked == "local":
        missing = None if local else f"{source}='local', but this machine has no TPU device"
        return Tpu(asked, source, missing)
    match = _HOST_PORT.fullmatch(asked)
    if match is not None:
        host, port = match[1].strip("[]"), int(match[2])
        problem = probe_address(host, port, timeout)
        full = asked if asked.startswith("grpc://") else f"grpc://{asked}"
        return Tpu(full, source, problem and f"{source}={asked!r}: {problem}")
    problem = probe_address(*_METADATA, timeout, grpc=False)
    return Tpu(
        asked,
        source,
        problem
        and f"{source}={asked!r} is a name that only Google Cloud can look up, and this machine is "
        f"not there ({problem}); for an address write grpc://host:port",
    )


def probe_address(host: str, port: int, timeout: float, *, grpc: bool = True) -> str | None:
    """Returns what is wrong with an address; None if a gRPC server answers within the timeout.

    Example:
        >>> probe_address("localhost", 1, timeout=1.0)
        'nothing listens there'
    """
    found: list[str | None] = []

    def ask() -> None:
        found.append(_probe(host, port, time.monotonic() + timeout, grpc))

    # In a thread, because looking up a name has no timeout.
    thread = threading.Thread(target=ask, name="tfmultigpu-probe", daemon=True)
    thread.start()
    thread.join(timeout)
    return found[0] if found else f"no answer within {timeout:g} s"


def connect_tpu(address: str) -> tf.distribute.Strategy:
    """Connects TensorFlow to a TPU that answers, and starts it.

    Raises:
        ValueError, RuntimeError, tf.errors.OpError: TensorFlow cannot.

    Example:
        >>> strategy = connect_tpu("local")  # doctest: +SKIP
    """
    distribute: Any = tf.distribute
    config: Any = tf.config
    tpu: Any = tf.tpu
    resolver = distribute.cluster_resolver.TPUClusterResolver(address)
    if address != "local":
        config.experimental_connect_to_cluster(resolver)
    tpu.experimental.initialize_tpu_system(resolver)
    strategy: tf.distribute.Strategy = distribute.TPUStrategy(resolver)
    return strategy


def _probe(host: str, port: int, deadline: float, grpc: bool) -> str | None:
    def left() -> float:
        return max(0.01, deadline - time.monotonic())

    try:
        with socket.create_connection((host, port), timeout=left()) as connection:
            if not grpc:
                return None
            # Every HTTP/2 server, and gRPC is one, answers this with a frame of settings.
            connection.sendall(_PREFACE)
            answer = b""
            while len(answer) < 4:
                connection.settimeout(left())
                piece = connection.recv(64)
                if not piece:
                    break
                answer += piece
    except socket.gaierror:
        return "the name does not resolve"
    except TimeoutError:
        return "no answer"
    except ConnectionRefusedError:
        return "nothing listens there"
    except OSError as error:
        return error.strerror or str(error)
    speaks = len(answer) >= 4 and answer[3] == _SETTINGS_FRAME
    return None if speaks else "a program answers there that does not speak gRPC"
