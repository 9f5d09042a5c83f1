"""Private attributes of Keras that only this add-on needs; ``_compat`` has the others.

Each function names the attribute, why the public API is not enough, and what happens without it.
"""

from __future__ import annotations

from typing import Any


def compile_arguments(model: Any) -> Any:
    """Returns the arguments of ``model.compile`` by name.

    Each call of ``compile`` has a new dict. Private: ``model._compile_config``. The public
    ``model.get_compile_config()`` serialises them, which loses user-defined functions and metrics.
    Without it ``evaluate`` has no loss and no metrics; ``make_eval_step`` does not need it.
    """
    return model._compile_config.config


def compiled_metrics(
    model: Any, y_true: Any, y_pred: Any
) -> tuple[Any, list[list[Any]], list[list[Any]], list[str] | None]:
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
    plain, weighted = (
        [[] if one is None else list(one.metrics) for one in lists]
        for lists in (container._flat_metrics, container._flat_weighted_metrics)
    )
    return container, plain, weighted, getattr(container, "_resolved_output_names", None)
