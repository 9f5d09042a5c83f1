"""What the loops have in common: each trains its own model and says how long it took."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

__all__ = ["STEPS_PER_CALL", "Contender", "make_optimizer", "timed"]

STEPS_PER_CALL = 10


@dataclasses.dataclass(frozen=True)
class Contender:
    """A training loop that goes on where it stopped.

    Attributes:
        name: What the record calls it.
        model: The model it trains, its own.
        train: Trains for so many steps (a multiple of ``STEPS_PER_CALL``), waits until they are
            done, and returns the seconds one step took.
    """

    name: str
    model: Any
    train: Callable[[int], float]


def make_optimizer(model: Any) -> Any:
    """Returns an optimizer with its variables made; call it in the strategy's scope.

    Variables first made inside ``strategy.run`` end in an error about a placeholder.
    """
    import keras

    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    return optimizer


def timed(loop: Callable[[int], Any]) -> Callable[[int], float]:
    """Returns ``Contender.train`` for a loop that returns its last loss."""

    def train(steps: int) -> float:
        began = time.perf_counter()
        float(loop(steps))  # reading the loss waits for the step, and so for all before it
        return (time.perf_counter() - began) / steps

    return train
