"""A ``compute_loss`` that a model replaces: found out whether it can be added over replicas."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import any_rows, unpack_batch
from tfmultigpu.errors import LossError
from tfmultigpu.loops.compiled import compile_arguments
from tfmultigpu.loops.own_methods import OWN_METRICS, check_no_loop, own_methods, refused
from tfmultigpu.loops.step_cache import build, get_or_make
from tfmultigpu.loops.tracked_metrics import metrics_that_assign
from tfmultigpu.losses.loss_sum import LossSum
from tfmultigpu.losses.objective import ModelLoss
from tfmultigpu.steps.verification import assigned_variables

__all__ = ["OwnLoss", "own_loss", "runs_as_in_keras"]


@dataclasses.dataclass(frozen=True)
class OwnLoss:
    """A ``compute_loss`` that has one value per row, or a ``LossSum``.

    Attributes:
        loss: The loss for a step.
        metrics: The metrics of the model that it, or a layer, updates.
    """

    loss: ModelLoss
    metrics: tuple[Any, ...]


def own_loss(model: Any, strategy: tf.distribute.Strategy, spec: Any) -> OwnLoss | None:
    """Returns the ``compute_loss`` of a model if it has one value per row, or a ``LossSum``.

    None if the model does not replace it, or if it returns one number for a batch.

    Args:
        model: A compiled model.
        strategy: Its strategy.
        spec: The type specs of a batch.
    """
    if not own_methods(model, "compute_loss"):
        return None
    build(model, strategy, spec)

    def find() -> tuple[OwnLoss | None, Any]:
        return _traced(_model_loss(model), model, strategy, spec), arguments

    arguments = compile_arguments(model)
    key = strategy, id(arguments), vars(model).get("compute_loss"), str(spec)
    found: OwnLoss | None = get_or_make(model, "compute_loss", key, find)[0]
    return found


def runs_as_in_keras(
    model: Any, strategy: tf.distribute.Strategy, function: str, spec: Any = None
) -> bool:
    """Returns whether a model runs by methods that it replaces, as in Keras, not by our steps.

    Args:
        model: A compiled model.
        strategy: Its strategy.
        function: ``"fit"`` or ``"evaluate"``.
        spec: The type specs of a batch; None leaves ``compute_loss`` for a later call.

    Raises:
        LossError: It would have to, but there are several replicas.
    """
    step = "train_step" if function == "fit" else "test_step"
    check_no_loop(model, step.removesuffix("_step"))
    own = own_methods(model, step, *OWN_METRICS)
    if not own and spec is not None and own_methods(model, "compute_loss"):
        own = [] if own_loss(model, strategy, spec) is not None else ["compute_loss"]
    if own and own[0] != step and spec is not None and own_loss(model, strategy, spec):
        raise LossError(
            f"{own[0]} runs in the step of Keras, which would train on the sum of what "
            f"compute_loss returns. Received: {type(model).__name__} with both. Return one number "
            "from compute_loss: tf.reduce_mean(values); or give metrics to model.compile."
        )
    if own and strategy.num_replicas_in_sync > 1:
        raise refused(model, own[0], strategy, function)
    return bool(own)


def _model_loss(model: Any) -> ModelLoss:
    proxy = weakref.proxy(model)  # A step is kept for as long as its model lives, not longer.
    takes_training = "training" in inspect.signature(model.compute_loss).parameters

    def compute(x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Any:
        further = {"training": training} if takes_training else {}
        return proxy.compute_loss(x, y, y_pred, sample_weight, **further)

    return ModelLoss(compute)


def _traced(
    loss: ModelLoss, model: Any, strategy: tf.distribute.Strategy, spec: Any
) -> OwnLoss | None:
    found: list[Any] = []

    def forward(batch: Any) -> None:
        x, y, sample_weight = unpack_batch(batch)
        found.append(loss.compute(x, y, model(x, training=True), sample_weight, True))

    spec = tf.nest.map_structure(lambda one: None if one is None else any_rows(one), spec)
    assigned = assigned_variables(forward, strategy, spec)
    if not _has_rows(found[-1]):
        return None
    return OwnLoss(loss, metrics_that_assign([model], assigned))


def _has_rows(result: Any) -> bool:
    """Returns whether a loss can be added over replicas: its first axis has no fixed length."""
    if isinstance(result, LossSum):
        return True
    if not tf.is_tensor(result):
        return False
    return bool(result.shape.rank) and result.shape[0] is None
