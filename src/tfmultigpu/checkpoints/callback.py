"""Checkpoints as a Keras callback."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["make_callback"]

# Several workers look together whether one was asked to stop; so often, in steps, they can.
_TOGETHER = 10


class OfFit(Protocol):
    """The part of the run that ``fit`` holds, as the callback needs it."""

    first_epoch: int

    @property
    def beginning(self) -> tuple[int, int] | None:
        """The seed of the order of arrays, and the first epoch, of the ``fit`` restored."""

    def put_back(self, *, last: bool) -> None:
        """Takes back what callbacks changed when they heard of a beginning once more."""


class Run(Protocol):
    """The ``Checkpoints``, as the callback needs them."""

    data: Any
    every_steps: int | None

    @property
    def epoch(self) -> int:
        """Epochs so far."""

    @property
    def step_in_epoch(self) -> int:
        """Steps of the present epoch so far."""

    def after_step(self, steps: int = 1, *, last: bool = False) -> None:
        """Counts steps; ``last`` where the epoch ends with them."""

    def end_epoch(self) -> None:
        """Ends an epoch."""

    def attach(self, fit: Any) -> None:
        """Saves what ``fit`` holds from now on, and has it restored."""

    @property
    def of_fit(self) -> OfFit:
        """The part of the run that ``fit`` holds."""

    def skip_finished_epoch(self, steps: int | None) -> None:
        """Goes to the next epoch if the present one has no more steps than were made."""

    def listen(self) -> None:
        """Begins to note the stop signal."""

    def stop_listening(self) -> None:
        """Gives the stop signal back."""


def make_callback(run: Run, together: bool) -> Any:
    """Returns a ``keras.callbacks.Callback`` that tells a run of the steps that ``fit`` makes.

    Args:
        run: What is told.
        together: Whether several workers must do it after the same steps.
    """
    import keras

    class CheckpointCallback(keras.callbacks.Callback):  # type: ignore[misc]
        """Counts steps and epochs, and lets checkpoints be saved.

        Attributes:
            every_batches: After how many batches ``fit`` must call it; None: now and then.
            comes_last: That it is called after all others, whose state it saves.
            resume_at: The epoch in which ``fit`` goes on, and the batches of it that are done.
            passes_over: Whether the data passes over these by itself.
            stored_beginning: The seed of the order of arrays that the restored ``fit`` had, and
                the epoch it began with.
            for_all_workers: That ``fit`` refuses to begin where some worker is without it.
        """

        for_all_workers = True
        comes_last = True
        every_batches = min(run.every_steps or _TOGETHER, _TOGETHER) if together else None
        _seen = 0

        @property
        def resume_at(self) -> tuple[int, int] | None:
            run.skip_finished_epoch(self.params.get("steps"))
            if not (run.epoch or run.step_in_epoch):
                return None
            return run.of_fit.first_epoch + run.epoch, run.step_in_epoch

        @property
        def passes_over(self) -> bool:
            return run.data is not None

        @property
        def stored_beginning(self) -> tuple[int, int] | None:
            return run.of_fit.beginning

        def on_fit_begin(self, fit: Any) -> None:
            run.attach(fit)
            self._seen = fit.seen

        def on_train_begin(self, logs: Any = None) -> None:
            run.listen()
            self._untold = 0
            run.of_fit.put_back(last=not run.step_in_epoch)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            # The epoch that was resumed may turn out to have no more steps.
            if epoch > run.of_fit.first_epoch + run.epoch:
                run.skip_finished_epoch(run.step_in_epoch)
            self._done = run.step_in_epoch
            if self._done:
                run.of_fit.put_back(last=True)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            steps, self._done = batch + 1 - self._done, batch + 1
            self._untold += steps
            self._seen += steps
            if self.every_batches is None or self._seen % self.every_batches == 0:
                self._tell(last=batch + 1 == self.params.get("steps"))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self._tell(last=True)
            run.end_epoch()

        def on_train_end(self, logs: Any = None) -> None:
            run.stop_listening()

        def on_fit_exit(self) -> None:
            run.stop_listening()  # Where an error ended it too.

        def _tell(self, last: bool) -> None:
            steps, self._untold = self._untold, 0
            if steps:
                run.after_step(steps, last=last)

    if not together and run.every_steps is not None:
        CheckpointCallback.every_batches = run.every_steps
    return CheckpointCallback()
