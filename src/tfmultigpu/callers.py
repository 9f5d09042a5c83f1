"""Pointing a warning at the line of the user that led to it."""

from __future__ import annotations

import sys
from pathlib import Path

import tensorflow as tf

__all__ = ["stack_level_of_user"]

_INNER = (str(Path(__file__).parent), str(Path(tf.__file__).parent))


def stack_level_of_user() -> int:
    """Returns the ``stacklevel`` that makes ``warnings.warn``, called next, name the user's line.

    That is the innermost line that is in neither this package nor TensorFlow.
    """
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
        frame = frame.f_back
        level += 1
    return level
