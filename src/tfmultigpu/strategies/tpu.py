"""Finding a TPU: its address is tried first, because TensorFlow waits minutes for a dead one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

__all__ = ["NO_TPU", "Tpu", "connect_tpu", "find_tpu"]

_VARIABLES = ("TPU_NAME", "COLAB_TPU_ADDR")


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


NO_TPU = Tpu(None, "", "it was not asked for")


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
    given = {"devices": address, **{name: environ.get(name) for name in _VARIABLES}}
    source, asked = next(((name, value) for name, value in given.items() if value), ("", None))
    if asked is None and not local:
        unset = " and ".join(_VARIABLES)
        return Tpu(None, "", f"{unset} are not set, and this machine has no TPU device")
    if asked in (None, "local"):
        missing = None if local else f"{source}='local', but this machine has no TPU device"
        return Tpu("local", source or "this machine", missing)
    host, _, port = str(asked).removeprefix("grpc://").rpartition(":")
    if host and port.isdecimal():
        problem = _try_to_connect(host.strip("[]"), int(port), timeout)
        return Tpu(f"grpc://{host}:{port}", source, problem and f"{source}={asked!r}: {problem}")
    problem = _try_to_connect("metadata.google.internal", 80, timeout)
    missing = (
        f"{source}={asked!r} is a name that only Google Cloud can look up, and this machine is "
        f"not there ({problem}); for an address write grpc://host:port"
    )
    return Tpu(asked, source, problem and missing)


def _try_to_connect(host: str, port: int, timeout: float) -> str | None:
    """Returns what is wrong with an address; None if a program accepts connections there."""
    outcome: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout).close()
        except (OSError, OverflowError) as error:
            outcome.append(f"nothing answers there: {error}")
        else:
            outcome.append(None)

    # In a thread, because looking up a name has no timeout.
    thread = threading.Thread(target=connect, name="tfmultigpu-tpu", daemon=True)
    thread.start()
    thread.join(timeout)
    return outcome[0] if outcome else f"no answer within {timeout:g} s"


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
