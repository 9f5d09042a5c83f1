"""The last calls of this process, for a watch to read: what it is in, and since when.

Nothing is noted until somebody watches. A call then costs one test of an attribute.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

MOST = 64
_nothing = nullcontext()


class Note:
    """A call, from where the block begins to where it ends.

    Attributes:
        phase: ``"next batch"``, ``"call"``, ``"trace"``, ``"logs"``, ``"callback"``, ``"save"``,
            ``"restore"``, ``"exchange"``, ``"validation"``, or ``"batch"`` of Keras' own loop.
        what: What is called, such as the class of a step.
        number: The number of the step or of the batch, from 1 on; None if it has none.
        last: The number of the last step, if the call reads its batches by itself.
        shapes: The shapes of the tensors of the batch on the first replica of this process.
        thread: The thread that calls.
        began: The time of the beginning, of ``time.monotonic()``.
        ended: The time of the end; None until then.
        outer: The call that this one is a part of.
    """

    __slots__ = ("began", "ended", "last", "number", "outer", "phase", "shapes", "thread", "what")

    def __init__(
        self, phase: str, what: str, number: int | None, last: int | None, shapes: list[object]
    ) -> None:
        self.phase, self.what, self.number, self.last = phase, what, number, last
        self.shapes = shapes
        self.ended: float | None = None

    def __enter__(self) -> Note:
        """Notes the beginning."""
        self.thread = threading.get_ident()
        self.outer = recorder.innermost.get(self.thread)
        self.began = time.monotonic()
        recorder.innermost[self.thread] = self
        recorder.notes.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        """Notes the end, also of a call that has failed."""
        self.ended = time.monotonic()
        if self.outer is None:
            recorder.innermost.pop(self.thread, None)
        else:
            recorder.innermost[self.thread] = self.outer


class Recorder:
    """The notes of this process.

    Attributes:
        is_on: Whether somebody watches.
        notes: The last calls, in the order in which they began.
        innermost: For each thread that is in a call the innermost one.
        begun: The time at which somebody began to watch.
        describe: Returns for another worker, in JSON types, what this process does; None if
            nobody watches.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.notes: deque[Note] = deque(maxlen=MOST)
        self.innermost: dict[int, Note] = {}
        self.begun = time.monotonic()
        self.describe: Callable[[], dict[str, object]] | None = None

    def begin(self, describe: Callable[[], dict[str, object]]) -> None:
        """Begins to note calls."""
        self.begun, self.describe, self.is_on = time.monotonic(), describe, True

    def end(self) -> None:
        """Notes nothing more, and forgets what was noted."""
        self.is_on, self.describe = False, None
        self.notes.clear()
        self.innermost.clear()

    def longest_wait(self) -> tuple[Note | None, float]:
        """Returns the call in which nothing has begun or ended for longest, and since when.

        It is the innermost one of its thread. Without a call it is None, and the time since which
        no call has begun or ended.
        """
        notes, latest = list(self.notes), self.begun
        waits = {id(note): (note, note.began) for note in list(self.innermost.values())}
        for note in notes:
            latest = max(latest, note.ended or note.began)
            if note.ended is not None and id(note.outer) in waits:
                outer, since = waits[id(note.outer)]
                waits[id(outer)] = outer, max(since, note.ended)
        return min(waits.values(), key=lambda wait: wait[1], default=(None, latest))

    def forget(self, thread: int) -> None:
        """Forgets the calls of a thread that has left them without a word."""
        self.innermost.pop(thread, None)


recorder = Recorder()


def noting(
    phase: str,
    what: str = "",
    number: int | None = None,
    *,
    last: int | None = None,
    tensors: Iterable[object] = (),
) -> AbstractContextManager[object]:
    """Notes what runs in the block, if somebody watches; see ``Note``."""
    if not recorder.is_on:
        return _nothing
    shapes = [getattr(tensor, "shape", None) for tensor in tensors]
    return Note(phase, what, number, last, shapes)
