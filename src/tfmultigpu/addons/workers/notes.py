"""Notes of workers to the launcher: empty files, the first of which it names in TFMULTIGPU_JOINED.

The launcher knows only how its processes end, and their output is for a person.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

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
