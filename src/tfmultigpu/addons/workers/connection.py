"""Connections that workers keep open while they train: who has ended, and whether all agree.

Every worker is connected to the first one, which passes messages on. TensorFlow names a lost worker
after some seconds, and sometimes the wrong one; a closed connection is known at once. Messages are
lines of JSON on the connections that were made when the workers met.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["BROKEN_OFF", "NOT_A_WORKER", "WorkerLink"]

BROKEN_OFF = "its connection broke off without a message: it was killed, or its machine failed"
NOT_A_WORKER = "it sent no message of a worker: another program, or another version of tfmultigpu"
# A machine that lost its power sends nothing. The system probes it after these seconds of silence.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}
_LEAVE_SECONDS = 1.0


class WorkerLink:
    """One worker's end of the connections; its methods may be called from any thread.

    Attributes:
        addresses: ``host:port`` of all workers.
        index: The position of this process among them.
    """

    def __init__(self, addresses: Sequence[str], index: int) -> None:
        """Begins without connections; ``meet(..., stay=True)`` makes them."""
        self.addresses, self.index = tuple(addresses), index
        self._changed = threading.Condition()
        self._ended: dict[int, str] = {}
        self._said: dict[str, dict[int, Any]] = {}
        self._answers: dict[str, dict[int, Any]] = {}
        self._news: list[dict[str, Any]] = []
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def ended(self) -> dict[int, str]:
        """Returns how each worker that has ended did so, the first to end first."""
        with self._changed:
            return dict(self._ended)

    def wait_for_end(self, seconds: float | None) -> dict[int, str]:
        """Waits until a worker has ended, or for so many seconds; returns ``ended()``."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ended), seconds)
            return dict(self._ended)

    def compare(self, key: str, value: Any, seconds: float) -> dict[int, Any] | None:
        """Tells all workers a value, and returns the values of all for the same key.

        Args:
            key: The name of the comparison; each key serves once.
            value: A value that JSON can hold.
            seconds: How long to wait for the others.

        Returns:
            The value of each worker; None if one did not answer in time, or has ended.
        """
        deadline = time.monotonic() + seconds
        self._call(self._take, self.index, key, value)
        with self._changed:
            self._changed.wait_for(
                lambda: key in self._answers or bool(self._ended), deadline - time.monotonic()
            )
            return self._answers.pop(key, None)

    def answer(self, key: str) -> dict[int, Any] | None:
        """Returns what ``compare`` would have returned if it had waited until now."""
        with self._changed:
            return self._answers.pop(key, None)

    def forget(self, key: str) -> None:
        """Gives up a comparison that not every worker has answered."""
        with self._changed:
            self._answers.pop(key, None)
        self._call(self._said.pop, key, None)

    def leave(self, how: str) -> None:
        """Tells the others that this worker ends, and how."""
        done = threading.Event()

        async def say() -> None:
            await self._send(_end_of(self.index, how))
            done.set()

        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(lambda: self._spawn(say()))
                done.wait(_LEAVE_SECONDS)

    async def serve(
        self, peers: Mapping[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    ) -> None:
        """Listens on the connections until all are closed; runs in a separate thread."""
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        for peer, (_, writer) in peers.items():
            self._writers[peer] = writer
            _keep_alive(writer.get_extra_info("socket"))
        await asyncio.gather(*(self._listen(peer, reader) for peer, (reader, _) in peers.items()))
        while self._tasks:
            await asyncio.gather(*self._tasks)
        for writer in self._writers.values():
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _listen(self, peer: int, reader: asyncio.StreamReader) -> None:
        while True:
            line = b""
            with contextlib.suppress(OSError, ValueError):  # A reset, or a line without an end.
                line = await reader.readline()
            message = _parse(line, peer, self.index, len(self.addresses))
            if message is None:
                self._note(peer, NOT_A_WORKER if line.endswith(b"\n") else BROKEN_OFF)
                return
            if message["kind"] == "ended":
                self._note(message["worker"], message["how"])
            elif message["kind"] == "value":
                self._take(message["worker"], message["key"], message["value"])
            else:
                self._answer(message["key"], message["values"])

    def _note(self, worker: int, how: str) -> None:
        with self._changed:
            if worker in self._ended or worker == self.index:
                return
            self._ended[worker] = how
            self._changed.notify_all()
        if self.index == 0:
            self._news.append(_end_of(worker, how))
            if len(self._news) == 1:
                self._spawn(self._tell_news())

    async def _tell_news(self) -> None:
        """Passes on at once all ends that are heard in one turn: all workers may end together."""
        await asyncio.sleep(0)
        news, self._news = self._news, []
        await self._send(*news)

    def _take(self, worker: int, key: str, value: Any) -> None:
        """Collects the values in the first worker; the others send theirs to it."""
        if self.index != 0:
            line = {"kind": "value", "worker": worker, "key": key, "value": value}
            self._spawn(self._send(line))
            return
        said = self._said.setdefault(key, {})
        said[worker] = value
        if len(said) == len(self.addresses):
            values = self._said.pop(key)
            # A thousand equal values are told as one: to each worker, and so a million times else.
            alike = len({json.dumps(one) for one in values.values()}) == 1
            told = {"all": value} if alike else {"values": values}
            self._spawn(self._send({"kind": "values", "key": key, **told}))
            self._answer(key, values)

    def _answer(self, key: str, values: dict[int, Any]) -> None:
        with self._changed:
            self._answers[key] = values
            self._changed.notify_all()

    async def _send(self, *messages: Mapping[str, Any]) -> None:
        lines = b"".join(json.dumps(message).encode() + b"\n" for message in messages)
        for writer in self._writers.values():
            writer.write(lines)
        # One that is frozen does not keep them from the others.
        drains = (writer.drain() for writer in self._writers.values())
        await asyncio.gather(*drains, return_exceptions=True)

    def _call(self, function: Any, *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: everybody else has ended.
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function, *args)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _parse(line: bytes, peer: int, index: int, workers: int) -> dict[str, Any] | None:
    """Returns the message of a worker; None for a line that no worker may send."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict):
        return None
    kind, worker, key = message.get("kind"), message.get("worker"), message.get("key")
    # Only the first worker passes on what others have said.
    known = type(worker) is int and (worker == peer or (peer == 0 and 0 <= worker < workers))
    if kind == "ended":
        return message if known and isinstance(message.get("how"), str) else None
    if not isinstance(key, str):
        return None
    if kind == "value":
        return message if known and index == 0 and "value" in message else None
    if kind == "values" and peer == 0 and "all" in message:
        return {**message, "values": dict.fromkeys(range(workers), message["all"])}
    values = message.get("values")
    if kind != "values" or peer != 0 or not isinstance(values, dict):
        return None
    names = {str(one): one for one in range(workers)}
    if values.keys() != names.keys():
        return None
    return {**message, "values": {names[name]: value for name, value in values.items()}}


def _end_of(worker: int, how: str) -> dict[str, Any]:
    return {"kind": "ended", "worker": worker, "how": how}


def _keep_alive(connection: Any) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
