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
    frame, level = _frame_of_user()
    if frame is not None:
        file, line, _ = _place_of(frame)
        if file != frame.f_code.co_filename:
            shown_before = frame.f_globals.setdefault("__warningregistry__", {})
            warnings.warn_explicit(message, category, file, line, registry=shown_before)
            return
    warnings.warn(message, category, stacklevel=level)


def place_of_user() -> str:
    """Returns the function of the user that is being traced, with its file and line."""
    frame, _ = _frame_of_user()
    if frame is None:
        return "code without a name"
    file, line, name = _place_of(frame)
    return f"{name} (line {line} of {Path(file).name})"


def _is_of_library(file: str) -> bool:
    """Returns whether a file is of this library, TensorFlow or Keras."""
    import keras

    libraries = [OURS]
    for module in (tf, keras):
        libraries.append(f"{Path(str(module.__file__)).parent}{os.sep}")
    return file.startswith(tuple(libraries))


def _frame_of_user() -> tuple[FrameType | None, int]:
    """Returns the innermost frame of the user, and its ``stacklevel`` for the caller."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and _is_of_library(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return frame, level


def _place_of(frame: FrameType) -> tuple[str, int, str]:
    """Returns the file, the line and the function of the user, as written.

    In a ``tf.function`` AutoGraph runs a copy of the user's code, from a file of its own. Each
    operation knows where its line was written: one is made, in a graph that is thrown away.
    """
    if tf.inside_function():
        with tf.Graph().as_default():
            lines = tf.no_op().traceback
        written = [line for line in lines if not _is_of_library(line.filename)]
        if written and written[-1].filename != frame.f_code.co_filename:
            return written[-1].filename, written[-1].lineno, written[-1].name
    name = frame.f_code.co_qualname.rpartition("<locals>.")[2]
    return frame.f_code.co_filename, frame.f_lineno, name
