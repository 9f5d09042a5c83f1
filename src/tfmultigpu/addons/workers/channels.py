"""Connections between workers: messages in JSON, and the port that a worker listens on."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import struct
import time
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from tfmultigpu.addons.workers.sources import port_advice
from tfmultigpu.clusters import Cluster, split_address
from tfmultigpu.errors import ClusterError

Message: TypeAlias = dict[str, Any]  # What JSON holds.
_RESOLVE_SECONDS = 10.0
_MESSAGE_SECONDS = 2
_LONGEST_MESSAGE = 1 << 20


def as_channel(opened: socket.socket) -> Connection:
    """Returns a connection for messages, of which none is read or written for seconds."""
    opened.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        opened.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _MESSAGE_SECONDS, 0))
    return Connection(opened.detach())


def connect(address: str) -> Connection:
    """Connects to ``host:port``."""
    opened = socket.create_connection(split_address(address), _MESSAGE_SECONDS)
    # On one machine the system may lend the caller the very port that it calls.
    if opened.getsockname() == opened.getpeername():
        opened.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    return as_channel(opened)


def send(channel: Connection, message: Message) -> None:
    """Sends a message, unless the other end is gone or does not read."""
    with contextlib.suppress(OSError):
        channel.send_bytes(json.dumps(message).encode())


def receive(channel: Connection, seconds: float | None) -> Message:
    """Returns the next message; raises ``ValueError`` if it is not one, else ``OSError``."""
    if not channel.poll(seconds):
        raise TimeoutError("it does not answer")
    try:
        message = json.loads(channel.recv_bytes(_LONGEST_MESSAGE))
    except EOFError as error:
        raise ConnectionError("it closed the connection") from error
    except OSError as error:
        if error.errno not in (None, errno.EAGAIN):
            raise
        message = None
    if not isinstance(message, dict):
        raise ValueError("it sends no messages of a worker")
    return message


def listen(cluster: Cluster) -> socket.socket:
    """Listens on the address of this worker and on no other; TensorFlow may bind the port after."""
    host, port = split_address(str(cluster.address))
    end = time.monotonic() + _RESOLVE_SECONDS
    while True:
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            # TensorFlow's server will bind the port on all interfaces: try that first.
            socket.create_server(("", port), family=family).close()
            return socket.create_server((str(place[0]), port), family=family, backlog=1024)
        except OSError as error:
            # The name of a new pod may not resolve at once.
            if not isinstance(error, socket.gaierror) or time.monotonic() > end:
                raise _cannot_listen(cluster, error) from error
            time.sleep(0.5)


def _cannot_listen(cluster: Cluster, error: OSError) -> ClusterError:
    if error.errno == errno.EADDRINUSE:
        problem = (
            "is taken by another program, maybe a worker of an earlier run: `ss -ltnp` names it"
        )
    elif error.errno == errno.EADDRNOTAVAIL:
        problem = "is not an address of this machine"
    else:
        problem = f"cannot be listened on: {error.strerror}"
    return ClusterError(f"its address {cluster.address} {problem}.", "", port_advice(cluster))
