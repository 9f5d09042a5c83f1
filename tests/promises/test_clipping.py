"""Clipping acts on the gradient of the global batch, once, however it is asked for."""

from __future__ import annotations

import functools

import keras
import pytest
from law.model import Training, regression, small
from law.pair import Pair

LIMIT = 0.5
SIZES = (7, 1, 2, 5, 3)

# Fails if a replica clips its own part, the parts are clipped and then the sum again, a limit is
# for the sum of N gradients, or logs["gradient_norm"] is the norm of what clipping has left.
CASES: dict[str, tuple[int, dict[str, float], float | None]] = {
    "clip_norm": (3, {}, LIMIT),
    "clip_norm of make_train_step before clipvalue of the optimizer": (2, {"clipvalue": 0.1}, 1.0),
    "clipnorm": (3, {"clipnorm": LIMIT}, None),
    "global_clipnorm": (2, {"global_clipnorm": LIMIT}, None),
    "clipvalue": (3, {"clipvalue": LIMIT / 4}, None),
}


def training(options: dict[str, float], clip_norm: float | None) -> Training:
    return small(keras.optimizers.SGD(0.1, momentum=0.9, **options), clip_norm=clip_norm)


@pytest.mark.parametrize("case", CASES)
def test_the_global_gradient_is_clipped_once(case: str) -> None:
    replicas, options, clip_norm = CASES[case]
    batches = [(x.copy(), y.copy()) for x, y in regression(SIZES)]
    for n, (x, y) in enumerate(batches):
        y[: len(y) // 2 + 1] *= 20.0
        if n == 1:  # One row, nearly no gradient: a step that must stay as it is.
            x *= 1e-3
            y *= 1e-3
    pair = Pair(functools.partial(training, options, clip_norm), batches[0], replicas)
    pair.hold(batches)  # Logs too: the norm is that before clipping.
    pair.reset()
    norms = [log["gradient_norm"] for log in pair.plain.train(batches)]
    assert max(norms) > 4 * LIMIT, "else nothing is clipped"
    assert min(norms) < LIMIT / 4, "else everything is clipped"
