"""Normalization of batches, switched off in a check, so that what else depends on the cut shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching
from tfmultigpu.types import Function, KerasLayer, Nested, Tensor


class OwnMoments:
    """A switch, in the trace of a step: the moments of a replica's own rows, or 0 and 1.

    A plain ``BatchNormalization`` normalizes by the rows of its replica, and on one device by all
    rows, so with moments nothing else could be compared. A step traced once more without them would
    double the time of the first one; the switch costs four small operations for each layer.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        """Has steps take the moments, as a variable on each replica says."""
        with strategy.scope():
            self._taken = tf.Variable(tf.constant(value=True), trainable=False, name="own_moments")

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Has steps that were traced with the switch take 0 and 1."""
        self._taken.assign(tf.constant(value=False))
        try:
            yield
        finally:
            self._taken.assign(tf.constant(value=True))

    @contextmanager
    def switched(self) -> Iterator[None]:
        """Traces the moments of layers with the switch."""
        reads: dict[Any, Tensor] = {}  # One for each graph, of loops and branches too.

        def moments(
            original: Function, layer: KerasLayer, inputs: Nested, mask: Tensor
        ) -> tuple[Tensor, Tensor]:
            mean, variance = original(layer, inputs, mask)
            if layer.synchronized:
                return mean, variance
            graph = tf.compat.v1.get_default_graph()
            if graph not in reads:
                reads[graph] = tf.convert_to_tensor(self._taken)
            mean = tf.where(reads[graph], mean, tf.zeros_like(mean))
            return mean, tf.where(reads[graph], variance, tf.ones_like(variance))

        with patching(*_compat.moments_of_batch(), moments):
            yield
