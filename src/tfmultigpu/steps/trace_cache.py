"""Keeps what a runner has traced, and says when it is forgotten."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from tfmultigpu.steps.batches import BatchFunction
from tfmultigpu.steps.kept_batch import KeptBatch
from tfmultigpu.steps.tally import Layout, Tallies
from tfmultigpu.steps.values import Trace
from tfmultigpu.types import BatchSpec, Nested, Tensor

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
    """

    source: BatchSpec
    elements: Any
    never_ends: bool
    logs_last: bool


@dataclasses.dataclass(frozen=True)
class Loop:
    """A compiled loop over batches.

    Attributes:
        kind: What it serves.
        split: What cuts an element of its iterator.
        run: The function.
        most: The most steps of one call.
        kept: The batch that it computes, if one trace serves all replicas, whose error may be
            lost; nothing otherwise.
    """

    kind: LoopKind
    split: Split
    run: Any
    most: float = math.inf
    kept: list[KeptBatch] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Traced:
    """What is kept for one key of a computation.

    Attributes:
        function: The function of one batch, compiled for each kind of batch.
        loops: The compiled loops over many batches.
        trace: What the last trace of any of them found.
        layouts: What the numbers of each tally are, by the name of the tally.
        seconds: What a step took that was called by itself among many; infinite if it was watched,
            which says that its function is there, and not how long a step takes.
    """

    function: BatchFunction
    loops: list[Loop] = dataclasses.field(default_factory=list)
    trace: Trace = dataclasses.field(default_factory=Trace)
    layouts: Mapping[str, Layout] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    def begin(self, *, why_each: str, logs_last: bool) -> Trace:
        """Returns a new trace, in the place of the last one."""
        self.trace = Trace(why_each=why_each, logs_last=logs_last)
        return self.trace

    def note_layouts(self, tallies: Tallies) -> None:
        """Notes what the numbers of each tally are."""
        self.layouts = {name: tally.layout for name, tally in tallies.items() if tally.layout}

    def note_call(self, seconds: float, *, watched: bool) -> None:
        """Notes how long a step took; what is watched takes longer than later steps will."""
        self.seconds = math.inf if watched else seconds

    def loop_for(self, kind: LoopKind) -> Loop | None:
        """Returns the loop that serves a kind of iterator, if there is one."""
        for loop in self.loops:  # Specs of dicts compare but do not hash.
            if loop.kind == kind:
                return loop
        return None


class TraceCache:
    """What a runner has traced, a record for each key of its computation.

    A record stays while another key is the current one: layers that are frozen and trained in turn
    are traced twice in all. All records go at once, by ``forget``:

    - if a setting of the optimizer has changed, which each of them holds as a constant;
    - if TensorFlow has lost the error of a replica: from then on each replica has its own trace.

    Attributes:
        key: What is trained and synchronized now; None before the first batch.
        now: The record of that key.
    """

    def __init__(self, new_function: Callable[[], BatchFunction]) -> None:
        self._new_function = new_function
        self._records: dict[Hashable, Traced] = {}
        self.key: Hashable = None
        self.now = Traced(new_function())

    def __len__(self) -> int:
        """Returns for how many keys there is a record."""
        return len(self._records)

    def turn_to(self, key: Hashable) -> None:
        """Makes a key the current one."""
        if key not in self._records:
            self._records[key] = Traced(self._new_function())
        self.key, self.now = key, self._records[key]

    def forget(self) -> None:
        """Forgets all records; then ``turn_to`` begins a new one."""
        self._records = {}
