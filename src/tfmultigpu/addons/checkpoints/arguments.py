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

__all__ = ["check_extra", "check_outside", "check_source", "read_directory"]


def read_directory(directory: str | bytes | os.PathLike[str]) -> Path:
    """Returns the directory as a path, with ``~`` expanded."""
    text = os.fsdecode(directory)
    path = Path(text).expanduser()
    if not text or "://" in text or (path.exists() and not path.is_dir()):
        raise ValueError(
            "directory must be a folder for this run, not a file or a URL. Received: "
            f"directory={text!r}. Mount remote storage and give its path."
        )
    return path


def check_source(step: Any, model: Any, optimizer: Any) -> None:
    """Checks that a model is given, or a train step alone, which has one."""
    if (step is None) == (model is None and optimizer is None):
        raise ValueError(
            "Checkpoints save a model, or a train step with its model. Received: "
            f"model={model!r}, optimizer={optimizer!r} and train_step={step!r}. Write "
            "tmg.Checkpoints(directory, model, model.optimizer) or "
            "tmg.Checkpoints(directory, train_step=train_step)."
        )
    if step is not None and not isinstance(step, (TrainStep, ChainedStep)):
        raise TypeError(
            "train_step must come from tmg.make_train_step or tmg.chain_steps. Received: "
            f"train_step={step!r}."
        )


def check_extra(extra: Any) -> None:
    """Checks that each object has a name, and variables of numbers."""
    if not isinstance(extra, Mapping):
        raise TypeError(
            "extra must be a dict of named objects. Received: "
            f'extra={extra!r}. Write extra={{"accuracy": metric}}.'
        )
    for name, owner in extra.items():
        variables = [] if isinstance(owner, TrainStep) else getattr(owner, "variables", owner)
        for one in variables if isinstance(variables, (list, tuple)) else [variables]:
            variable: Any = one if isinstance(one, tf.Variable) else getattr(one, "value", None)
            unknown = not isinstance(variable, tf.Variable)
            if unknown or variable.dtype in (tf.string, tf.resource, tf.variant):
                raise TypeError(
                    f"Checkpoints save only variables of numbers. Received: extra={{{name!r}: "
                    f'{one!r}}}. Write extra={{"accuracy": metric}}, or give a list of variables.'
                )


def check_outside() -> None:
    """Checks that the caller runs between steps."""
    in_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    if tf.inside_function() or in_replica:
        raise CheckpointError(
            "Checkpoints are saved and restored only between steps. Make this call outside "
            "tf.function and strategy.run."
        )
