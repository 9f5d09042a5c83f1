"""Checks of layers, metrics and an optimizer that behave differently on several replicas."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import unpack_batch
from tfmultigpu.diagnostics.report import Finding
from tfmultigpu.errors import MetricError, TfMultiGpuError
from tfmultigpu.loops.compiled import read_compiled
from tfmultigpu.losses.build_model import prepare_model, symbolic
from tfmultigpu.losses.metric_checks import check_adds, is_from_keras
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.strategies.topology import local_replicas

__all__ = ["fit_findings", "layer_findings", "metric_findings"]

_STEP = "tmg.make_train_step(model, optimizer, loss, strategy)"
_OURS = f"tmg.fit(model, data), or {_STEP}"


def layer_findings(model: Any) -> Iterator[Finding]:
    """Reports layers that compute something else on several replicas."""
    import keras

    layers = all_layers(model)
    local = [
        one.name
        for one in layers
        if isinstance(one, keras.layers.BatchNormalization)
        and one.trainable
        and not getattr(one, "synchronized", False)
    ]
    if local:
        yield Finding(
            "warning",
            "local-batch-norm",
            f"BatchNormalization normalizes over the examples of one replica: layers {local[:5]}.",
            "The result depends on the number of replicas, because each sees a smaller batch.",
            "tmg.synchronize_batch_norm(model), or "
            "keras.layers.BatchNormalization(synchronized=True)",
        )
    stateful = [one.name for one in layers if getattr(one, "stateful", False)]
    if stateful:
        yield Finding(
            "error",
            "stateful-layer",
            f"Stateful layers keep a state for each example of a batch: {stateful[:5]}.",
            "An example's replica changes from batch to batch; TensorFlow fails at the first step.",
            "Leave stateful=True out, or train on one device: tmg.create_strategy(devices=1)",
        )


def fit_findings(model: Any, optimizer: Any, strategy: tf.distribute.Strategy) -> Iterator[Finding]:
    """Reports settings that fail in Keras' ``fit`` on several replicas, or change the result."""
    replicas = strategy.num_replicas_in_sync
    if getattr(model, "compiled", False):
        if model.jit_compile:
            yield _unsupported(
                "fit-jit",
                f"The model was compiled with jit_compile=True, for {replicas} replicas.",
                "'Trying to access resource ... located in device'",
                f"model.compile(..., jit_compile=False); or {_STEP[:-1]}, jit_compile=True)",
            )
        if (model.steps_per_execution or 1) > 1:
            yield _unsupported(
                "fit-steps-per-execution",
                "The model was compiled with steps_per_execution="
                f"{model.steps_per_execution}, for {replicas} replicas.",
                "'merge_call called while defining a new graph or a tf.function'",
                f"model.compile(..., steps_per_execution=1); or step = {_STEP}, and "
                "step.run(iterator, steps)",
            )
        local = len(local_replicas(strategy))
        if local < replicas:
            yield _unsupported(
                "fit-multi-worker",
                f"The strategy spans {replicas // local} workers.",
                "'Attempt to convert a value (PerReplica...'",
                _OURS,
            )
        drops = [one.name for one in all_layers(model) if _draws(one)]
        if drops:
            yield Finding(
                "warning",
                "stock-dropout",
                "In Keras' fit every replica draws the same random numbers, such as dropout masks: "
                f"layers {drops[:5]}.",
                "Example 0 of each replica loses the same units, as does example 1: less noise "
                "than on one device.",
                f"{_OURS}: each example then gets the numbers of one device",
            )
    yield from _optimizer(optimizer, replicas)


def _draws(layer: Any) -> bool:
    """Returns whether a layer of Keras draws random numbers."""
    return any(getattr(layer, name, None) is not None for name in ("seed_generator", "generator"))


def _optimizer(optimizer: Any, replicas: int) -> Iterator[Finding]:
    import keras

    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps = getattr(inner, "gradient_accumulation_steps", None)
    if steps:
        yield _unsupported(
            "fit-accumulation",
            f"The optimizer accumulates gradients, gradient_accumulation_steps={steps}, on "
            f"{replicas} replicas.",
            "'merge_call called while defining a new graph or a tf.function'",
            f"Leave it out, and write {_STEP[:-1]}, micro_batches={steps})",
        )
    if getattr(inner, "use_ema", False) and getattr(inner, "ema_overwrite_frequency", None):
        yield _unsupported(
            "fit-averages",
            "The optimizer overwrites weights with their averages (ema_overwrite_frequency).",
            "'merge_call called while defining a new graph or a tf.function'",
            _OURS,
        )
    clips = [
        name for name in ("clipnorm", "global_clipnorm", "clipvalue") if getattr(inner, name, None)
    ]
    if clips:
        yield Finding(
            "warning",
            "fit-clipping",
            f"Keras' fit clips the gradient of each replica by itself: {', '.join(clips)}.",
            "The clipped parts do not add up to the clipped gradient of the batch.",
            f"{_OURS}, which clips the sum",
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        yield Finding(
            "warning",
            "fit-loss-scale",
            "Keras' LossScaleOptimizer checks the gradients of replica 0 alone for inf and NaN.",
            "An overflow on another replica makes every weight NaN.",
            f'{_STEP[:-1]}, loss_scale="dynamic"), which checks all replicas together',
        )


def _unsupported(code: str, setting: str, error: str, change: str) -> Finding:
    """Reports a setting that Keras' ``fit`` cannot run."""
    return Finding(
        "warning", code, f"{setting} Keras' fit cannot run that.", f"It fails with {error}.", change
    )


def metric_findings(model: Any, strategy: tf.distribute.Strategy, spec: Any) -> Iterator[Finding]:
    """Reports compiled metrics whose state is not a sum over examples, by trying them."""
    if spec is None or not getattr(model, "compiled", False) or not model.built:
        return
    try:
        prepare_model(model, strategy)
        compiled = read_compiled(model, strategy, spec)
        x, y_true, _ = unpack_batch(spec)
        y_pred = model(symbolic(x), training=False)
    except (TfMultiGpuError, TypeError, ValueError, AttributeError, UserWarning):
        return  # Other checks report what does not fit together.
    for metrics in (compiled.metrics, compiled.weighted_metrics):
        for metric, labels, predictions in _pairs(metrics, y_true, y_pred):
            if is_from_keras(metric):
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    check_adds(metric, labels, predictions)
            except MetricError as error:
                fix = error.fix or "Keep sums over the rows, and divide in result()."
                yield Finding(
                    "error",
                    "metric-not-a-sum",
                    str(error).removesuffix(fix).strip(),
                    "Its value depends on the number of replicas.",
                    fix,
                )


def _pairs(metrics: Any, y_true: Any, y_pred: Any) -> Iterator[tuple[Any, Any, Any]]:
    if isinstance(metrics, Mapping):
        for key, one in metrics.items():
            if isinstance(y_true, Mapping) and isinstance(y_pred, Mapping):
                yield from _pairs(one, y_true[key], y_pred[key])
    elif not isinstance(y_pred, (Mapping, list, tuple)):
        yield from ((metric, y_true, y_pred) for metric in tf.nest.flatten(metrics))
