"""Keeps what a runner has traced, and says when it is forgotten."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from tfmultigpu.lists import present
from tfmultigpu.steps.batches import BatchFunction
from tfmultigpu.steps.program import Key, Program
from tfmultigpu.steps.tally import Layout, Tallies
from tfmultigpu.types import BatchSpec, Nested, Tensor

MOST = 16  # Records: who trains one layer after another does not keep a program of each.

# Of an element of data to shards and offsets.
Split = Callable[[Any], tuple[list[Nested], Tensor]]


@dataclasses.dataclass(frozen=True)
class LoopKind:
    """What one compiled loop serves.

    Attributes:
        source: The type spec of TensorFlow's iterator.
        elements: What tells its elements apart: how they were cut, or their structure.
        never_ends: Whether the data has no end.
        logs_last: Whether all logs of the last step are computed.
        inside: Whether it is part of a ``tf.function`` of the user.
    """

    source: BatchSpec
    elements: Any
    never_ends: bool
    logs_last: bool
    inside: bool


@dataclasses.dataclass(eq=False)
class Loop:
    """Many batches of one kind of iterator, in a compiled loop or called in turn.

    Attributes:
        kind: What it serves.
        program: The compiled loop; None if there is none yet.
        layouts: What the numbers of each tally are, by the name of the tally.
        seconds: What a step took that was called by itself among many; infinite if it was watched,
            which says that its function is there, and not how long a step takes.
    """

    kind: LoopKind
    program: Program | None = None
    layouts: Mapping[str, Layout] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    def note_program(self, program: Program) -> Program:
        """Notes the compiled loop, and returns it."""
        self.program, self.layouts = program, program.trace.layouts
        return program

    def note_call(self, seconds: float, tallies: Tallies, *, watched: bool) -> None:
        """Notes how long a step took; what is watched takes longer than later steps will."""
        self.seconds = math.inf if watched else seconds
        self.layouts = {name: tally.layout for name, tally in tallies.items() if tally.layout}


@dataclasses.dataclass(eq=False)
class Traced:
    """What is kept for one key of a computation.

    Attributes:
        function: The function of one batch, compiled for each kind of batch.
        loops: The loops over many batches.
    """

    function: BatchFunction
    loops: list[Loop] = dataclasses.field(default_factory=list)

    @property
    def programs(self) -> list[Program]:
        """All that is compiled."""
        return [*self.function.programs.values(), *present(loop.program for loop in self.loops)]


class TraceCache:
    """What a runner has traced, a record for each key of its computation.

    A record stays while another key is the current one: layers that are frozen and trained in turn
    are traced twice in all. Records are let go

    - if they are of another version, such as of other settings of the optimizer, which each of them
      holds as a constant: it does not come back;
    - if there are more than ``MOST``, those that were turned to longest ago;
    - all at once, by ``forget``, if TensorFlow has lost the error of a replica: from then on each
      replica has its own trace.

    Attributes:
        key: What is trained and synchronized now; None before the first batch.
        now: The record of that key.
    """

    def __init__(self, new_function: Callable[[], BatchFunction]) -> None:
        self._new_function = new_function
        self._records: dict[Key, Traced] = {}  # The current one last.
        self.key: Key | None = None
        self.now = Traced(new_function())

    def __len__(self) -> int:
        """Returns for how many keys there is a record."""
        return len(self._records)

    def turn_to(self, key: Key) -> None:
        """Makes a key the current one, and lets records go."""
        self.key = key
        if key in self._records:
            self.now = self._records.pop(key)
        else:
            self.now = Traced(self._new_function())
        for other in list(self._records):
            if other.version != key.version or len(self._records) >= MOST:
                del self._records[other]
        self._records[key] = self.now

    def forget(self) -> None:
        """Lets all records go, and begins with a new one."""
        assert self.key is not None
        self._records = {}
        self.turn_to(self.key)

    def loop_for(self, kind: LoopKind) -> Loop:
        """Returns what computes many batches of a kind of iterator now."""
        for loop in self.now.loops:  # Specs of dicts compare but do not hash.
            if loop.kind == kind:
                return loop
        loop = Loop(kind)
        self.now.loops.append(loop)
        return loop
