"""What a trace of the code of the user finds, the same on every replica."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfmultigpu.errors import LossError, TfMultiGpuError
from tfmultigpu.steps.tally import Layout


@dataclasses.dataclass(eq=False)
class Trace:
    """What the code of the user turned out to do, the same on every replica.

    Tracing changes nothing else: ``replica`` calls ``note``, and draws add to ``alike``.

    Attributes:
        layout: The terms of the loss; None before the first replica.
        present: For each target, for each trained variable, whether it has a gradient.
        state: The Keras variables that layers, draws and metrics assign.
        updated: The trained variables that have a gradient, of a target or a penalty.
        alike: The ``id`` of those that every micro-batch finds as the first does: seeds.
    """

    layout: Layout | None = None
    present: list[list[bool]] = dataclasses.field(default_factory=list)
    state: list[Any] = dataclasses.field(default_factory=list)
    updated: tuple[Any, ...] = ()
    alike: set[int] = dataclasses.field(default_factory=set)

    def note(self, layout: Layout, gradients: Any, state: Sequence[Any]) -> None:
        """Takes what one replica found."""
        present = [[gradient is not None for gradient in each] for each in gradients]
        if self.layout is None:
            self.layout, self.present, self.state = layout, present, list(state)
            return
        known = {id(variable) for variable in self.state}
        strange = [variable.path for variable in state if id(variable) not in known]
        if strange or present != self.present:
            raise TfMultiGpuError(
                "The model does something else each time that it is traced, and replicas and "
                f"micro-batches must all do the same. Received: {strange or 'other gradients'}. "
                "Create seed generators, metrics and variables once, in the scope of the strategy, "
                "not in call or forward: seeds = keras.random.SeedGenerator(seed)."
            )


@contextmanager
def noting_effects() -> Iterator[list[Any]]:
    """Yields a list that has, at the end, the operations of the context that may fail or change."""
    effects: list[Any] = []
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield effects
    made = [op for op in graph.get_operations()[before:] if op.op_def.is_stateful]
    effects += [op for op in made if op.type != "ReadVariableOp"]


def check_gradients(variables: list[Any], gradients: list[Any]) -> None:
    """Tells which variables no gradient reaches; Python shows a warning once for a line."""
    without = [v.path for v, g in zip(variables, gradients, strict=True) if g is None]
    if variables and len(without) == len(variables):
        raise LossError(
            "No gradient reaches any trainable variable, so no step would change anything. "
            f"Received: variables {without[:5]}. Compute the loss from the model's outputs by "
            "operations that have a gradient: not by tf.stop_gradient, tf.argmax, tf.round, "
            "a cast to integers or numpy."
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
    prefixes = tuple(str(package) for package in packages)
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(prefixes):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
