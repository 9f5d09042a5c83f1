"""A compiled function, which knows its own trace: what to ask is asked of the function that ran."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from tfmultigpu.steps.kept_batch import KeptBatch
from tfmultigpu.steps.values import Trace
from tfmultigpu.types import ConcreteFunction


class Key(NamedTuple):
    """What the traces of a computation take in besides the batch.

    Attributes:
        version: What does not come back: settings of an optimizer, the variables of a model. The
            programs of other versions are let go.
        kind: What may come back, such as layers that are frozen and trained in turn.
    """

    version: Hashable
    kind: Hashable


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled function, for one kind of batch or of iterator.

    Attributes:
        run: The concrete function.
        trace: What its own trace found, where it was made among it.
        most: The most steps of one call.
        kept: The batch that a loop computes, if one trace serves all replicas, whose error may be
            lost; nothing otherwise.
    """

    run: ConcreteFunction
    trace: Trace
    most: float = math.inf
    kept: Sequence[KeptBatch] = ()

    @property
    def loses_errors(self) -> bool:
        """True if TensorFlow may report another error than the replica had that failed."""
        return bool(self.trace.functions)
