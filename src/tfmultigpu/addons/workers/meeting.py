"""One worker's side of a meeting: the first worker is the hub, which all others call.

The first worker calls each of the others too: a worker has come once the process that calls as
this worker also answers at its address. The others hold their line, and hear on it what happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from tfmultigpu.addons.workers.jobs import Job
from tfmultigpu.addons.workers.meeting_lines import (
    LONGEST_PROBLEM,
    Message,
    Pen,
    StrangeLineError,
    readable,
)
from tfmultigpu.addons.workers.meeting_messages import ANSWERS, Words
from tfmultigpu.addons.workers.ports import allow_open_files, call, listen
from tfmultigpu.addons.workers.spec import ClusterSource
from tfmultigpu.errors import ClusterError

__all__ = ["Meeting"]

# A line has the addresses of all workers; later lines of the first worker have a value of each.
_LINE_LIMIT = 1 << 18
_LIMIT_OF_EACH_ADDRESS, _LIMIT_OF_EACH_VALUE = 1 << 9, 1 << 12
# More callers that have said nothing are strangers. With the limit of a line this bounds memory.
_MOST_CALLERS = 32
_MOST_STRANGERS = 5
_ATTEMPT_SECONDS = 2.0
# The first worker reads a line of each: it may take so much longer to answer the last.
_ATTEMPT_SECONDS_OF_EACH = 0.01
_CANCEL_SECONDS = 0.1
# Turns of the loop until a call that was just accepted has a handler, which closes it.
_ACCEPT_TURNS = 10
_GRACE_SECONDS = 2.0
_RESOLVE_SECONDS = 10.0
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS_OF_EACH = 0.02, 0.25, 0.002
_LINGER_SECONDS = {"disagreement": 1.0, "cannot start": 8.0, "missing": 0.5, "told": 8.0}
_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_shuffle = random.Random()  # The user's seeds are not for this.


@dataclass(frozen=True)
class _Line:
    """The connection on which a worker waits to hear go."""

    nonce: str
    connection: _Connection
    task: asyncio.Task[Any] | None


class Meeting:
    """One worker's side: who has come, and who must still be told of a problem."""

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
        count = len(addresses)
        self.limit = _LINE_LIMIT + _LIMIT_OF_EACH_ADDRESS * count
        self.attempt = _ATTEMPT_SECONDS + _ATTEMPT_SECONDS_OF_EACH * count
        self.longest_attempt = max(self.attempt, timeout / 4)
        self.longest_pause = max(_LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS_OF_EACH * count)
        self.peers = frozenset(range(count)) - {index} if index == 0 else frozenset({0})
        self.missing = set(self.peers)
        self.patience = dict.fromkeys(self.peers, self.attempt)
        self.known_job = job.id, words.name(index)
        self.heard: dict[int, str] = {}  # The last process that called as each.
        self.seen: dict[int, str] = {}  # The process that answers at the address of each.
        self.came: set[int] = set()
        self.lines: dict[str, _Line] = {}  # By process.
        self.ready: dict[int, _Connection] = {}
        self.told: set[int] = set()
        self.notes: dict[int, str] = {}
        self.strangers: dict[tuple[str, str, int | None], str] = {}
        self.callers: dict[asyncio.StreamWriter, None] = {}
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

    async def hold(self, problem: str | None, keep: bool) -> dict[int, _Connection]:
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
            allow_open_files(len(self.peers))
            listener = await self._listen()
            server = await asyncio.start_server(
                self._answer, sock=listener, limit=self.limit, backlog=100 + len(self.peers)
            )
        except ClusterError as error:
            self._fail("cannot start", f"{own} cannot start: {error}")
        for peer in sorted(self.peers):
            self.dialers.append(asyncio.create_task(self._dial(peer)))
        try:
            await (self._gather() if self.index == 0 else self._follow())
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

    async def _until(self, reached: Callable[[], bool], seconds: float) -> bool:
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

    async def _gather(self) -> None:
        """Waits, as the first worker, until all have come; then says go."""
        if not await self._until(lambda: not self.missing, self.timeout):
            self._fail("missing", self._who_is_missing(f"within {self.timeout:g} s"))
        if self.problem is None:
            lines = {peer: self.lines[self.seen[peer]] for peer in self.peers}
            self.ready = {peer: line.connection for peer, line in lines.items()}
            await _end({line.task for line in lines.values() if line.task is not None})
            await self._say("go", lines.values())

    async def _follow(self) -> None:
        """Waits, as another worker, until the first says go; at the timeout asks who is missing."""
        met = await self._until(lambda: bool(self.ready), self.timeout)
        if not met and 0 in self.seen:
            # The first worker knows, and its own time is over soon if it began as early.
            met = await self._until(lambda: bool(self.ready), _GRACE_SECONDS)
        if not met and 0 in self.seen and await self._call(0, "late"):
            await self._until(lambda: bool(self.ready), _GRACE_SECONDS)
        if not self.ready:
            self._fail("missing", self._who_is_missing(f"within {self.timeout:g} s"))

    def _who_is_missing(self, when: str) -> str:
        return self.words.missing(self.missing, self.notes, self.strangers.values(), when)

    async def _linger(self) -> None:
        """Gives the others time to hear of the problem."""
        assert self.problem is not None
        seconds = min(_LINGER_SECONDS[self.problem[0]], self.timeout)
        await self._say("card", self.lines.values())
        self.told |= self.peers - self.missing
        for wake in self.wake.values():
            wake.set()
        if self.dialers:
            await asyncio.wait(self.dialers, timeout=seconds)

    async def _say(self, kind: str, lines: Collection[_Line]) -> None:
        """Tells those who wait on their line."""
        drains = []
        for line in lines:
            _, writer = line.connection
            writer.write(self.pen.answer(*self._kind(kind), line.nonce))
            drains.append(writer.drain())
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            told = asyncio.gather(*drains, return_exceptions=True)
            await asyncio.wait_for(told, _ATTEMPT_SECONDS)

    async def _dial(self, peer: int) -> None:
        """Calls a peer until it answers, and again if there is news for it or of it."""
        pause = _PAUSE_SECONDS
        while self.problem is None or peer not in self.told:
            self.wake[peer].clear()
            answered = await self._call(peer, "card" if self.index == 0 else "ready")
            woken = asyncio.ensure_future(self.wake[peer].wait())
            seconds = None if answered else pause * _shuffle.uniform(0.5, 1.5)
            await asyncio.wait({woken}, timeout=seconds)
            woken.cancel()
            pause = _PAUSE_SECONDS if answered else min(2 * pause, self.longest_pause)

    async def _call(self, peer: int, kind: str) -> bool:
        """Shows a peer our card, or our problem once there is one; returns whether it answered."""
        telling = self.problem is not None
        writer = None
        try:
            seconds = self.attempt if kind == "late" else self.patience[peer]
            asked = asyncio.wait_for(self._ask(peer, kind), seconds)
            reply, nonce, reader, writer = await asked
            if telling:
                self.told.add(peer)
                self.wake[peer].set()
            self._hear(reply, self.addresses[peer], dialled=peer)
            if kind == "ready" and self.problem is None:
                return await self._wait_for_go(nonce, reader, writer)
            return True
        except socket.gaierror:
            self._note(peer, "its name does not resolve")
        except (TimeoutError, asyncio.TimeoutError):
            self._note(peer, "no answer")
            # It may be slow: a try that is broken off and made again makes it slower.
            self.patience[peer] = min(2 * self.patience[peer], self.longest_attempt)
        except ConnectionRefusedError:
            self._note(peer, "nothing listens there")
            if telling and peer in self.came:
                self.told.add(peer)  # It has ended, so it knows of a problem.
        except StrangeLineError as error:
            self._note(peer, ANSWERS[error.kind])
            if error.kind != "refused":
                self._ignore(error, self.addresses[peer])
        except OSError as error:
            self._note(peer, error.strerror or str(error))
        finally:
            if writer is not None and self.ready.get(peer, (None, None))[1] is not writer:
                writer.close()
        return False

    def _note(self, peer: int, what: str) -> None:
        """Notes why a call of a peer failed."""
        self.notes[peer] = f"it came, and left again: {what}" if peer in self.came else what
        self.seen.pop(peer, None)
        self._count(peer)

    async def _ask(
        self, peer: int, kind: str
    ) -> tuple[Message, str, asyncio.StreamReader, asyncio.StreamWriter]:
        """Calls a peer: reads its greeting, sends one line, returns the answer and its nonce."""
        limit = _LINE_LIMIT + _LIMIT_OF_EACH_VALUE * len(self.addresses)
        reader, writer = await call(self.addresses[peer], limit)
        try:
            greeting = self.pen.read_greeting(await _read_line(reader))
            line, nonce = self.pen.call(*self._kind(kind), greeting)
            writer.write(line)
            await writer.drain()
            try:
                answer = await _read_line(reader)
            except ConnectionResetError:
                raise StrangeLineError("refused") from None
            return self.pen.read_answer(answer, nonce), nonce, reader, writer
        except BaseException:
            writer.close()
            raise

    async def _wait_for_go(
        self, nonce: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Waits on the line to the first worker; returns False if it has to be called again."""
        line = asyncio.ensure_future(_read_line(reader))
        woken = asyncio.ensure_future(self.wake[0].wait())
        try:
            await asyncio.wait({line, woken}, return_when=asyncio.FIRST_COMPLETED)
            if not line.done():
                return False
            reply = self.pen.read_answer(line.result(), nonce)
        finally:
            line.cancel()
            woken.cancel()
        self._hear(reply, self.addresses[0], dialled=0)
        if reply.kind == "go" and self.problem is None:
            self.ready[0] = reader, writer
            self.changed.set()
        return True

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers a call of a peer or of a stranger."""
        line, place = None, _place(writer)
        self.callers[writer] = None
        if len(self.callers) > _MOST_CALLERS + 2 * len(self.addresses):
            next(iter(self.callers)).transport.abort()  # Who has been silent longest.
        try:
            greeting, nonce = self.pen.greeting()
            writer.write(greeting)
            text = asyncio.wait_for(_read_line(reader), self.longest_attempt)
            message = self.pen.read_call(await text, nonce)
            peer, process = message.sender, message.process
            self._hear(message, place)
            kind, problem = self._kind("card")
            waits = message.kind == "ready" and self.index == 0 and peer in self.peers
            if waits and problem is None:
                line = _Line(message.nonce, (reader, writer), asyncio.current_task())
                self.lines[process] = line
                self._count(peer)
            writer.write(self.pen.answer(kind, problem, message.nonce))
            await asyncio.wait_for(writer.drain(), self.longest_attempt)
            if problem is not None:
                self.told.add(peer)
            del message  # Its card is as long as the list of workers.
            if line is not None:
                await reader.read(1)  # A worker says nothing before it hears go.
        except StrangeLineError as error:
            self._ignore(error, place)
        except (OSError, TimeoutError, asyncio.TimeoutError):
            return
        except asyncio.CancelledError:
            return  # The meeting is over. Python 3.11 prints an error for a handler that raises it.
        finally:
            self.callers.pop(writer, None)
            if line is None or self.ready.get(peer) is not line.connection:
                writer.close()
            if line is not None and self.lines.get(process) is line and not self.ready:
                self._drop(peer, process)

    def _drop(self, peer: int, process: str) -> None:
        """Forgets the line of a worker that has left; its address tells whether it has ended."""
        del self.lines[process]
        if self.seen.get(peer) == process:
            del self.seen[peer]
        self._count(peer)
        self.heard[peer] = ""
        self.wake[peer].set()

    def _count(self, peer: int) -> None:
        """Notes whether the process that answers at the address of a worker waits on its line."""
        line = self.lines.get(self.seen.get(peer, ""))
        if line is None:
            self.missing.add(peer)
            return
        self.missing.discard(peer)
        self.callers.pop(line.connection[1], None)
        self.changed.set()

    def _hear(self, message: Message, place: str, dialled: int | None = None) -> None:
        """Takes in the message of a worker: its card always, its problem if it has one.

        A card counts once its worker shows it at its own address: anybody may call.
        """
        peer, card, process = message.sender, message.card, message.process
        own, whose = self.known_job
        field = next((field for field in self.card if card.get(field) != self.card[field]), None)
        wrong = None
        if process == self.pen.process:
            if dialled is None:
                return
            wrong = self.words.listed_for_another(dialled, "this process itself")
        elif own is not None and message.job not in (None, own):
            wrong = self.words.two_jobs(own, whose, message, place)
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
            self.seen[peer] = process
            self.came.add(peer)
            self.notes[peer] = f"it answers, but {self.words.silence(peer)}"
            if own is None and message.job is not None:
                self.known_job = message.job, self.words.name(peer)
            if self.problem is None and self.heard.get(peer, process) == process:
                self.wake[peer].clear()
            self._count(peer)
        elif message.kind == "late" and self.missing:
            when = f"before the time of {self.words.name(peer)} was over"
            self._fail("missing", self._who_is_missing(when))
        elif self.seen.get(peer) != process:
            # It has just come, was started again, or is a stranger: its address will tell.
            self.seen.pop(peer, None)
            self.heard[peer] = process
            self._count(peer)
            self.wake[peer].set()
        if wrong is not None:
            self._fail("disagreement", wrong)

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
