"""One worker's side of a meeting: listening, calling all others, comparing cards."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from typing import Any

from tfmultigpu.clusters.jobs import Job
from tfmultigpu.clusters.meeting_lines import (
    LONGEST_PROBLEM,
    Message,
    Pen,
    StrangeLineError,
    readable,
)
from tfmultigpu.clusters.meeting_messages import ANSWERS, Words
from tfmultigpu.clusters.ports import call, listen
from tfmultigpu.clusters.spec import ClusterSource
from tfmultigpu.errors import ClusterError

__all__ = ["Meeting"]

# A line has the addresses of all workers; later lines, of a `WorkerLink`, have a value of each.
_LINE_LIMIT = 1 << 18
_LIMIT_OF_EACH = 1 << 12
# More callers that have said nothing are strangers. With the limit of a line this bounds memory.
_MOST_CALLERS = 32
_MOST_STRANGERS = 5
_ATTEMPT_SECONDS = 2.0
_CANCEL_SECONDS = 0.1
# Turns of the loop until a call that was just accepted has a handler, which closes it.
_ACCEPT_TURNS = 10
_COMMIT_SECONDS = 10.0
_RESOLVE_SECONDS = 10.0
_LINGER_SECONDS = {"disagreement": 1.0, "cannot start": 8.0, "missing": 0.5, "told": 0.5}
_Connections = dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]]


class Meeting:
    """One worker's side: who has shown a card, and who must still be told of a problem."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        index: int,
        card: dict[str, str],
        timeout: float,
        words: Words,
        job: Job,
        source: ClusterSource,
    ) -> None:
        """Takes the arguments of ``meet``."""
        self.addresses, self.index, self.card, self.timeout = addresses, index, card, timeout
        self.words, self.job, self.source = words, job, source
        self.pen = Pen(job, index, card)
        self.limit = _LINE_LIMIT + _LIMIT_OF_EACH * len(addresses)
        self.peers = frozenset(range(len(addresses))) - {index}
        self.seen: dict[int, str] = {}  # The process that answers at the address of each.
        self.told: set[int] = set()
        self.notes: dict[int, str] = {}
        self.strangers: dict[tuple[str, str, int | None], str] = {}
        self.callers: dict[asyncio.StreamWriter, None] = {}
        self.ready: _Connections = {}
        self.asked: dict[int, str] = {}
        self.problem: tuple[str, str] | None = None
        self.speaker = ""
        self.changed = asyncio.Event()
        self.wake = {peer: asyncio.Event() for peer in self.peers}
        self.task: asyncio.Task[Any] | None = None
        self.ending = False
        self.dialers: list[asyncio.Task[None]] = []

    def cancel(self) -> None:
        """Ends the meeting early; called in its loop."""
        if self.task is not None and not self.ending:
            self.task.cancel()
            # One cancellation may be lost: see `_end`.
            asyncio.get_running_loop().call_later(_CANCEL_SECONDS, self.cancel)

    async def hold(self, problem: str | None, keep: bool) -> _Connections:
        """Meets the others; returns the connections if they are kept.

        Raises:
            ClusterError: See ``meet``.
        """
        self.task = asyncio.current_task()
        own = self.words.name(self.index)
        if problem is not None:
            self._fail("cannot start", f"{own} cannot start: {problem}")
        server = None
        try:
            listener = await self._listen()
            server = await asyncio.start_server(self._answer, sock=listener, limit=self.limit)
        except ClusterError as error:
            self._fail("cannot start", f"{own} cannot start: {error}")
        for peer in sorted(self.peers):
            self.dialers.append(asyncio.create_task(self._dial(peer)))
        try:
            if not await self._until(lambda: self.seen.keys() >= self.peers, self.timeout):
                gone, strangers = self.peers - self.seen.keys(), self.strangers.values()
                text = self.words.missing(gone, self.notes, strangers, self.timeout)
                self._fail("missing", text)
            elif self.problem is None:
                await self._commit()
            if self.problem is not None:
                await self._linger()
                raise ClusterError(self.problem[1] + self.speaker)
            kept = self.ready if keep else {}
        finally:
            self.ending = True
            if server is not None:
                server.close()
                for _ in range(_ACCEPT_TURNS):
                    await asyncio.sleep(0)
            await _end(asyncio.all_tasks() - {self.task})
            # After the tasks, which may keep another connection when they end.
            if not keep or self.problem is not None:
                for _, writer in self.ready.values():
                    writer.close()
        return kept

    async def _listen(self) -> socket.socket:
        """Listens on this worker's address; the name of a new container may not resolve at once."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(self.timeout / 2, _RESOLVE_SECONDS)
        while True:
            try:
                return listen(self.addresses[self.index], self.source)
            except ClusterError as error:
                unknown = isinstance(error.__cause__, socket.gaierror)
                if not unknown or self.problem is not None or loop.time() > deadline:
                    raise
            await asyncio.sleep(0.25)

    async def _until(self, reached: Callable[[], bool], seconds: float | None) -> bool:
        """Waits until a condition holds or a problem is known; returns False at the timeout."""

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
        """Gives the others time to hear of the problem."""
        assert self.problem is not None
        seconds = min(_LINGER_SECONDS[self.problem[0]], self.timeout)
        for wake in self.wake.values():
            wake.set()
        if self.dialers:
            await asyncio.wait(self.dialers, timeout=seconds)

    async def _commit(self) -> None:
        """Starts together: the first worker says go once all are ready."""
        if self.index == 0:
            if not await self._until(lambda: self.ready.keys() >= self.peers, _COMMIT_SECONDS):
                gone = self.words.names(self.peers - self.ready.keys(), self.notes)
                self._fail("missing", f"{gone} came, and left again before training began.")
            for peer, (_, writer) in self.ready.items():
                with contextlib.suppress(OSError, asyncio.TimeoutError, TimeoutError):
                    writer.write(self.pen.answer(*self._kind("go"), self.asked[peer]))
                    await asyncio.wait_for(writer.drain(), _ATTEMPT_SECONDS)
            return
        # The first worker may have to wait for others as long as any.
        wait = self.timeout + _COMMIT_SECONDS + _ATTEMPT_SECONDS
        asking = asyncio.ensure_future(self._ask(0, "ready", wait, keep=True))
        asking.add_done_callback(lambda _: self.changed.set())
        reply = None
        if await self._until(asking.done, None) and asking.done():
            with contextlib.suppress(OSError, ValueError, asyncio.TimeoutError, TimeoutError):
                reply = asking.result()
        if reply is not None:
            self._hear(reply, self.addresses[0], dialled=0)
        if self.problem is None and (reply is None or reply.kind != "go"):
            first = self.words.name(0)
            self._fail("missing", f"{first} came, and left again before training began.")

    async def _dial(self, peer: int) -> None:
        """Shows a peer our card, or our problem once there is one, until it has seen it."""
        pause = 0.02
        while True:
            if self.problem is None and peer in self.seen:
                await self._until(lambda: peer not in self.seen, None)
            if self.problem is not None and peer in self.told:
                return
            if not await self._call(peer):
                woken = asyncio.ensure_future(self.wake[peer].wait())
                await asyncio.wait({woken}, timeout=pause)
                woken.cancel()
                self.wake[peer].clear()
                pause = min(2 * pause, 0.25)

    async def _call(self, peer: int) -> bool:
        telling = self.problem is not None
        try:
            reply = await self._ask(peer, "card", _ATTEMPT_SECONDS)
        except socket.gaierror:
            self.notes[peer] = "its name does not resolve"
        except (TimeoutError, asyncio.TimeoutError):
            self.notes[peer] = "no answer"
        except ConnectionRefusedError:
            self.notes[peer] = "nothing listens there"
            if telling and peer in self.seen:
                self.told.add(peer)  # It has ended, so it knows of a problem.
                return True
        except StrangeLineError as error:
            self.notes[peer] = ANSWERS[error.kind]
            if error.kind != "refused":
                self._ignore(error, self.addresses[peer])
        except OSError as error:
            self.notes[peer] = error.strerror or str(error)
        else:
            if telling:
                self.told.add(peer)
            self._hear(reply, self.addresses[peer], dialled=peer)
            return True
        return False

    async def _ask(self, peer: int, kind: str, seconds: float, keep: bool = False) -> Message:
        """Calls a peer: reads its greeting, sends one line, returns the answer."""

        async def exchange() -> Message:
            reader, writer = await call(self.addresses[peer], self.limit)
            try:
                greeting = self.pen.read_greeting(await _read_line(reader))
                line, nonce = self.pen.call(*self._kind(kind), greeting)
                writer.write(line)
                await writer.drain()
                try:
                    answer = await _read_line(reader)
                except ConnectionResetError:
                    raise StrangeLineError("refused") from None
                return self.pen.read_answer(answer, nonce)
            finally:
                if keep:
                    self.ready[peer] = reader, writer
                else:
                    writer.close()

        return await asyncio.wait_for(exchange(), seconds)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers a call of a peer or of a stranger."""
        keep, place = False, _place(writer)
        self.callers[writer] = None
        if len(self.callers) > _MOST_CALLERS + 2 * len(self.addresses):
            next(iter(self.callers)).transport.abort()  # Who has been silent longest.
        try:
            greeting, nonce = self.pen.greeting()
            writer.write(greeting)
            line = await asyncio.wait_for(_read_line(reader), _ATTEMPT_SECONDS)
            message = self.pen.read_call(line, nonce)
            self._hear(message, place)
            if message.kind == "ready" and await self._is_ready(message, place):
                keep = True
                self._take(message, reader, writer)
                return
            writer.write(self.pen.answer(*self._kind("card"), message.nonce))
            await asyncio.wait_for(writer.drain(), _ATTEMPT_SECONDS)
            if self.problem is not None:
                self.told.add(message.sender)
        except StrangeLineError as error:
            self._ignore(error, place)
        except (OSError, TimeoutError, asyncio.TimeoutError):
            return
        except asyncio.CancelledError:
            return  # The meeting is over. Python 3.11 prints an error for a handler that raises it.
        finally:
            self.callers.pop(writer, None)
            if not keep:
                writer.close()

    def _take(
        self, message: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Keeps the connection of a worker that is ready; a restarted worker replaces it."""
        if message.sender in self.ready:
            self.ready[message.sender][1].close()
        self.ready[message.sender] = reader, writer
        self.asked[message.sender] = message.nonce
        self.changed.set()

    async def _is_ready(self, message: Message, place: str) -> bool:
        """Returns whether the process that answers at the address of that worker said this."""
        peer = message.sender
        if self.index != 0 or peer not in self.peers:
            return False
        if not await self._until(lambda: self.seen.get(peer) == message.process, _COMMIT_SECONDS):
            self._ignore(StrangeLineError("foreign", peer), place)
            return False
        return self.problem is None

    def _hear(self, message: Message, place: str, dialled: int | None = None) -> None:
        """Takes in the message of a worker: its card always, its problem if it has one.

        A card counts once its worker shows it at its own address: anybody may call.
        """
        peer, card, own = message.sender, message.card, self.job.id
        field = next((field for field in self.card if card.get(field) != self.card[field]), None)
        wrong = None
        if message.process == self.pen.process:
            if dialled is None:
                return
            wrong = self.words.listed_for_another(dialled, "this process itself")
        elif own is not None and message.job not in (None, own):
            wrong = self.words.two_jobs(own, message, place)
        elif message.problem is not None:
            self.told.add(peer)
            if self.problem is None:
                self.speaker = f" (Worker {peer} said so, from {place}.)"
            self._fail("told", readable(message.problem, LONGEST_PROBLEM))
        elif dialled not in (None, peer):
            wrong = self.words.listed_for_another(dialled, f"worker {peer}")
        elif field is not None:
            wrong = self.words.disagreement(message, place, field, self.card[field])
        elif peer == self.index:
            wrong = self.words.same_index(message, place)
        elif peer not in self.peers:
            self._ignore(StrangeLineError("foreign", peer), place)
        elif dialled is not None:
            self.seen[peer] = message.process
        else:
            self.wake[peer].set()
            if self.seen.get(peer, message.process) != message.process:
                del self.seen[peer]  # Started again, or a stranger: its address will tell.
        if wrong is not None:
            self._fail("disagreement", wrong)
        self.changed.set()

    def _ignore(self, error: StrangeLineError, place: str) -> None:
        """Notes a stranger; a problem if it shows that this worker will never meet the others."""
        key = error.kind, place.rpartition(":")[0], error.claims
        if key in self.strangers or len(self.strangers) < _MOST_STRANGERS:
            self.strangers[key] = self.words.strange(error, place)
        wrong = None if self.job.secret else self.words.not_alike(error, place)
        if wrong is not None:
            self._fail("disagreement", wrong)

    def _fail(self, kind: str, text: str) -> None:
        if self.problem is None:
            self.problem = (kind, text)
            self.changed.set()

    def _kind(self, kind: str) -> tuple[str, str | None]:
        """Returns the kind of a line, and the problem, which replaces any other kind."""
        return (kind, None) if self.problem is None else ("problem", self.problem[1])


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Reads one line, which ends in a newline."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError:
        raise StrangeLineError("foreign") from None
    except asyncio.IncompleteReadError:
        raise ConnectionResetError(errno.ECONNRESET, "the connection ended") from None


def _place(writer: asyncio.StreamWriter) -> str:
    """Returns the address of the other side."""
    host, port, *_ = writer.get_extra_info("peername") or ("an unknown address", "?")
    return f"{host}:{port}"


async def _end(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancels tasks until all have ended.

    Before Python 3.12 ``asyncio.wait_for`` swallows a cancellation that comes together with its
    result, so asking once may leave a task running for ever.
    """
    left = tasks
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_CANCEL_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)
