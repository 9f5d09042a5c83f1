"""Ends of workers: the others and the launcher hear which one has ended, and how.

The connections of the meeting tell it to the others. They serve while a collective waits, and do
not wait for the first worker if it is stopped, as the service of TensorFlow does.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tfmultigpu.addons.workers.channels import Message, receive, send
from tfmultigpu.recorder import recorder


@dataclass(frozen=True)
class End:
    """The end of a worker.

    Attributes:
        how: What happened, in words.
        lost_another: Whether it ended because another worker had ended before.
    """

    how: str
    lost_another: bool = False


BROKEN_OFF = End("its connection broke off without a message: it was killed, or its machine failed")
# A process does not know its exit code then: sys.exit leaves no trace that could be read.
FINISHED = End("its program ended without an error, at its last line or by sys.exit")


class Ends:
    """Hears how other workers end, and tells them how this one does.

    The first worker is connected to all others and passes on what it hears.
    """

    def __init__(self, index: int, channels: Mapping[int, Connection]) -> None:
        self._index, self._channels = index, channels
        self._process = os.getpid()
        self._ended: dict[int, End] = {}
        self._states: dict[int, Any] = {}
        self._changed, self._sending = threading.Condition(), threading.Lock()
        for peer, channel in channels.items():
            threading.Thread(target=self._listen, args=(peer, channel), daemon=True).start()

    def wait(self, seconds: float | None) -> dict[int, End]:
        """Waits until a worker has ended; returns how each ended, the first to end first."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ended), seconds)
            return dict(self._ended)

    def ask(self, workers: int, seconds: float) -> dict[int, Any]:
        """Asks all others what they do; returns the answers that came in time.

        A worker that nobody watches answers with None. While the first worker is stopped, which
        passes the questions on, nobody answers.
        """
        self._states = {}
        for channel in self._channels.values():
            self._send(channel, {"asks": self._index})
        end = time.monotonic() + seconds
        with self._changed:
            while len(self._states) + len(self._ended) < workers - 1:
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    break
            return dict(self._states)

    def leave(self, end: End) -> None:
        """Tells the others that this worker ends, and how; does nothing in a fork of it."""
        if os.getpid() == self._process:
            self._tell(self._index, end)

    def _listen(self, peer: int, channel: Connection) -> None:
        try:
            while True:
                message = receive(channel, None)
                if "asks" in message:
                    self._answer(peer, message)
                    continue
                end = End(str(message["how"]), bool(message["lost_another"]))
                self._note(int(message["worker"]), end)
        except (OSError, ValueError, KeyError, TypeError):
            self._note(peer, BROKEN_OFF)

    def _answer(self, peer: int, message: Message) -> None:
        """Answers a question, notes an answer to this worker, or passes on what is for others."""
        asks = int(message["asks"])
        if "worker" not in message:
            for other, channel in self._channels.items():
                if other != peer:
                    self._send(channel, message)
            describe = recorder.describe
            state = None if describe is None else describe()
            answer = {"asks": asks, "worker": self._index, "state": state}
            self._send(self._channels[peer], answer)
        elif asks != self._index:
            self._send(self._channels[asks], message)
        else:
            with self._changed:
                self._states[int(message["worker"])] = message["state"]
                self._changed.notify_all()

    def _send(self, channel: Connection, message: Message) -> None:
        with self._sending:
            send(channel, message)

    def _note(self, worker: int, end: End) -> None:
        with self._changed:
            if worker in self._ended or worker == self._index:
                return
            self._ended[worker] = end
            self._changed.notify_all()
        if self._index == 0:
            self._tell(worker, end)

    def _tell(self, worker: int, end: End) -> None:
        for peer, channel in self._channels.items():
            if peer != worker:
                self._send(channel, {"worker": worker, **asdict(end)})


# Notes to the launcher ----------------------------------------------------------------------------
# The launcher knows only how its processes end, and their output is for a person. So workers make
# empty files, the first of which it names in TFMULTIGPU_JOINED.

JOINED = "TFMULTIGPU_JOINED"


def note_joined() -> None:
    """Notes that this worker has joined the others."""
    if path := os.environ.get(JOINED):
        Path(path).touch()


def note_lost(worker: int) -> None:
    """Notes that this worker, ``worker``, has lost another one."""
    if path := os.environ.get(JOINED):
        with contextlib.suppress(OSError):  # The launcher may have ended.
            _lost(Path(path), worker).touch()


def has_lost_another(joined: Path, worker: int) -> bool:
    """Returns whether a worker has lost another one, so that it was not the first to fail."""
    return _lost(joined, worker).exists()


def _lost(joined: Path, worker: int) -> Path:
    return joined.with_name(f"{joined.name}-lost-{worker}")
