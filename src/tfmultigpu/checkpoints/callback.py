"""A Keras callback that saves checkpoints during ``fit``."""

from __future__ import annotations

from typing import Any, Protocol

from tfmultigpu.checkpoints.fit_part import FitPart

__all__ = ["make_callback"]

# Several workers vote on the stop signal at least once in this many steps.
_STEPS_BETWEEN_VOTES = 10


class Run(Protocol):
    """The part of ``Checkpoints`` that the callback uses; see there."""

    data: Any
    every_steps: int | None

    @property
    def epoch(self) -> int:
        """Epochs so far."""

    @property
    def step_in_epoch(self) -> int:
        """Steps of the current epoch so far."""

    def after_step(self, steps: int = 1, *, last: bool = False) -> None:
        """Counts steps; ``last`` if they end the epoch."""

    def end_epoch(self, steps: int = 0) -> None:
        """Counts the last steps of an epoch, and ends it."""

    def attach(self, fit: Any) -> None:
        """Restores the state of ``fit``, and saves it from now on."""

    def skips_fit(self, epochs: int) -> bool:
        """Returns whether a ``fit`` with this last epoch ended before the checkpoint was saved."""

    @property
    def fit_part(self) -> FitPart:
        """The state of ``fit`` in the run."""

    def skip_finished_epoch(self, steps: int | None) -> None:
        """Moves to the next epoch if all steps of the current one are done."""

    def listen(self) -> None:
        """Starts to handle the stop signal."""

    def stop_listening(self) -> None:
        """Restores the earlier handler of the stop signal."""


def make_callback(run: Run, several_workers: bool) -> Any:
    """Returns a ``keras.callbacks.Callback`` that reports the steps of ``fit`` to a run.

    Args:
        run: The run that receives the reports.
        several_workers: Whether several workers must report after the same steps.
    """
    import keras

    class CheckpointCallback(keras.callbacks.Callback):  # type: ignore[misc]
        """Counts steps and epochs, and saves checkpoints.

        Attributes:
            every_batches: The batches between calls by ``fit``; None leaves it to ``fit``.
            runs_last: Makes ``fit`` call it after all others, whose state it saves.
            resume_at: The epoch in which ``fit`` resumes, and the batches of it that are done.
            data_skips_batches: Whether the data itself skips these batches.
            restored_start: The shuffle seed and the ``initial_epoch`` of the restored ``fit``.
            skips_fit: Returns whether a ``fit`` with this last epoch ended before the restart.
            required_on_all_workers: Makes ``fit`` fail if only some workers have it.
        """

        required_on_all_workers = True
        runs_last = True
        every_batches = (
            min(run.every_steps or _STEPS_BETWEEN_VOTES, _STEPS_BETWEEN_VOTES)
            if several_workers
            else run.every_steps
        )
        _seen = 0

        @property
        def resume_at(self) -> tuple[int, int] | None:
            run.skip_finished_epoch(self.params.get("steps"))
            if not (run.epoch or run.step_in_epoch):
                return None
            return run.fit_part.first_epoch + run.epoch, run.step_in_epoch

        @property
        def data_skips_batches(self) -> bool:
            return run.data is not None

        @property
        def restored_start(self) -> tuple[int, int] | None:
            return run.fit_part.start

        def skips_fit(self, epochs: int) -> bool:
            return run.skips_fit(epochs)

        def on_fit_begin(self, fit: Any) -> None:
            run.attach(fit)
            self._seen = fit.seen

        def on_train_begin(self, logs: Any = None) -> None:
            run.listen()
            self._unreported = 0
            run.fit_part.undo_begin_hooks(last=not run.step_in_epoch)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            # The resumed epoch may have had no steps left.
            if epoch > run.fit_part.first_epoch + run.epoch:
                run.skip_finished_epoch(run.step_in_epoch)
            self._done = run.step_in_epoch
            if self._done:
                run.fit_part.undo_begin_hooks(last=True)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            steps, self._done = batch + 1 - self._done, batch + 1
            self._unreported += steps
            self._seen += steps
            if self.every_batches is None or self._seen % self.every_batches == 0:
                steps, self._unreported = self._unreported, 0
                run.after_step(steps, last=batch + 1 == self.params.get("steps"))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            # Other callbacks have ended the epoch already: save only at its end.
            steps, self._unreported = self._unreported, 0
            run.end_epoch(steps)

        def on_train_end(self, logs: Any = None) -> None:
            run.stop_listening()

        def on_fit_exit(self) -> None:
            run.stop_listening()  # After an error too.

    return CheckpointCallback()
