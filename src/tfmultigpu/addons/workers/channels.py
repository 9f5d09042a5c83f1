"""Sockets between workers: messages in JSON, one a line, and the port that a worker listens on."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
import time
from multiprocessing.connection import wait
from typing import Any

from tfmultigpu.addons.workers.cluster import Cluster, split_address
from tfmultigpu.errors import ClusterError

_RESOLVE_SECONDS = 10.0
_SEND_SECONDS = 2.0


class Channel:
    """A connection that carries messages."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes the connection."""
        self._connection = connection
        self._read = b""
        self._sending = threading.Lock()
        connection.settimeout(_SEND_SECONDS)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, unless the other end is gone or does not read."""
        with contextlib.suppress(OSError), self._sending:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None) -> dict[str, Any]:
        """Returns the next message."""
        while b"\n" not in self._read:
            if not wait([self._connection], seconds):
                raise TimeoutError("it does not answer")
            received = self._connection.recv(1 << 16)
            if not received:
                raise ConnectionError("it closed the connection")
            self._read += received
        line, _, self._read = self._read.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("it sends no messages of a worker")
        return message

    def is_open(self) -> bool:
        """Returns whether the other end has not closed the connection, without waiting."""
        try:
            return (
                not wait([self._connection], 0) or self._connection.recv(1, socket.MSG_PEEK) != b""
            )
        except OSError:
            return False

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


def connect(address: str, seconds: float = 2.0) -> Channel:
    """Connects to ``host:port``."""
    connection = socket.create_connection(split_address(address), seconds)
    # On one machine the system may lend the caller the very port that it calls.
    if connection.getsockname() == connection.getpeername():
        connection.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    return Channel(connection)


def listen(cluster: Cluster) -> socket.socket:
    """Listens on the address of this worker and on no other; TensorFlow may bind the port after."""
    host, port = split_address(str(cluster.address))
    end = time.monotonic() + _RESOLVE_SECONDS
    while True:
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            # TensorFlow's server will bind the port on all interfaces: try that first.
            _bind(family, "", port).close()
            listener = _bind(family, str(place[0]), port)
            listener.listen(1024)
            return listener
        except socket.gaierror as error:  # The name of a new pod may not resolve at once.
            if time.monotonic() > end:
                raise ClusterError(_cannot_listen(cluster, error)) from error
            time.sleep(0.5)
        except OSError as error:
            raise ClusterError(_cannot_listen(cluster, error)) from error


def _bind(family: int, host: str, port: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Lets TensorFlow bind the port directly after, while old connections linger.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def _cannot_listen(cluster: Cluster, error: OSError) -> str:
    address, source = cluster.address, cluster.source
    port = split_address(str(address))[1]
    another = f"list another port in {source} on every worker"
    if source == "Slurm":
        another = "set the first port with TFMULTIGPU_PORT, the same for all tasks of srun"
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of its address {address} is taken by another program. Stop it (`ss -ltnp "
            f"| grep {port}` names it; it may be a worker of an earlier run), or {another}."
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{address} is not an address of this machine. Correct the index of this worker in "
            f"{source}, or list an address of this machine (behind NAT: use the host's network)."
        )
    return f"{address} cannot be listened on: {error.strerror}. Correct it in {source}."
