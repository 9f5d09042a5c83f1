"""Options of a train step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.optimizers.gradients import is_overwritten
from tfmultigpu.steps.verification import check_verify
from tfmultigpu.types import LossScaling, ShardUpdate, Verify

__all__ = ["StepOptions", "check_float8"]


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options of ``make_train_step``, checked; see there.

    Attributes:
        metrics: Keras metrics updated without sample weights.
        weighted_metrics: Keras metrics updated with sample weights.
        micro_batches: The number of micro-batches of each replica.
        clip_norm: Largest global norm of the gradient, or None.
        loss_scale: ``"dynamic"``, a number or None.
        shard_update: True, False or ``"auto"``.
        reduce_dtype: Dtype in which float32 gradients are sent, or None.
        jit_compile: Whether XLA compiles forward and backward.
        pipeline: Whether micro-batches are computed side by side, on the devices of their layers.
        verify: When to hold a step to one device.
    """

    metrics: Any
    weighted_metrics: Any
    micro_batches: tuple[int, ...]
    clip_norm: float | None
    loss_scale: LossScaling
    shard_update: ShardUpdate
    reduce_dtype: tf.DType | None
    jit_compile: bool
    pipeline: bool
    verify: Verify

    @classmethod
    def of(
        cls,
        *,
        clip_norm: float | None,
        shard_update: ShardUpdate,
        reduce_dtype: str | None,
        verify: Verify,
        **others: Any,
    ) -> StepOptions:
        """Checks the options that need neither a model nor a strategy.

        Raises:
            ValueError: An option has a value that it cannot have.
        """
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm is positive. Received: clip_norm={clip_norm}.")
        if not isinstance(shard_update, bool) and shard_update != "auto":
            raise ValueError(
                f"shard_update is True, False or 'auto'. Received: shard_update={shard_update!r}."
            )
        if reduce_dtype not in (None, "bfloat16"):
            raise ValueError(
                f"reduce_dtype is None or 'bfloat16'. Received: reduce_dtype={reduce_dtype!r}."
            )
        check_verify(verify)
        return cls(
            # Nothing is larger than infinity; the norm is in the logs all the same.
            clip_norm=None if clip_norm == math.inf else clip_norm,
            shard_update=shard_update,
            reduce_dtype=None if reduce_dtype is None else tf.as_dtype(reduce_dtype),
            verify=verify,
            **others,
        )


def check_float8(
    variables: Sequence[Any], strategy: tf.distribute.Strategy, options: StepOptions, scale: Any
) -> None:
    """Checks that float8 layers see all gradients of a step as they are.

    Args:
        variables: The trained variables.
        strategy: Their strategy.
        options: The options of the step.
        scale: The loss scale of the step, or None.

    Raises:
        TfMultiGpuError: Replicas, micro-batches, clipping or a loss scale come between.
    """
    new = [variable.path for variable in variables if is_overwritten(variable)]
    between = {
        f"{strategy.num_replicas_in_sync} replicas": strategy.num_replicas_in_sync > 1,
        f"micro_batches={max(options.micro_batches)}": max(options.micro_batches) > 1,
        f"clip_norm={options.clip_norm}": options.clip_norm is not None,
        "a loss scale": scale is not None,
    }
    found = [name for name, here in between.items() if here]
    if new and found:
        raise TfMultiGpuError(
            "A float8 layer computes its scales from the gradients of a whole batch, which cannot "
            f"be added, scaled or clipped. Received: {new[0]!r} and {', '.join(found)}. Write "
            'make_train_step(model, optimizer, loss) on one replica, or leave out layer.quantize("'
            'float8").'
        )
