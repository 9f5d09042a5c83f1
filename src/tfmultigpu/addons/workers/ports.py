"""The port of a worker: whether it belongs to this machine, is free, and TensorFlow can take it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
import sys

from tfmultigpu.addons.workers.spec import WRITTEN, ClusterSource
from tfmultigpu.errors import ClusterError

__all__ = ["allow_open_files", "call", "listen", "split_address"]

# Of Python and TensorFlow in a small program, and of one that reads data.
_FEWEST_FILES, _OTHER_FILES = 64, 512


def split_address(address: str) -> tuple[str, int]:
    """Splits ``host:port``; drops the brackets of an IPv6 host.

    Example:
        >>> split_address("[::1]:2222")
        ('::1', 2222)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listen(address: str, source: ClusterSource = WRITTEN) -> socket.socket:
    """Listens on an address of this machine, and on no other; TensorFlow may bind the port after.

    Args:
        address: ``host:port``.
        source: The source that lists the address, for the messages.

    Raises:
        ClusterError: The name does not resolve, the port is taken, or the address belongs to
            another machine.

    Example:
        >>> listen("localhost:23458").close()
    """
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ClusterError(
            f"its own address {address} does not resolve: {error.strerror}. Correct the host name "
            f"in {source}."
        ) from error
    try:
        # TensorFlow's server will bind the port on all interfaces: try that, without listening.
        _bind(socket.AF_INET, "", port).close()
        for last, (family, _, _, _, place) in enumerate(found, 1 - len(found)):
            try:
                listener = _bind(family, str(place[0]), port)
            except OSError:
                if last == 0:
                    raise
                continue
            break
        listener.listen(128)
    except OSError as error:
        raise ClusterError(_cannot_bind(address, port, error, source)) from error
    return listener


def allow_open_files(connections: int) -> None:
    """Raises the limit of open files of this process if so many connections need it.

    Args:
        connections: How many are open at the same time.

    Raises:
        ClusterError: The limit that the system sets is too low.

    Example:
        >>> allow_open_files(8)
    """
    if sys.platform == "win32":  # It has no such limit.
        return
    import resource

    # TensorFlow connects to the same workers too.
    needed, wanted = (2 * connections + others for others in (_FEWEST_FILES, _OTHER_FILES))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted <= soft or soft == resource.RLIM_INFINITY:
        return
    if needed > hard != resource.RLIM_INFINITY:
        raise ClusterError(
            f"it needs {needed} open files for connections to {connections} workers, and may have "
            f"{hard}. Raise the limit where it is started: `ulimit -n {needed}`, or LimitNOFILE of "
            "a service."
        )
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


async def call(address: str, limit: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to an address.

    A call to a port of this machine on which nobody listens may reach itself: the kernel may give
    that very port to the caller. This function reports that as a refused connection, and frees the
    port at once.

    Args:
        address: ``host:port``.
        limit: The length of the longest line that can be read.

    Raises:
        OSError: Nobody answers there, or the name does not resolve.
    """
    host, port = split_address(address)
    loop = asyncio.get_running_loop()
    try:
        numeric = socket.AI_NUMERICHOST
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=numeric)
    except socket.gaierror:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure: OSError = ConnectionRefusedError(errno.ECONNREFUSED, "nothing listens there")
    for family, _, _, _, place in found:
        caller = _new_caller(family)
        try:
            caller.setblocking(False)
            await loop.sock_connect(caller, place)
            if caller.getsockname() != caller.getpeername():
                return await asyncio.open_connection(sock=caller, limit=limit)
            _reset(caller)
        except OSError as error:
            failure = error
            caller.close()
        except BaseException:
            caller.close()
            raise
    raise failure


def _new_caller(family: int) -> socket.socket:
    caller = socket.socket(family, socket.SOCK_STREAM)
    # A port lent to a caller must not keep the worker that has to listen there from binding it.
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return caller


def _reset(connection: socket.socket) -> None:
    """Closes a connection at once, so that its port does not stay in TIME_WAIT."""
    with contextlib.suppress(OSError):
        linger = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()


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


def _cannot_bind(address: str, port: int, error: OSError, source: ClusterSource) -> str:
    another = source.other_port
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} is taken by another program. Stop it (`ss -ltnp | grep {port}` names it; "
            f"it may be a worker of an earlier run), or {another}."
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{address} is not an address of this machine. Correct the index of this worker in "
            f"{source}, or list an address that this machine itself has (behind NAT or a mapped "
            "container port: use the host's network)."
        )
    return f"{address} cannot be listened on: {error.strerror}. Or {another}."
