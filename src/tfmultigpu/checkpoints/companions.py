"""Several ``Checkpoints`` in one loop: they must resume at steps that belong together."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfmultigpu.checkpoints import storage as files
from tfmultigpu.clusters.process_state import process_state
from tfmultigpu.errors import RestoreMismatchError

__all__ = ["Companions"]

_FIELD = "companions"


class Companions:
    """The other ``Checkpoints`` of a loop: those that count steps between two steps of this one.

    A checkpoint records their steps.

    Attributes:
        directory: The directory of the own checkpoints.
        found: The step that this process restored; None if it restored nothing.
        stored: The steps of the others in the restored checkpoint, by relative directory.
    """

    def __init__(self, directory: Path, step: Callable[[], int]) -> None:
        """Stores the directory, and a function that returns the present step."""
        self.directory = directory.absolute()
        self.step = step
        self.found: int | None = None
        self.stored: dict[str, int] = {}
        self._counts = False
        self._loop: dict[str, Any] = process_state.keep(_FIELD, dict)
        self._made_after = self._loop.get("counts", 0)
        self._others: weakref.WeakSet[Companions] = weakref.WeakSet()

    def load(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Records the restored step and the steps of the others at that time."""
        self.found, self.stored = step, dict(metadata.get(_FIELD, {}))

    def read(self) -> dict[str, Any]:
        """Returns the metadata for a checkpoint."""
        present = {self.name_of(other): other.step() for other in self._others}
        return {_FIELD: {**self.stored, **present}}

    def name_of(self, other: Companions) -> str:
        """Returns the directory of another one, relative to the own."""
        return os.path.relpath(other.directory, self.directory)

    def count(self) -> None:
        """Finds the others; call it at each step, before saving.

        Raises:
            RestoreMismatchError: Another one resumed at a step that does not belong to this one.
        """
        counts = self._loop.get("counts", 0)
        # One that has counted only before this one was made is of an earlier loop.
        last = self._loop["last"]() if counts > self._made_after else None
        self._loop.update(last=weakref.ref(self), counts=counts + 1)
        if last is not None and last is not self and last not in self._others:
            is_known = self.name_of(last) in self.stored or last.name_of(self) in last.stored
            if self._counts or is_known:
                self._others.add(last)
                last._others.add(self)
                self._check(last)
        self._counts = True

    def _check(self, other: Companions) -> None:
        mine, theirs = self.stored.get(self.name_of(other)), other.stored.get(other.name_of(self))
        if mine is None and theirs is None and (self.found is None) == (other.found is None):
            return
        if self.found is not None and other.found is not None and other.found == mine:
            return
        if self.found is not None and other.found is not None and self.found == theirs:
            return
        raise RestoreMismatchError(
            "Two Checkpoints of one loop were restored at different steps of the loop, so their "
            f"models do not belong together. Received: {self.directory} at step {self.found}, and "
            f"{other.directory} at step {other.found}. {self._cure(other)} Write one Checkpoints "
            'for both: tmg.Checkpoints(directory, train_step=step, data=data, extra={"other": '
            "other_step})."
        )

    def _cure(self, other: Companions) -> str:
        """Returns what to do with the files of both."""
        for step, mine in reversed(_steps_of_others(self.directory)):
            for other_step, theirs in reversed(_steps_of_others(other.directory)):
                if mine.get(self.name_of(other)) == other_step or (
                    theirs.get(other.name_of(self)) == step
                ):
                    return (
                        f"The newest steps that belong together are {step} and {other_step}: "
                        "delete the later folders of both directories."
                    )
        return "No checkpoints belong together: give other directories to start over."


def _steps_of_others(directory: Path) -> list[tuple[int, dict[str, int]]]:
    """Returns each step in a directory, and the steps of the others in its checkpoint."""
    read = [
        files.read_manifest(files.folder_of(directory, step, 0))
        for step in files.stored_steps(directory)
    ]
    return [
        (one.step, dict(one.metadata.get(_FIELD, {})))
        for one in read
        if isinstance(one, files.Stored)
    ]
