"""Checks of the arguments of ``Checkpoints``, made before any training."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.clusters.sources import cluster_from_environment
from tfmultigpu.errors import CheckpointError, ClusterError, ReplicaDependenceWarning
from tfmultigpu.steps.chain import ChainedStep
from tfmultigpu.steps.train_step import TrainStep

__all__ = [
    "check_extra",
    "check_one_source",
    "check_outside",
    "check_workers",
    "read_directory",
    "read_interval",
    "split_chain",
]


def read_directory(directory: Any) -> Path:
    """Returns the directory as a path, with ``~`` expanded.

    Raises:
        TypeError: It is not a path.
        ValueError: It is empty, a URL or a file.
    """
    if not isinstance(directory, (str, bytes, os.PathLike)):
        raise TypeError(f"directory must be a path. Received: directory={directory!r}.")
    text = os.fsdecode(directory)
    if not text:
        raise ValueError("directory is empty. Received: directory=''. Give one folder per run.")
    if "://" in text:
        raise ValueError(
            f"directory must be a path, not a URL. Received: directory={text!r}. "
            "Mount the storage and give its path."
        )
    path = Path(text).expanduser()
    if path.exists() and not path.is_dir():
        raise ValueError(f"directory is a file. Received: directory={text!r}. Give a folder.")
    return path


def read_interval(name: str, number: Any) -> int | None:
    """Returns an interval, counted in steps or epochs; None means never.

    Raises:
        TypeError: It is not a whole number.
        ValueError: It is less than 1.
    """
    return None if number is None else check_count(name, number, other="None")


def check_one_source(step: Any, model: Any, optimizer: Any) -> None:
    """Checks that a model is given, or a train step alone, which has one.

    Raises:
        TypeError: Neither is given, or ``step`` is not a train step.
        ValueError: A model or an optimizer was given beside a step.
    """
    if step is None:
        if model is None:
            raise TypeError(
                "Checkpoints save a model. Received: model=None and train_step=None. Write "
                "tmg.Checkpoints(directory, model, model.optimizer)."
            )
        return
    if model is not None or optimizer is not None:
        raise ValueError(
            "A train step already holds its model and optimizer. Received: train_step beside "
            "model or optimizer. Write Checkpoints(directory, train_step=train_step)."
        )
    if not isinstance(step, (TrainStep, ChainedStep)):
        raise TypeError(
            "train_step must come from tmg.make_train_step or tmg.chain_steps. Received: "
            f"train_step={step!r}."
        )


def split_chain(step: TrainStep | ChainedStep) -> tuple[TrainStep, dict[str, TrainStep], int]:
    """Returns the first train step, the others by name, and updates of the first for each batch."""
    if isinstance(step, TrainStep):
        return step, {}, 1
    (_, first), *others = step.steps.items()
    return first, dict(others), step.times[0]


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


def check_workers(workers: int) -> None:
    """Warns if the environment describes several workers but the model trains on one.

    Each worker would then train alone on all data and write to the same directory.

    Args:
        workers: The number of workers in the model's strategy.
    """
    try:
        cluster = cluster_from_environment()
    except ClusterError:  # This process does not ask for a cluster.
        return
    if cluster is None or cluster.index is None or workers == len(cluster.workers):
        return
    warnings.warn(
        f"This process is {cluster}, but its model trains on this worker alone. Each worker would "
        "train a separate model on all data. Create the model in the scope of one strategy: "
        "strategy = tmg.create_strategy() directly after the imports, then with "
        "strategy.scope(): .... To train separate models, give each worker its own directory.",
        ReplicaDependenceWarning,
        stacklevel=3,
    )


def check_extra(extra: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the extra objects to save and the extra train steps, by name.

    Raises:
        TypeError: An object has no name or no variables.
    """
    if extra is None:
        return {}, {}
    cure = 'Write extra={"accuracy": metric}, or give a list of variables instead of the metric.'
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra must be a dict of named objects. Received: extra={extra!r}. {cure}")
    steps = {name: one for name, one in extra.items() if isinstance(one, TrainStep)}
    others = {name: one for name, one in extra.items() if name not in steps}
    for name, owner in others.items():
        variables = getattr(owner, "variables", owner)
        for one in variables if isinstance(variables, (list, tuple)) else [variables]:
            variable = one if isinstance(one, tf.Variable) else getattr(one, "value", None)
            if not isinstance(variable, tf.Variable):
                raise TypeError(
                    "Checkpoints save only variables. Received: "
                    f"extra={{{name!r}: {one!r}}}. {cure}"
                )
            if variable.dtype in (tf.string, tf.resource, tf.variant):
                raise TypeError(
                    f"Checkpoints save only numbers. Received: extra[{name!r}] with a variable of "
                    f"dtype {variable.dtype.name}. Leave it out."
                )
    return others, steps
