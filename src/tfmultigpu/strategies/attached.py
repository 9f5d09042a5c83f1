"""What the library keeps with a strategy of the user: one attribute, which holds one record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfmultigpu.types import Function

_NAME = "kept_by_tfmultigpu"


@dataclasses.dataclass
class Attached:
    """What rooms and add-ons keep with a strategy.

    Attributes:
        running: The marks of the batches that ``run`` is called with; None before anybody marks.
        cuts: Compiled functions that cut batches, by the cut and its shares.
        features: Make features of every step, for an add-on such as sharded variables.
        scope: Enters the scope in which models are built; None for ``strategy.scope``.
        refused: The last error by which an add-on refused to create a variable. Keras hides it if
            it builds a model of which it knows only ``call``, and leaves the variable empty.
    """

    running: Any = None
    cuts: dict[Hashable, Function] = dataclasses.field(default_factory=dict)
    features: tuple[Callable[[], object], ...] = ()
    scope: Callable[[], AbstractContextManager[object]] | None = None
    refused: Exception | None = None

    def note_refused(self, error: Exception) -> None:
        """Notes an error that Keras may hide."""
        self.refused = error

    def serve(
        self, feature: Callable[[], object], scope: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """Has every step of the strategy get a feature, and every model be built in a scope."""
        self.features, self.scope = (*self.features, feature), scope


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def attached(strategy: tf.distribute.Strategy) -> Attached:
    """Returns what is kept with a strategy; the first call makes it.

    It is on the strategy itself: what is kept refers to the strategy, so that a weak dictionary
    would keep both for good.
    """
    kept: Attached = vars(strategy).setdefault(_NAME, Attached())
    return kept
