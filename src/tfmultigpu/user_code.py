"""The line of the user that calls the library: where it warns, and what a message names."""

from __future__ import annotations

import inspect
import os
import warnings
from pathlib import Path
from types import FrameType

import tensorflow as tf

# How names of files begin in this package; without the separator also those of tfmultigpu_more.
OURS = f"{Path(__file__).parent}{os.sep}"


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

    libraries = [OURS]
    for module in (tf, keras):
        libraries.append(f"{Path(str(module.__file__)).parent}{os.sep}")
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(tuple(libraries)):
        frame, level = frame.f_back, level + 1
    return frame, level
