"""The mirrored strategy that adds in a given way."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.errors import ClusterError

__all__ = ["built_with_nccl", "explaining_tf_config", "mirrored_strategy"]


def mirrored_strategy(devices: Sequence[str], way: str) -> tf.distribute.Strategy:
    """Creates a mirrored strategy that adds in this way."""
    distribute: Any = tf.distribute
    # TensorFlow's default, collectives, works for one set of devices in a process; only "ring"
    # needs them.
    makers: dict[str, Callable[[], Any]] = {
        "nccl": distribute.NcclAllReduce,
        "hierarchical_copy": distribute.HierarchicalCopyAllReduce,
        "one_device": distribute.ReductionToOneDevice,
        "ring": lambda: None,
    }
    names = [f"/device:{name}" for name in devices]
    with explaining_tf_config():
        strategy: tf.distribute.Strategy = distribute.MirroredStrategy(names, makers[way]())
    return strategy


@contextlib.contextmanager
def explaining_tf_config() -> Iterator[None]:
    """Raises a ClusterError if TensorFlow cannot read TF_CONFIG."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise ClusterError(
            "TF_CONFIG is not JSON, and TensorFlow reads it for local strategies too. Received: "
            f"TF_CONFIG={os.environ.get('TF_CONFIG')!r}, {error}. Unset it: "
            'os.environ.pop("TF_CONFIG").'
        ) from error


def built_with_nccl() -> bool:
    """Returns whether this TensorFlow has NCCL."""
    test: Any = tf.test
    return bool(test.is_built_with_gpu_support()) and os.name == "posix"
