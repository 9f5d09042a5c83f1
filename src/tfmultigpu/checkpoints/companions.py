"""Refusal of two ``Checkpoints`` in one loop: a kill would leave them at different steps."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

from tfmultigpu.errors import CheckpointError

__all__ = ["Turns"]

_counted_last = threading.local()


class Turns:
    """The steps of one ``Checkpoints``, between which no other may count steps."""

    def __init__(self, directory: Path) -> None:
        """Stores the directory of the checkpoints."""
        self.directory = directory
        self._counts = False

    def count(self) -> None:
        """Records a step; call it before saving.

        Raises:
            CheckpointError: Another one has counted a step since the last step of this one.
        """
        reference = getattr(_counted_last, "turns", None)
        last = None if reference is None else reference()
        if self._counts and last is not None and last is not self:
            raise CheckpointError(
                "Two Checkpoints count the steps of one loop, so a kill between their saves would "
                f"leave the models at different steps. Received: {self.directory} and "
                f"{last.directory}. Write one: tmg.Checkpoints(directory, train_step=step, "
                'data=data, extra={"other": other_step}).'
            )
        self._counts = True
        _counted_last.turns = weakref.ref(self)
