"""The line of the user that calls the library: where it warns, and what a message names."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from types import FrameType

import tensorflow as tf


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the user, as Python's ``skip_file_prefixes`` from version 3.12 on."""
    _, level = _frame_of_user()
    warnings.warn(message, category, stacklevel=level)


def place_of_user() -> str:
    """Returns the function of the user that is being traced, with its file and line."""
    frame, _ = _frame_of_user()
    if frame is None:
        return "code without a name"
    name = frame.f_code.co_qualname.rpartition("<locals>.")[2]
    return f"{name} (line {frame.f_lineno} of {Path(frame.f_code.co_filename).name})"


def _frame_of_user() -> tuple[FrameType | None, int]:
    """Returns the innermost frame of the user, and its ``stacklevel`` for the caller."""
    import keras

    packages = (Path(__file__).parent, Path(tf.__file__).parent, Path(keras.__file__).parent)
    prefixes = tuple(map(str, packages))
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(prefixes):
        frame, level = frame.f_back, level + 1
    return frame, level
