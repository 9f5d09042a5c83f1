"""Compiling the forward and backward pass of ``fit`` by XLA, as Keras decided in ``compile``."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfmultigpu.addons.loops.compiled import compile_arguments
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.strategies.topology import strategy_devices
from tfmultigpu.types import BatchSpec, KerasModel


@dataclasses.dataclass(frozen=True)
class Compilation:
    """The decision about compiling a step by XLA.

    Attributes:
        by_xla: Whether it is.
        reason: Why, for a person.
    """

    by_xla: bool
    reason: str


def choose_compilation(
    model: KerasModel, strategy: tf.distribute.Strategy, spec: BatchSpec
) -> Compilation:
    """Returns what ``model.compile(jit_compile=)`` means for batches of these type specs.

    Keras decides about ``"auto"``, and keeps the decision: it compiles where TensorFlow sees a GPU,
    the model is on no strategy, and all layers and settings allow it. Asked for by True, it still
    does not if a layer does not allow it. Text in a batch, on which XLA fails, rules it out
    here.

    Args:
        model: A compiled model.
        strategy: The strategy that it was created on.
        spec: The type specs of a batch.
    """
    if not model.jit_compile:
        return Compilation(False, _why_not(model, strategy))
    dtypes = [getattr(leaf, "dtype", None) for leaf in tf.nest.flatten(spec)]
    if tf.string in dtypes:
        return Compilation(False, "XLA has no strings, and there are some in a batch")
    return Compilation(True, "compile(jit_compile=True), or 'auto' on a GPU without a strategy")


def _why_not(model: KerasModel, strategy: tf.distribute.Strategy) -> str:
    """Returns the first reason that Keras may have had, which does not keep it."""
    layers = [layer.name for layer in all_layers(model) if not layer.supports_jit]
    if layers:
        return f"XLA cannot compile the layer {layers[0]!r}"
    if compile_arguments(model).get("jit_compile"):
        return "Keras compiles no such model by XLA here"
    if not tf.config.list_physical_devices("GPU"):
        return "compile(jit_compile=False), or 'auto' without a GPU"
    if strategy_devices(strategy):
        return "compile(jit_compile=False), or 'auto' on a strategy, where Keras never compiles"
    return "compile(jit_compile=False)"
