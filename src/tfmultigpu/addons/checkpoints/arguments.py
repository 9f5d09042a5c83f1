"""Checks of the arguments of ``Checkpoints``, made before any training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfmultigpu.errors import CheckpointError
from tfmultigpu.steps.chain import ChainedStep
from tfmultigpu.steps.train_step import TrainStep

__all__ = ["check_extra", "check_one_source", "check_outside", "read_directory"]


def read_directory(directory: str | bytes | os.PathLike[str]) -> Path:
    """Returns the directory as a path, with ``~`` expanded.

    Raises:
        TypeError: It is not a path.
        ValueError: It is empty, a URL or a file.
    """
    text = os.fsdecode(directory)
    path = Path(text).expanduser()
    if not text or "://" in text or (path.exists() and not path.is_dir()):
        raise ValueError(
            "directory must be a folder for this run, not a file or a URL. Received: "
            f"directory={text!r}. Mount remote storage and give its path."
        )
    return path


def check_one_source(step: Any, model: Any, optimizer: Any) -> None:
    """Checks that a model is given, or a train step alone, which has one.

    Raises:
        TypeError: Neither is given, or ``step`` is not a train step.
        ValueError: A model or an optimizer was given beside a step.
    """
    if step is None and model is None:
        raise TypeError(
            "Checkpoints save a model. Received: model=None and train_step=None. Write "
            "tmg.Checkpoints(directory, model, model.optimizer)."
        )
    if step is not None and (model is not None or optimizer is not None):
        raise ValueError(
            "A train step already holds its model and optimizer. Received: train_step beside "
            "model or optimizer. Write Checkpoints(directory, train_step=train_step)."
        )
    if step is not None and not isinstance(step, (TrainStep, ChainedStep)):
        raise TypeError(
            "train_step must come from tmg.make_train_step or tmg.chain_steps. Received: "
            f"train_step={step!r}."
        )


def check_extra(extra: Any) -> None:
    """Checks that each object has a name, and variables of numbers.

    Raises:
        TypeError: It has not.
    """
    cure = 'Write extra={"accuracy": metric}, or give a list of variables instead of the metric.'
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra must be a dict of named objects. Received: extra={extra!r}. {cure}")
    for name, owner in extra.items():
        variables = [] if isinstance(owner, TrainStep) else getattr(owner, "variables", owner)
        for one in variables if isinstance(variables, (list, tuple)) else [variables]:
            variable = one if isinstance(one, tf.Variable) else getattr(one, "value", None)
            unknown = not isinstance(variable, tf.Variable)
            if unknown or variable.dtype in (tf.string, tf.resource, tf.variant):
                raise TypeError(
                    "Checkpoints save only variables of numbers. Received: "
                    f"extra={{{name!r}: {one!r}}}. {cure}"
                )


def check_outside() -> None:
    """Checks that the caller runs between steps.

    Raises:
        CheckpointError: It runs inside a step or a ``tf.function``.
    """
    in_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    if tf.inside_function() or in_replica:
        raise CheckpointError(
            "Checkpoints are saved and restored only between steps. Make this call outside "
            "tf.function and strategy.run."
        )
