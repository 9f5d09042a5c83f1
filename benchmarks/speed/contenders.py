"""What the loops have in common: each trains its own model and says how long it took."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import time
from collections.abc import Callable
from typing import Any

__all__ = ["STEPS_PER_CALL", "Contender", "fitting", "make_optimizer", "timed"]

STEPS_PER_CALL = 10


@dataclasses.dataclass(frozen=True)
class Contender:
    """A training loop that goes on where it stopped.

    Attributes:
        name: What the record calls it.
        model: The model it trains, its own.
        train: Trains for so many steps (a multiple of ``STEPS_PER_CALL``), waits until they are
            done, and returns the seconds one step took.
        longer: How many times the steps of the others a turn of it takes.
    """

    name: str
    model: Any
    train: Callable[[int], float]
    longer: int = 1


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


class _Terminal(io.StringIO):
    """Takes what a progress bar writes for a person; files get less of it."""

    def isatty(self) -> bool:
        return True


def fitting(
    name: str, model: Any, workload: Any, fit: Callable[..., Any], endless: bool
) -> Contender:
    """Returns what trains by calls of ``fit``, with its progress bar and metrics on.

    A turn is a call of two epochs; the second one is timed, whole. What a call sets up before its
    first step is left out.

    Args:
        name: What the record calls it.
        model: The model, compiled.
        workload: The workload.
        fit: Takes data, ``epochs``, ``steps_per_epoch``, ``verbose`` and ``callbacks``.
        endless: Whether it gets data without end; otherwise data that ends with the epoch.
    """
    import keras

    class Clock(keras.callbacks.Callback):
        """Notes the end of each epoch; it has no hook around batches, so that none needs a call."""

        def __init__(self) -> None:
            super().__init__()
            self.ends: list[float] = []

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())

    data = workload.dataset()
    pieces: dict[int, Any] = {}

    def train(steps: int) -> float:
        clock = Clock()
        # The first call is to train on the batches that others train on: one epoch of them.
        epochs = 2 if pieces else 1
        many = steps // epochs
        pieces.setdefault(many, data if endless else data.take(many))
        with contextlib.redirect_stdout(_Terminal()):
            fit(
                pieces[many],
                epochs=epochs,
                steps_per_epoch=many if endless else None,
                verbose=1,
                callbacks=[clock],
            )
        return (clock.ends[-1] - clock.ends[0]) / many

    return Contender(name, model, train, longer=2 * workload.epoch // workload.steps)
