"""Losses and metrics from ``model.compile``, and the metrics in the logs of an epoch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching
from tfmultigpu.data.batch_format import unpack_batch
from tfmultigpu.errors import DataError, LossError
from tfmultigpu.lists import by_id
from tfmultigpu.steps.build_model import call_on_shapes
from tfmultigpu.steps.evaluate import EvalStep
from tfmultigpu.steps.features.remat import calling_once
from tfmultigpu.steps.train import TrainStep
from tfmultigpu.strategies.scopes import all_layers, refuse_legacy_keras
from tfmultigpu.strategies.topology import strategy_devices
from tfmultigpu.types import Function, KerasModel, KerasVariable, Options, Shard, Tensor


@dataclasses.dataclass(frozen=True)
class EpochMetrics:
    """The metrics that a step updates.

    Attributes:
        inside: Metrics that are attributes of the models, or of layers in them.
        container: Keras' compiled metrics, or None; their results count if a name occurs twice.
        steps: Steps by their names in a chain; of ``inside`` only what they update counts.
    """

    inside: Sequence[Any]
    container: Any = None
    steps: Mapping[str, TrainStep | EvalStep] = dataclasses.field(default_factory=dict)

    def variables(self) -> list[KerasVariable]:
        """Returns the variables of all metrics."""
        variables: list[KerasVariable] = []
        for owner in self._owners:
            variables += owner.variables
        return variables

    @property
    def _owners(self) -> list[Any]:
        owners = [*self.inside]
        if self.container is not None:
            owners.insert(0, self.container)
        for step in self.steps.values():
            owners += step.metrics
        return list(by_id(owners).values())  # Two steps may share one.

    def reset(self) -> None:
        """Resets all metrics; not traced: some create their variables in their first update.

        TensorFlow would add what was assigned over all workers, to return it, and never frees what
        the threads of such an addition hold: megabytes in a thousand epochs.
        """

        def assign(original: Function, *args: object, **options: object) -> object:
            return original(*args, **options, read_value=False)

        with patching(_compat.variables_summed_when_read(), "assign", assign):
            for owner in self._owners:
                owner.reset_state()

    def results(self) -> dict[str, Tensor]:
        """Returns the result of each metric by its name; traces tell which a step updates."""
        named: dict[str, Any] = {}
        if not self.steps:
            named = {metric.name: metric for metric in self.inside}
        for step_name, step in self.steps.items():
            updated = [metric for metric in self.inside if _is_updated(metric, step)]
            for metric in (*step.metrics, *updated):
                # In a chain behind the name of the step, as its losses.
                name = f"{step_name}_{metric.name}" if step_name else metric.name
                if named.setdefault(name, metric) is not metric:
                    raise ValueError(
                        "Two metrics have one name, so the logs would hold one of them. Received: "
                        f"{name!r} twice. Give one another name: keras.metrics.Mean(name=...)."
                    )
        own = {name: metric.result() for name, metric in named.items()}
        if self.container is None:
            return own
        compiled = self._results()
        return {**compiled, **own, **compiled}  # In Keras' order.

    @functools.cached_property
    def _results(self) -> Function:
        """The results of compiled metrics in one call, which is faster."""
        if not all(map(_compat.is_part_of_keras, map(type, self.container.metrics))):
            return self.container.result  # type: ignore[no-any-return]
        traced: Any = tf.function(lambda: self.container.result(), autograph=False)
        # TensorFlow would take the functions of several models for one that it traces anew.
        concrete: Function = traced.get_concrete_function()
        return concrete


def _is_updated(metric: Any, step: TrainStep | EvalStep) -> bool:
    """Returns whether a step updates a metric, of a model or of a layer in it."""
    if step.assigned is None and metric in metrics_inside(step.model):  # Of a resumed run.
        return any(np.any(variable.numpy()) for variable in metric.variables)
    return not (step.assigned or {}).keys().isdisjoint(map(id, metric.variables))


def metrics_inside(model: KerasModel) -> list[Any]:
    """Returns the metrics that are attributes of a model or of its layers, not compile's."""
    return list(keras.layers.Layer.metrics.fget(model))


def read_compiled(
    model: KerasModel, strategy: tf.distribute.Strategy, batch_spec: Any
) -> tuple[Options, EpochMetrics]:
    """Returns what a compiled model gives to a step for such batches, and the metrics in its logs.

    Creates the metrics that Keras would create, in the scope; ``model.metrics`` holds them
    afterwards. As in Keras, those that its layers update in ``call`` are in the logs too.
    """
    arguments = compile_arguments(model)
    x, y_true, _ = unpack_batch(batch_spec)
    y_pred = _outputs(model, x)
    given: Options = {}
    for name in ("loss", "loss_weights"):
        given[name] = _by_key(arguments.get(name), y_pred)
    _check_reductions(given["loss"])
    # As in Keras, the metrics of the compile before if the last one had none.
    with strategy.scope():
        container, plain, weighted, keys = _compat.compiled_metrics(model, y_true, y_pred)
    if container is not None:
        given["metrics"] = _by_output(plain, y_pred, keys)
        given["weighted_metrics"] = _by_output(weighted, y_pred, keys)
    return given, EpochMetrics(metrics_inside(model), container)


def _check_reductions(losses: Any) -> None:
    for loss in tf.nest.flatten(losses):
        if getattr(loss, "reduction", "") in (None, "none"):
            raise LossError(
                "Keras would train the sum over the rows.",
                f"{type(loss).__name__}(reduction=None)",
                "Write reduction='sum', or 'sum_over_batch_size' for the mean.",
            )


def check_labels(model: KerasModel, batch_spec: Any) -> None:
    """Checks that batches have labels if the compiled losses or metrics need them."""
    arguments = compile_arguments(model)
    needing = [name for name in ("loss", "metrics", "weighted_metrics") if arguments.get(name)]
    x, labels, _ = unpack_batch(batch_spec)
    if needing and labels is None:
        listed = "A list is several inputs, as in Keras. " if isinstance(x, tuple) else ""
        raise DataError(
            f"The model was compiled with {' and '.join(needing)}, but the data has no labels.",
            f"batches of {batch_spec}",
            f"{listed}Give a tuple, (x, y) or (x, y, sample_weight).",
        )


def compile_arguments(model: KerasModel) -> Options:
    """Returns the arguments of ``model.compile``; a new object after each call of it."""
    if not getattr(model, "compiled", False):
        raise LossError(
            "The model is not compiled, so it has no loss and metrics.",
            f"{type(model).__name__} {model.name!r}",
            "Write with strategy.scope(): model.compile('adam', loss='mse'), with your loss; or "
            "with a step tmg.fit(model, data, step=step).",
        )
    arguments = _compat.compile_arguments(model)
    refuse_legacy_keras(arguments)
    return arguments


def _outputs(model: KerasModel, x: Any) -> Shard:
    """Returns the symbolic outputs of a model for inputs of these types."""
    try:
        return call_on_shapes(model, x, training=False)
    except Exception:  # A model that needs real tensors may raise anything: trace it instead.
        traced: Any = tf.function(lambda x: model(x, training=False), autograph=False)
        with calling_once():
            return traced.get_concrete_function(x).structured_outputs


def _by_key(values: Any, y_pred: Shard) -> Any:
    """Returns a list of values for a dict of outputs as a dict, with the keys in Keras' order."""
    if not isinstance(values, (list, tuple)) or not isinstance(y_pred, Mapping):
        return values
    keys = sorted(y_pred)
    return dict(zip(keys, values, strict=True))


def _by_output(lists: list[list[Any]], y_pred: Shard, keys: list[str] | None) -> Any:
    """Returns the metrics of each output in the form that a step takes."""
    if not any(lists):
        return ()
    if isinstance(y_pred, Mapping):
        return dict(zip(keys or sorted(y_pred), lists, strict=True))
    return lists if isinstance(y_pred, (list, tuple)) else lists[0]


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
    model: KerasModel, strategy: tf.distribute.Strategy, spec: Any
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
