"""float16 with dynamic scaling, and bfloat16, on parts of a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases.images import batches

from gpu_checks.place import Place
from gpu_checks.replicas import with_tf32
from gpu_checks.trainings import step_on

FLOAT16, BFLOAT16 = 2e-2, 6e-2  # Ten bits, or seven, of a product: of losses, not weights.


def float16_dynamic(place: Place) -> dict[str, Any]:
    """An overflow on the last replica alone skips the step on all and halves the scale."""
    step = step_on(place.strategy(), {"loss_scale": "dynamic"}, dtype="mixed_float16")
    weighted = [(x, y, np.ones(len(x), "float32")) for x, y in batches(24, 24, 17, 24)]
    first_batch, *others = weighted
    first = step(first_batch)
    assert float(first["skipped"]) == 0.0, first
    scale = float(first["loss_scale"])
    before = [variable.numpy() for variable in step.model.variables]
    weight = first_batch[2].copy()
    weight[-1] = np.inf  # the last row is on the last replica
    logs = step((*first_batch[:2], weight))
    assert float(logs["skipped"]) == 1.0, "an infinite gradient on the last replica was applied"
    for variable, value in zip(step.model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, err_msg="a skipped step trained")
    losses = [float(first["loss"])]
    for batch in others:
        logs = step(batch)
        assert float(logs["skipped"]) == 0.0, logs
        losses.append(float(logs["loss"]))
    halved = float(logs["loss_scale"])
    assert halved == scale / 2, f"the scale went from {scale} to {halved}, not to its half"
    iterations = int(step.optimizer.iterations.numpy())
    assert iterations == 4, f"{iterations} optimizer steps counted, 4 were made"
    return {"scale": scale, "after": halved, **_close(place, losses, FLOAT16)}


def bfloat16(place: Place) -> dict[str, Any]:
    """The losses of bfloat16 are those of float32 within its seven bits."""
    step = step_on(place.strategy(), dtype="mixed_bfloat16")
    losses = [float(step(batch)["loss"]) for batch in batches(24, 24, 17, 24)]
    return _close(place, losses, BFLOAT16)


def _close(place: Place, losses: list[float], allowed: float) -> dict[str, Any]:
    with_tf32(False)
    full = step_on(place.strategy())
    expected = [float(full(batch)["loss"]) for batch in batches(24, 24, 17, 24)]
    off = float(np.max(np.abs(np.array(losses) / np.array(expected) - 1)))
    assert off <= allowed, f"losses {losses} are off float32's {expected} by {off:.3f} of them"
    return {"losses_off": off, "allowed": allowed}
