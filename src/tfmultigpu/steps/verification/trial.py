"""A forward pass that changes nothing: what a model and its losses give for a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import tensorflow as tf

from tfmultigpu.losses.held_assignments import holding
from tfmultigpu.losses.objective import stack
from tfmultigpu.losses.recording import recording_calls
from tfmultigpu.steps.verification.effects import check_changes_nothing
from tfmultigpu.steps.weight_reads import bounding_reads

__all__ = ["Forward", "Trial", "dense_outputs", "try_forward"]


class Forward(Protocol):
    """A function to try: a model with or without its losses, such as ``Objective``."""

    @property
    def model(self) -> Any:
        """The Keras model."""

    @property
    def trained(self) -> list[Any]:
        """The variables to train."""

    def __call__(self, batch: Any, /, training: bool) -> tuple[list[Any], Any]:
        """Returns the terms of the loss, and the outputs."""

    def regularization(self, variables: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Returns the weight regularization and its gradients, None for each without."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """The results of one forward pass.

    Attributes:
        terms: The terms of the loss; see ``Objective``.
        stats: Their sums, then their weights; see ``objectives.stack``.
        states: The variables that layers and metrics assigned to, Keras variables.
        overwritten: The trained variables among what they assigned to, which are not in ``states``.
        values: What they would have been assigned.
        outputs: The dense outputs, of a forward pass whose outputs are wanted.
        calls: Each layer call that ended, in order, with its dense outputs.
    """

    terms: Sequence[Any]
    stats: Any
    states: list[Any]
    overwritten: list[Any]
    values: list[Any]
    outputs: list[Any]
    calls: list[tuple[Any, list[Any]]]


def try_forward(
    objective: Forward,
    batch: Any,
    training: bool,
    *,
    row_weight: Any = None,
    weights: Sequence[tuple[Any, Any]] = (),
    record_calls: bool = False,
) -> Trial:
    """Runs a model and its losses in a graph, and assigns nothing.

    Args:
        objective: The model and its losses.
        batch: A batch, or a part of one.
        training: Whether layers behave as in training.
        row_weight: What each row counts; 1 if None.
        weights: Keras variables with the values to compute with in place of theirs.
        record_calls: Whether the outputs of layers are wanted.

    Raises:
        CannotVerifyError: Running the pass would change something all the same.
    """
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    recording: Any = recording_calls() if record_calls else nullcontext([])
    reads = bounding_reads(objective.model.variables)
    with reads, holding(weights) as held, recording as calls:
        terms, outputs = objective(batch, training=training)
    check_changes_nothing(graph, graph.get_operations()[before:])
    states = [one for one in held.variables if not one.trainable]
    overwritten = [one for one in held.variables if one.trainable]
    values = [held.current(one) for one in states]
    dense = [
        (layer, [one for one in dense_outputs(result) if one.graph is graph])
        for layer, result in calls
    ]
    stats = stack(terms, row_weight)
    return Trial(terms, stats, states, overwritten, values, dense_outputs(outputs), dense)


def dense_outputs(outputs: Any) -> list[Any]:
    """Returns the dense floating-point tensors in a nested structure."""
    return [
        one
        for one in tf.nest.flatten(outputs)
        if isinstance(one, tf.Tensor) and one.dtype.is_floating
    ]
