"""Pointing a warning at the line of the user that led to it."""

from __future__ import annotations

import inspect
from pathlib import Path

import tensorflow as tf

__all__ = ["stack_level_of_user"]

_INNER = (str(Path(__file__).parent), str(Path(tf.__file__).parent))


def stack_level_of_user() -> int:
    """Returns the ``stacklevel`` that makes ``warnings.warn``, called next, name the user's line.

    That is the innermost line that is in neither this package nor TensorFlow.
    """
    level = 0
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INNER):
        frame = frame.f_back
        level += 1
    return level
