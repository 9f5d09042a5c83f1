"""Arguments of ``model.compile``, the metrics that it builds, and how its losses are divided."""

from __future__ import annotations

import pkgutil
from typing import Any

from tfmultigpu.types import KerasModel, Nested, Options

_OfOutputs = list[list[Any]]


def compile_arguments(model: KerasModel) -> Options:
    """Returns the arguments of ``model.compile`` by name.

    Each call of ``compile`` has a new dict. Private: ``model._compile_config``. The public
    ``model.get_compile_config()`` serialises them, which loses user-defined functions and metrics.
    Without it ``evaluate`` has no loss and no metrics; ``make_eval_step`` does not need it.
    """
    arguments: Options = model._compile_config.config
    return arguments


def compiled_metrics(
    model: KerasModel, y_true: Nested, y_pred: Nested
) -> tuple[Any, _OfOutputs, _OfOutputs, list[str] | None]:
    """Returns the metrics of a compiled model, which Keras builds from the shapes of a batch.

    Private: ``model._compile_metrics`` and in it ``_flat_metrics``, ``_flat_weighted_metrics`` and
    ``_resolved_output_names``. The public ``model.metrics`` does not tell the output of a metric or
    whether sample weights apply, and is empty until Keras has trained. Without them the library
    would guess the meaning of names such as "accuracy", and the names of the results.
    """
    container = model._compile_metrics
    if container is None:
        return None, [], [], None
    if not container.built:
        container.build(y_true, y_pred)
    plain = list(map(_metrics_of, container._flat_metrics))
    weighted = list(map(_metrics_of, container._flat_weighted_metrics))
    return container, plain, weighted, getattr(container, "_resolved_output_names", None)


def _metrics_of(output: Any) -> list[Any]:
    return list(getattr(output, "metrics", ()))


def division_of_losses() -> tuple[Any, tuple[str, str]]:
    """Returns the module and the names of what divides losses by the replicas, and undoes it.

    Private: both, in ``keras.src.losses.loss``. A Keras loss divides its mean by the replicas, for
    loops that add gradients. Without it a ``forward`` that calls one gets a part of the mean.
    """
    module = pkgutil.resolve_name("keras.src.losses.loss")
    return module, ("scale_loss_for_distribution", "unscale_loss_for_distribution")


def waits_for_shapes(metric: Any) -> bool:
    """Returns whether a metric creates variables in its first update.

    Private: ``metric._built`` of ``F1Score`` and ``R2Score``. Without it only metrics without any
    variable are recognised, and ``R2Score`` fails inside a trace.
    """
    return not metric.variables or not getattr(metric, "_built", True)


def without_building() -> Options:
    """Returns attributes of a model with which the loops of Keras do not build it from a batch.

    Private: ``model._symbolic_build``. Keras would build what its ``train_step`` needs, which may
    fail, and offers no other way to leave that out. Without it Keras builds.
    """
    return {"_symbolic_build": lambda **_: None}
