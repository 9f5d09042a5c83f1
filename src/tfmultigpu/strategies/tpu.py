"""Finding a TPU: its address is tried first, because TensorFlow waits minutes for a dead one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu.errors import StrategyUnavailableError

_VARIABLES = ("TPU_NAME", "COLAB_TPU_ADDR")


class Tpu(NamedTuple):
    """A TPU: its address, the source of that, such as ``"TPU_NAME"``, and why it is not there."""

    address: str | None  # "grpc://host:port", "local", a name in Google Cloud, or None.
    source: str
    missing: str | None  # None if one answers.


NO_TPU = Tpu(None, "", "it was not asked for")


def find_tpu(
    environ: Mapping[str, str], devices: Any = None, *, local: bool = False, timeout: float = 4.0
) -> Tpu:
    """Looks for a TPU: at an address from the program, in the environment, then on this machine."""
    names = [devices] if isinstance(devices, str | int) else list(devices or ())
    if names and (len(names) > 1 or not str(names[0]).startswith(("grpc://", "local"))):
        raise ValueError(
            "With prefer='tpu', devices is the address of the TPU, 'grpc://host:port' or 'local', "
            f"or is left out: a TPU is used whole. Received: devices={devices!r}."
        )
    given = {"devices": names and names[0], **{name: environ.get(name) for name in _VARIABLES}}
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
    return Tpu(str(asked), source, problem and missing)


def _try_to_connect(host: str, port: int, timeout: float) -> str | None:
    """Returns what is wrong with an address; None if a program accepts connections there."""
    outcome: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout).close()
            outcome.append(None)
        except (OSError, OverflowError, UnicodeError) as error:  # No address, no port, no name.
            outcome.append(f"nothing answers there: {error}")

    # In a thread, because looking up a name has no timeout.
    thread = threading.Thread(target=connect, name="tfmultigpu-tpu", daemon=True)
    thread.start()
    thread.join(timeout)
    return outcome[0] if outcome else f"no answer within {timeout:g} s"


def connect_tpu(tpu: Tpu) -> tuple[Any, Tpu | None]:
    """Starts a TPU that answers: returns its strategy, or why there is none after all."""
    distribute: Any = tf.distribute
    module: Any = tf.tpu
    config: Any = tf.config
    try:
        resolver = distribute.cluster_resolver.TPUClusterResolver(tpu.address)
        if tpu.address != "local":
            config.experimental_connect_to_cluster(resolver)
        module.experimental.initialize_tpu_system(resolver)
        return distribute.TPUStrategy(resolver), None
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        missing = (
            f"{tpu.source}={tpu.address!r} answers, but TensorFlow finds no TPU there: {error}"
        )
        if tpu.address == "local":
            return None, tpu._replace(missing=missing)
        raise StrategyUnavailableError(
            f"{missing} This process is connected to that machine now, and its operations would "
            f"run there, so it does not fall back. Correct {tpu.source}, or unset it, and start "
            "again."
        ) from error
