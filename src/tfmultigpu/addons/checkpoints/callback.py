"""The Keras callback that saves and resumes a run in ``fit``."""

from __future__ import annotations

from typing import Any

import keras

from tfmultigpu.types import FitStart, RunningFit

__all__ = ["CheckpointCallback"]

# Several workers vote on the stop signal at least once in this many steps.
_STEPS_BETWEEN_VOTES = 10


class CheckpointCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts the steps and epochs of ``fit`` for a run; see ``RunningFit``.

    Attributes:
        every_batches: The batches between calls by ``fit``; None leaves it to ``fit``.
    """

    def __init__(self, run: Any, several_workers: bool) -> None:
        """Stores the run.

        Args:
            run: The ``Checkpoints``.
            several_workers: Whether several workers must report after the same steps.
        """
        super().__init__()
        self.every_batches: int | None = run.every_steps
        if several_workers:
            self.every_batches = min(run.every_steps or _STEPS_BETWEEN_VOTES, _STEPS_BETWEEN_VOTES)
        self._run = run
        self._several_workers = several_workers
        self._batches = self._epoch_batches = self._unreported = 0

    def on_fit_begin(self, fit: RunningFit) -> FitStart | None:
        """Returns where ``fit`` begins."""
        start: FitStart | None = self._run.fit_state.begin(fit, self)
        self._batches = 0 if start is None else start.batches
        return start

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the callbacks, and begins to listen for the stop signal."""
        self._run.listen()
        self._run.fit_state.begin_training()
        self._unreported = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restores the logs of a resumed epoch."""
        self._run.fit_state.begin_epoch()
        self._epoch_batches = self._run.step_in_epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts the batches since the last call."""
        batches, self._epoch_batches = batch + 1 - self._epoch_batches, batch + 1
        self._unreported += batches
        self._batches += batches
        # fit calls at other times, too, which may differ between workers.
        if not self._several_workers or self._batches % (self.every_batches or 1) == 0:
            steps, self._unreported = self._unreported, 0
            self._run.after_step(steps, last=batch + 1 == self.params.get("steps"))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Ends the epoch, as all other callbacks have done."""
        steps, self._unreported = self._unreported, 0
        self._run.end_epoch(steps)

    def on_fit_exit(self) -> None:
        """Stops listening, after an error too."""
        self._run.stop_listening()
