"""Meet the other workers before TensorFlow does: plain sockets, on the addresses of the cluster.

TensorFlow waits an hour for a worker that never comes, with Ctrl-C dead, and for ever where workers
disagree. So every worker first listens on its own address and dials all others, and they compare
cards. When all have all cards the first worker says go, and only then does anybody give up its
port: no worker is still looking for a port that TensorFlow has taken over. The connections of the
first worker to the others may stay: a `WorkerLink`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfmultigpu.errors import ClusterError
from tfmultigpu.ports import listen, split_address
from tfmultigpu.worker_link import WorkerLink

__all__ = ["meet"]

_PROTOCOL = "tfmultigpu rendezvous 1"
_LINE_LIMIT = 1 << 20
_ATTEMPT_SECONDS = 2.0
_CANCEL_SECONDS = 0.1
_COMMIT_SECONDS = 10.0
_RESOLVE_SECONDS = 10.0
_Connections = dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]]
_LINGER_SECONDS = {"disagreement": 1.0, "cannot start": 8.0, "missing": 0.5, "told": 0.0}


def meet(
    addresses: Sequence[str],
    index: int,
    card: Mapping[str, str],
    timeout: float,
    *,
    cures: Mapping[str, str] | None = None,
    problem: str | None = None,
    source: str = "TF_CONFIG",
    stay: bool = False,
) -> WorkerLink | None:
    """Wait until every worker is there and shows the same card; the port is free again after.

    Listens on `addresses[index]` and nowhere else. Nothing is authenticated.

    Args:
        addresses: `host:port` of all workers, in an order that is the same for all.
        index: which one this process is.
        card: what all must agree on, compared in this order.
        timeout: seconds to wait for the others.
        cures: for a field of the card, what to change where it differs.
        problem: why this worker cannot start; the others are told, then it is raised here.
        source: what lists the addresses, for the messages.
        stay: keep connections open, so that each worker knows when another ends.

    Returns:
        The connections, where they stay and there is more than one worker.

    Raises:
        ClusterError: a worker is missing, disagrees or cannot start, or this port is taken. Every
            worker that can be reached raises too.

    Example:
        >>> meet(["localhost:23456"], 0, {"tensorflow": "2.21.0"}, timeout=5.0)
    """
    meeting = _Meeting(tuple(addresses), index, dict(card), timeout, dict(cures or {}), source)
    link = WorkerLink(addresses, index) if stay and len(addresses) > 1 else None
    loop = asyncio.new_event_loop()
    failures: list[BaseException] = []
    met = threading.Event()

    async def hold() -> None:
        try:
            connections = await meeting.hold(problem, keep=link is not None)
        except BaseException as error:
            failures.append(error)
            return
        finally:
            met.set()
        if link is not None:
            await link.serve(connections)

    def run() -> None:
        # A thread of its own: the caller may be a notebook, whose thread has a loop running.
        try:
            loop.run_until_complete(hold())
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="tfmultigpu-rendezvous", daemon=True)
    thread.start()
    try:
        met.wait()
    except BaseException:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(meeting.cancel)
        thread.join(timeout=_ATTEMPT_SECONDS)
        raise
    if link is None or failures:
        thread.join()
    if failures:
        raise failures[0]
    return link


class _Meeting:
    """One worker's side: who has shown a card, who must still be told of a problem."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        index: int,
        card: dict[str, str],
        timeout: float,
        cures: dict[str, str],
        source: str,
    ) -> None:
        self.addresses, self.index, self.card = addresses, index, card
        self.timeout, self.cures, self.source = timeout, cures, source
        self.peers = frozenset(range(len(addresses))) - {index}
        self.seen: set[int] = set()
        self.told: set[int] = set()
        self.notes: dict[int, str] = {}
        self.ready: _Connections = {}
        self.problem: tuple[str, str] | None = None
        self.changed = asyncio.Event()
        self.task: asyncio.Task[Any] | None = None
        self.dialers: list[asyncio.Task[None]] = []

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    async def hold(self, problem: str | None, keep: bool) -> _Connections:
        self.task = asyncio.current_task()
        if problem is not None:
            self._fail("cannot start", f"{self._name(self.index)} cannot start: {problem}")
        listener = None
        if self.problem is None:
            try:
                listener = await self._listen()
            except ClusterError as error:
                self._fail("cannot start", f"{self._name(self.index)} cannot start: {error}")
        server = None
        if listener is not None:
            server = await asyncio.start_server(self._answer, sock=listener, limit=_LINE_LIMIT)
        for peer in sorted(self.peers):
            self.dialers.append(asyncio.create_task(self._dial(peer)))
        try:
            if not await self._until(lambda: self.seen >= self.peers, self.timeout):
                self._fail("missing", self._missing())
            elif self.problem is None:
                await self._commit()
            if self.problem is not None:
                await self._linger()
                raise ClusterError(self.problem[1])
            kept = self.ready if keep else {}
        finally:
            if server is not None:
                server.close()
            if not keep or self.problem is not None:
                for _, writer in self.ready.values():
                    writer.close()
            await _end(asyncio.all_tasks() - {self.task})
        return kept

    async def _listen(self) -> socket.socket:
        """On this worker's address; the name of a new container may take a moment to be known."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(self.timeout / 2, _RESOLVE_SECONDS)
        while True:
            try:
                return listen(self.addresses[self.index], self.source)
            except ClusterError as error:
                unknown = isinstance(error.__cause__, socket.gaierror)
                if not unknown or loop.time() > deadline:
                    raise
            await asyncio.sleep(0.25)

    async def _until(self, reached: Callable[[], bool], seconds: float | None) -> bool:
        """Wait until something holds or a problem is known; False when the time is over."""

        async def watch() -> None:
            while self.problem is None and not reached():
                self.changed.clear()
                await self.changed.wait()

        try:
            await asyncio.wait_for(watch(), seconds)
        except (TimeoutError, asyncio.TimeoutError):
            return False
        return True

    async def _linger(self) -> None:
        """Give the others time to hear of the problem."""
        assert self.problem is not None
        seconds = min(_LINGER_SECONDS[self.problem[0]], self.timeout)
        if self.dialers:
            await asyncio.wait(self.dialers, timeout=seconds)

    async def _commit(self) -> None:
        """All cards are here; go when everybody says so."""
        if self.index == 0:
            if not await self._until(lambda: set(self.ready) >= self.peers, _COMMIT_SECONDS):
                gone = self._names(self.peers - set(self.ready))
                self._fail("missing", f"{gone} came, and left again before training began.")
            for _, writer in self.ready.values():
                with contextlib.suppress(OSError):
                    writer.write(self._line("go" if self.problem is None else "problem"))
                    await writer.drain()
            return
        reply = None
        with contextlib.suppress(OSError, asyncio.TimeoutError, TimeoutError):
            wait = _COMMIT_SECONDS + _ATTEMPT_SECONDS
            reply = await self._ask(0, "ready", wait, keep=True)
        if reply is None and self.problem is None:
            self._fail("missing", f"{self._name(0)} came, and left again before training began.")
        elif reply is not None:
            self._hear(0, reply)

    async def _dial(self, peer: int) -> None:
        """Show a peer our card, or our problem once there is one, until it has seen it."""
        pause = 0.02
        while True:
            if self.problem is None and peer in self.seen:
                await self._until(lambda: False, None)
            if self.problem is not None and peer in self.told:
                return
            if not await self._call(peer):
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.25)

    async def _call(self, peer: int) -> bool:
        telling = self.problem is not None
        try:
            reply = await self._ask(peer, "problem" if telling else "card", _ATTEMPT_SECONDS)
        except socket.gaierror:
            self.notes[peer] = "its name does not resolve"
        except (TimeoutError, asyncio.TimeoutError):
            self.notes[peer] = "no answer"
        except ConnectionRefusedError:
            self.notes[peer] = "nothing listens there"
        except OSError as error:
            self.notes[peer] = error.strerror or str(error)
        else:
            if reply is None:
                self.notes[peer] = "another program answers there"
                return False
            if telling:
                self.told.add(peer)
            elif reply["from"] != peer and reply["problem"] is None:
                self._fail(
                    "disagreement",
                    f"{self.addresses[peer]} is listed for worker {peer}, but worker "
                    f"{reply['from']} answers there. Give every worker an address of its own in "
                    "TF_CONFIG.",
                )
            else:
                self._hear(peer, reply)
            return True
        return False

    async def _ask(
        self, peer: int, kind: str, seconds: float, keep: bool = False
    ) -> dict[str, Any] | None:
        """One line there, one line back; None where the answer is not ours."""
        host, port = split_address(self.addresses[peer])

        async def exchange() -> bytes:
            reader, writer = await asyncio.open_connection(host, port, limit=_LINE_LIMIT)
            try:
                writer.write(self._line(kind))
                await writer.drain()
                return await reader.readline()
            except ValueError:
                return b""
            finally:
                if keep:
                    self.ready[peer] = reader, writer
                else:
                    writer.close()

        return _parse(await asyncio.wait_for(exchange(), seconds))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A peer, or a stranger, dials us."""
        keep = False
        try:
            line = await asyncio.wait_for(reader.readline(), _ATTEMPT_SECONDS)
            message = _parse(line)
            if message is None:
                return
            peer = message["from"]
            self._hear(peer, message)
            if self.problem is not None:
                self.told.add(peer)
            elif message["kind"] == "ready" and peer in self.peers:
                self.ready[peer] = reader, writer
                keep = True
                self.changed.set()
                return
            writer.write(self._line("card" if self.problem is None else "problem"))
            await writer.drain()
        except (OSError, ValueError, TimeoutError, asyncio.TimeoutError):
            return
        finally:
            if not keep:
                writer.close()

    def _hear(self, peer: int, message: Mapping[str, Any]) -> None:
        """Take in what a peer says: its card always, its problem if it has one."""
        card = message["card"]
        field = next((field for field in self.card if card.get(field) != self.card[field]), None)
        if message["problem"] is not None:
            self.told.add(peer)
            self._fail("told", message["problem"])
        elif field is not None:
            self._fail("disagreement", self._disagreement(peer, field, card.get(field)))
        elif peer not in self.peers:
            self._fail(
                "disagreement",
                f"Two processes say they are worker {peer} of {len(self.addresses)}. "
                f"Give every process an index of its own in {self.source}.",
            )
        else:
            self.seen.add(peer)
            self.changed.set()

    def _fail(self, kind: str, text: str) -> None:
        if self.problem is None:
            self.problem = (kind, text)
            self.changed.set()

    def _line(self, kind: str) -> bytes:
        message = {
            "protocol": _PROTOCOL,
            "kind": kind,
            "from": self.index,
            "card": self.card,
            "problem": None if self.problem is None else self.problem[1],
        }
        return json.dumps(message).encode() + b"\n"

    def _disagreement(self, peer: int, field: str, theirs: object) -> str:
        first, second = sorted([(self.index, self.card[field]), (peer, theirs)])
        return (
            f"The workers disagree about {field}: {self._name(first[0])} has {first[1]}, "
            f"{self._name(second[0])} has {second[1]}. TensorFlow would wait for ever. "
            + self.cures.get(field, f"Give every worker the same {field}.")
        )

    def _missing(self) -> str:
        missing = self.peers - self.seen
        return (
            f"{len(missing)} of {len(self.addresses)} workers did not come within "
            f"{self.timeout:g} s: {self._names(missing)}. This is {self._name(self.index)}. Start "
            "the same program on every worker, check its log there and that the ports are open, "
            "or wait longer: create_strategy(startup_timeout=...)."
        )

    def _names(self, peers: frozenset[int] | set[int]) -> str:
        notes = {peer: f" ({self.notes[peer]})" if peer in self.notes else "" for peer in peers}
        return ", ".join(self._name(peer) + notes[peer] for peer in sorted(peers))

    def _name(self, peer: int) -> str:
        known = peer in range(len(self.addresses))
        return f"worker {peer} at {self.addresses[peer]}" if known else f"worker {peer}"


async def _end(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel tasks until all have ended.

    Before Python 3.12 ``asyncio.wait_for`` swallows a cancellation that comes together with its
    result, so asking once may leave a task running for ever.
    """
    left = tasks
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_CANCEL_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    if not isinstance(message, dict) or message.get("protocol") != _PROTOCOL:
        return None
    whole = isinstance(message.get("from"), int) and isinstance(message.get("card"), dict)
    return message if whole and "kind" in message and "problem" in message else None
