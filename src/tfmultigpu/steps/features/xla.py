"""XLA: forward and backward pass of each replica are compiled."""

from __future__ import annotations

import tensorflow as tf

from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.lists import by_id
from tfmultigpu.steps.features.feature import BoundStep, Feature
from tfmultigpu.steps.values import Replica, Rows, Trace
from tfmultigpu.strategies.collectives import refusing_to_meet
from tfmultigpu.types import KerasVariable, Nested, Scalar, Shard


class CompileByXla(Feature):
    """Compiles forward and backward pass of each replica by XLA."""

    def bind(self, step: BoundStep) -> None:
        """Keeps the step, for its metrics."""
        self._step = step

    def on_one_device(self) -> Feature:
        """Returns the same: XLA draws other random numbers than TensorFlow."""
        return CompileByXla()

    def around_replica(self, replica: Replica) -> Replica:
        """Returns the function compiled, one of its own for each replica and its variables."""
        error = TfMultiGpuError(
            "XLA cannot compile what needs the other replicas, such as gather_rows or "
            "BatchNormalization(synchronized=True).",
            "jit_compile=True",
            "Leave it out.",
        )

        def compiled(
            shard: Shard, rows: Rows, state: Nested, factor: Scalar, total: Scalar, *, trace: Trace
        ) -> Nested:
            if not state and not tf.distribute.has_strategy():
                # On one device, read beforehand: XLA cannot read the part on another device.
                trace.note_state(self._metric_variables())
                state = tuple(tf.convert_to_tensor(v.value) for v in trace.state)

            def run(*args: object) -> Nested:
                return replica(*args, trace=trace)

            with refusing_to_meet(error):
                function = tf.function(run, jit_compile=True, autograph=False)
                return function(shard, rows, state, factor, total)

        return compiled

    def _metric_variables(self) -> list[KerasVariable]:
        """Returns the variables of the metrics of step and model, each once."""
        known: dict[int, KerasVariable] = {}
        for metric in (*self._step.metrics, *getattr(self._step.model, "metrics", ())):
            known |= by_id(metric.variables)
        return list(known.values())
