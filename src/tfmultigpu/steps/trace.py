"""What is looked for in the trace of a step: effects, and variables without a gradient."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import keras
import tensorflow as tf

from tfmultigpu.errors import LossError
from tfmultigpu.types import KerasVariable, Operation, Tensor


@contextmanager
def noting_effects() -> Iterator[list[Operation]]:
    """Yields a list that has, at the end, the operations of the context that may fail or change."""
    effects: list[Operation] = []
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield effects
    for made in graph.get_operations()[before:]:
        if made.op_def.is_stateful and made.type != "ReadVariableOp":
            effects.append(made)


def check_gradients(variables: list[KerasVariable], gradients: list[Tensor]) -> None:
    """Tells which variables no gradient reaches; Python shows a warning once for a line."""
    without = [v.path for v, g in zip(variables, gradients, strict=True) if g is None]
    if variables and len(without) == len(variables):
        raise LossError(
            "No gradient reaches any trainable variable, so no step would change anything.",
            f"variables {without[:5]}",
            "Compute the loss from the model's outputs by operations that have a gradient: not by "
            "tf.stop_gradient, tf.argmax, tf.round, a cast to integers or numpy.",
        )
    if without:
        warn(
            "No gradient reaches some trainable variables, so they stay as they are. Received: "
            f"variables {without[:5]}. Look for an output without a loss or a tf.stop_gradient; if "
            "it is meant, write layer.trainable = False."
        )
    if not variables:
        warn("The model has no trainable variables: a step changes nothing. Received: trainable=[]")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the user, as Python's ``skip_file_prefixes`` from version 3.12 on."""
    packages = (Path(__file__).parents[1], Path(tf.__file__).parent, Path(keras.__file__).parent)
    prefixes = tuple(map(str, packages))
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(prefixes):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
