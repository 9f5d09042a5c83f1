"""The Keras callback that saves and resumes a run in ``fit``."""

from __future__ import annotations

from typing import Any

from tfmultigpu.types import FitStart, RunningFit

# Several workers vote on the stop signal at least once in this many steps.
_STEPS_BETWEEN_VOTES = 10


def make_callback(run: Any, several_workers: bool) -> Any:
    """Returns the callback of a ``Checkpoints``; ``RunningFit`` says when ``fit`` calls it."""
    import keras

    class CheckpointCallback(keras.callbacks.Callback):  # type: ignore[misc]
        """Counts the steps and epochs of ``fit``; ``every_batches`` None leaves calls to it."""

        every_batches: int | None = run.every_steps
        if several_workers:
            every_batches = min(run.every_steps or _STEPS_BETWEEN_VOTES, _STEPS_BETWEEN_VOTES)

        def on_fit_begin(self, fit: RunningFit) -> FitStart | None:
            self._fit, self._counted = fit, 0
            start: FitStart | None = run.fit_state.begin(fit, self)
            return start

        def on_train_begin(self, logs: Any = None) -> None:
            run.listen()
            run.fit_state.begin_training()
            self._counted = self._fit.batches

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            run.fit_state.begin_epoch()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            # fit calls at other times, too, which may differ between workers.
            if not several_workers or self._fit.batches % (self.every_batches or 1) == 0:
                run.after_step(self._new_steps(), last=batch + 1 == self.params.get("steps"))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            run.end_epoch(self._new_steps())

        def on_fit_exit(self) -> None:
            run.stop_listening()

        def _new_steps(self) -> int:
            before, self._counted = self._counted, self._fit.batches
            return self._counted - before

    return CheckpointCallback()
