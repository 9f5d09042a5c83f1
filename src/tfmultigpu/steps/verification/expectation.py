"""Expected results of a step, and the argument that asks for them."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfmultigpu.steps.batch_function import Shards
from tfmultigpu.steps.verification.one_device import Computed

__all__ = ["Expected", "check_verify"]


def check_verify(verify: Any) -> None:
    """Checks the argument ``verify`` of a step.

    Raises:
        ValueError: It is neither True, False, ``"first"`` nor ``"gradients"``.
    """
    if not isinstance(verify, bool) and verify not in ("first", "gradients"):
        raise ValueError(
            f"verify is 'first', True, False or 'gradients'. Received: verify={verify!r}."
        )


@dataclasses.dataclass(frozen=True)
class Expected:
    """The expected results of a step.

    Attributes:
        shards: The batch the step is about to take, as this process has it.
        batch: All rows of it; None if they were not put together.
        computed: What one device computes for them, or None.
        gradients: What the replicas compute for the gradients, if they are to be compared.
        loss_scale: What the step multiplies the loss by.
        reason: Why only a part of the batch can be compared.
        failure: Why nothing can be compared.
    """

    shards: Shards
    batch: Any = None
    computed: Computed | None = None
    gradients: dict[str, Any] | None = None
    loss_scale: Any = 1.0
    reason: str = ""
    failure: str = ""
