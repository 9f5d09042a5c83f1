"""Variables that a forward pass assigns, as a trace of it tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmultigpu.losses.held_assignments import holding
from tfmultigpu.steps.rows import standing_at_all
from tfmultigpu.steps.seeds import sharing_seeds

__all__ = ["assigned_variables"]


def assigned_variables(
    forward: Callable[[Any], Any], strategy: tf.distribute.Strategy, batch_spec: Any
) -> list[Any]:
    """Returns the Keras variables that a forward pass assigns: states of layers, metrics, seeds.

    Args:
        forward: Function of a global batch.
        strategy: The strategy of the model.
        batch_spec: The type specs of a global batch.
    """
    found: list[Any] = []

    def look(batch: Any) -> None:
        with sharing_seeds(strategy), standing_at_all(batch), holding() as held:
            forward(batch)
        found.extend(held.variables)

    traced: Any = tf.function(look, autograph=False)
    traced.get_concrete_function(batch_spec)
    return found
