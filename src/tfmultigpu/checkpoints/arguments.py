"""What a run of checkpoints is given, checked before anything is trained."""

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

__all__ = [
    "check_extra",
    "check_outside",
    "check_step",
    "check_workers",
    "read_directory",
    "read_interval",
]


def read_directory(directory: Any) -> Path:
    """Returns the folder that was given, in which ``~`` is the home folder.

    Raises:
        TypeError: It is no path.
        ValueError: It is empty, an address, or a file.
    """
    if not isinstance(directory, (str, bytes, os.PathLike)):
        raise TypeError(f"directory must be a path. Received: directory={directory!r}.")
    text = os.fsdecode(directory)
    if not text:
        raise ValueError("directory must name a folder of this run alone. Received: directory=''.")
    if "://" in text:
        raise ValueError(
            "Checkpoints are folders of a file system. Received: "
            f"directory={text!r}. Mount it, and give the path."
        )
    path = Path(text).expanduser()
    if path.exists() and not path.is_dir():
        raise ValueError(f"directory is a file. Received: directory={text!r}. Give a folder.")
    return path


def read_interval(name: str, number: Any) -> int | None:
    """Returns after how many to do something; None for never.

    Raises:
        TypeError: It is not a whole number.
        ValueError: It is less than 1.
    """
    return None if number is None else check_count(name, number, other="None")


def check_step(step: Any, model: Any, optimizer: Any) -> None:
    """Checks that this is a train step, and alone.

    Raises:
        TypeError: It is something else.
        ValueError: A model or an optimizer was given beside it.
    """
    if model is not None or optimizer is not None:
        raise ValueError(
            "A train step brings its model and its optimizer. Received: train_step beside "
            "model or optimizer. Leave these out."
        )
    if not (hasattr(step, "model") and hasattr(step, "optimizer")):
        raise TypeError(
            f"train_step must be what make_train_step returned. Received: train_step={step!r}."
        )


def check_outside() -> None:
    """Checks that this runs between steps.

    Raises:
        CheckpointError: It runs in a step or in a ``tf.function``.
    """
    in_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    if tf.inside_function() or in_replica:
        raise CheckpointError(
            "Checkpoints are saved and restored between steps. Call this outside of "
            "tf.function and of strategy.run."
        )


def check_workers(workers: int) -> None:
    """Warns where the environment describes several workers, and the model is of one alone.

    Each then trains on everything by itself, and all write into the same folder.

    Args:
        workers: How many the strategy of the model has.
    """
    try:
        cluster = cluster_from_environment()
    except ClusterError:  # Nobody asked for one here.
        return
    if cluster is None or cluster.index is None or workers == len(cluster.workers):
        return
    warnings.warn(
        f"This process is {cluster}, but its model is not trained together with the others: each "
        "worker trains a model of its own, on all of the data. Make the model in the scope of a "
        "strategy over all: strategy = tmg.create_strategy(), directly after the imports, and "
        "with strategy.scope(). If that is meant, give each worker a directory of its own.",
        ReplicaDependenceWarning,
        stacklevel=3,
    )


def check_extra(extra: Any) -> dict[str, Any]:
    """Returns further objects to save, by name.

    Raises:
        TypeError: They have no names, or no variables.
    """
    if extra is None:
        return {}
    cure = 'Write extra={"accuracy": metric}, or a list of variables in place of the metric.'
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra gives each object a name. {cure} Received: extra={extra!r}.")
    for name, owner in extra.items():
        variables = getattr(owner, "variables", owner)
        for one in variables if isinstance(variables, (list, tuple)) else [variables]:
            kept = one if isinstance(one, tf.Variable) else getattr(one, "value", None)
            if not isinstance(kept, tf.Variable):
                raise TypeError(f"Only variables are saved. {cure} Received: {name!r}: {one!r}.")
            if kept.dtype in (tf.string, tf.resource, tf.variant):
                raise TypeError(
                    f"Only numbers are saved. Received: {name!r}, with a variable of "
                    f"{kept.dtype.name}."
                )
    return dict(extra)
