"""Finding a TPU: its address is tried first, because TensorFlow waits minutes for a dead one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu.errors import StrategyUnavailableError


class Tpu(NamedTuple):
    """A TPU: its address, and why it is not there."""

    address: str | None  # "grpc://host:port", "local", a name in Google Cloud, or None.
    missing: str | None  # None if one answers.


NO_TPU = Tpu(None, "it was not asked for")


def find_tpu(environ: Mapping[str, str], *, local: bool = False, timeout: float = 4.0) -> Tpu:
    """Looks for a TPU at the address in ``TPU_NAME``, or ``local`` on this machine."""
    asked = environ.get("TPU_NAME", "")
    if asked in ("", "local"):
        missing = "TPU_NAME is not set" if not asked else "TPU_NAME='local'"
        missing += ", and this machine has no TPU device"
        return Tpu("local", None) if local else Tpu(asked or None, missing)
    host, _, port = asked.removeprefix("grpc://").rpartition(":")
    if host and port.isdecimal():
        problem = _try_to_connect(host.strip("[]"), int(port), timeout)
        return Tpu(f"grpc://{host}:{port}", problem and f"TPU_NAME={asked!r}: {problem}")
    problem = _try_to_connect("metadata.google.internal", 80, timeout)
    missing = f"TPU_NAME={asked!r} is a name that only Google Cloud can look up: {problem}"
    return Tpu(asked, problem and f"{missing}. For an address write grpc://host:port")


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
    if not outcome:
        return f"no answer within {timeout:g} s"
    return outcome[0]


def connect_tpu(tpu: Tpu) -> tf.distribute.Strategy:
    """Returns the strategy of a TPU that answers."""
    untyped: Any = tf
    try:
        resolver = untyped.distribute.cluster_resolver.TPUClusterResolver(tpu.address)
        if tpu.address != "local":
            untyped.config.experimental_connect_to_cluster(resolver)
        untyped.tpu.experimental.initialize_tpu_system(resolver)
        strategy: tf.distribute.Strategy = untyped.distribute.TPUStrategy(resolver)
        return strategy
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        raise StrategyUnavailableError(
            f"TPU_NAME={tpu.address!r} answers, but TensorFlow finds no TPU there: {error}. "
            "Operations of this process may run on that machine now, so it does not fall back.",
            "",
            "Correct TPU_NAME, or unset it, and start again.",
        ) from error
