"""Checkpoints of a whole training run."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tfmultigpu.addons.checkpoints.callback import make_callback
from tfmultigpu.addons.checkpoints.files import Directory
from tfmultigpu.addons.checkpoints.fit_state import FitState
from tfmultigpu.addons.checkpoints.state import RunVariables
from tfmultigpu.arguments import check_count
from tfmultigpu.data.positioned import Position, PositionedDataset, position_data
from tfmultigpu.errors import CheckpointError, ClusterError
from tfmultigpu.strategies.stop_signals import StopSignal, StopVote
from tfmultigpu.types import Model, Optimizer

_log = logging.getLogger("tfmultigpu")


class Checkpoints:
    """Saves a training run, and resumes it after a crash, a preemption or on other devices.

    A resumed run ends with the weights of an uninterrupted one: bit-equal on the same number of
    replicas, and equal to float rounding on another. A checkpoint holds all variables, the random
    seeds, the loss scale, the position in the data and the state of the callbacks of ``fit``. All
    workers must create this object with one shared directory and call its methods alike.

    Attributes:
        directory: The directory of the checkpoints.
        data: The data for the loop; a pass begins at the run's position. None if none was given.
        keep: The number of checkpoints to keep.

    Example:
        >>> import tempfile, keras, numpy as np, tfmultigpu as tmg
        >>> def train(directory, epochs):
        ...     keras.utils.set_random_seed(0)
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     step = tmg.make_train_step(model, keras.optimizers.Adam(), "mse")
        ...     data = tmg.distribute_dataset((np.eye(3), np.ones((3, 1))), batch_size=2)
        ...     checkpoints = tmg.Checkpoints(directory, train_step=step, data=data, every_epochs=1)
        ...     restored = checkpoints.restore()
        ...     for epoch in checkpoints.epochs(epochs):
        ...         for batch in checkpoints.data:
        ...             step(batch)
        ...             checkpoints.after_step()
        ...     return restored, checkpoints.step
        >>> directory = tempfile.mkdtemp()
        >>> train(directory, epochs=1), train(directory, epochs=3)
        ((None, 2), (2, 6))
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: Model | None = None,
        optimizer: Optimizer | None = None,
        data: Any = None,
        keep: int = 3,
        *,
        train_step: Any = None,
        every_steps: int | None = None,
        every_epochs: int | None = None,
        extra: Mapping[str, Any] | None = None,
        stop_signal: int | None = signal.SIGTERM,
    ) -> None:
        """Checks the arguments; reads and writes no files.

        Args:
            directory: A directory for this run alone, created by the first save.
            model: A Keras model.
            optimizer: Its Keras optimizer; None saves none, which ``fit`` refuses.
            data: An argument or result of ``distribute_dataset``; or a function of the epoch (an
                int) that returns such an argument. Each run must yield the same batches.
            keep: The number of newest checkpoints to keep.
            train_step: A step of ``make_train_step`` or ``chain_steps``, instead of model and
                optimizer.
            every_steps: ``after_step`` saves at multiples of this many steps of the run.
            every_epochs: Save at the end of every so many epochs.
            extra: More objects to save, by name: train steps of other models, metrics, other
                objects with ``variables``, or lists of variables.
            stop_signal: The signal on which a running loop saves and exits with 128 + signal, 143
                for SIGTERM. None handles no signal.

        Raises:
            CheckpointError: The data cannot resume.
        """
        text = os.fsdecode(directory)
        if not text or "://" in text:
            raise ValueError(
                "directory must be a folder for this run, not a URL. Received: "
                f"directory={text!r}. Mount remote storage and give its path."
            )
        self.directory = Path(text).expanduser()
        self.keep = check_count("keep", keep)
        self.every_steps = _interval("every_steps", every_steps)
        self.every_epochs = _interval("every_epochs", every_epochs)
        self._variables = RunVariables(model, optimizer, train_step, extra)
        self._exchange = self._variables.exchange
        self._files = Directory(self.directory, self._exchange)
        self._vote = StopVote(self._exchange)
        self._signal = None if stop_signal is None else StopSignal(stop_signal)
        self._position = Position()
        self.data: PositionedDataset | None = None
        if data is not None:
            self.data = position_data(data, self._exchange.strategy, self._position)
        self._saved = self._steps = self._updates = self._variables.count_updates()
        self._counts = False
        # A hash of the first batch of the epoch that was saved or has ended, to be compared, and
        # the passes over the data at its end.
        self._expected: int | None = None
        self._finished: int | None = None
        self._passes = 0
        self.fit_state = FitState(self._position, self._variables, self._exchange)

    @property
    def step(self) -> int:
        """Steps so far: those counted by ``after_step``, or else those of the optimizer."""
        uncounted = 0 if self._counts else self._variables.count_updates() - self._updates
        return self._steps + uncounted

    @property
    def epoch(self) -> int:
        """Epochs so far."""
        return self._position.epoch

    @property
    def step_in_epoch(self) -> int:
        """Steps of the current epoch so far."""
        return self._position.step

    def save(self) -> Path:
        """Saves the run, and returns the file.

        Raises:
            CheckpointError: The chief could not write it; the directory has later steps; no steps
                were counted; or a step changes variables that are not saved.
            ClusterError: Workers have different weights, learning rates or positions.
        """
        self._check_counted(self.step == self._steps)
        own = [self.step, self.epoch, self.step_in_epoch]
        places = self._exchange("the position of a checkpoint", own).tolist()
        if len({*map(tuple, places)}) > 1:
            raise ClusterError(
                "The workers save at different positions, so they have trained on other batches. "
                f"Received: [step, epoch, step in epoch] of each worker: {places}. Every worker "
                "must make the same steps."
            )
        self._variables.prepare_to_save(self.data)
        entries, arrays = self._variables.read()
        of_fit, arrays_of_fit = self.fit_state.read()
        first_batch = self._finished
        if self.data is not None and self.step_in_epoch:
            first_batch = self.data.first_hash() if self._expected is None else self._expected
        place = {"epoch": self.epoch, "step_in_epoch": self.step_in_epoch}
        state = {"variables": entries, "owned": self._variables.owned()}
        run = {**place, "first_batch": first_batch, **state, **of_fit}
        path = self._files.write(self.step, {**arrays, **arrays_of_fit}, run, self.keep)
        self._saved = self.step
        return path

    def restore(self) -> int | None:
        """Restores the newest intact checkpoint, and returns its step; None if there is none.

        Call it after creating model, optimizer and train step, and before the first step.

        Raises:
            CheckpointError: The checkpoint is of another model, all checkpoints are damaged, or
                workers see different checkpoints.
        """
        stored = self._files.newest()
        if stored is None:
            return None
        self._variables.restore(stored, self.data)
        self.fit_state.load(stored.run, stored.arrays)
        self._saved = self._steps = stored.run["step"]
        self._updates = self._variables.count_updates()
        self._position.epoch, self._position.step = stored.run["epoch"], stored.run["step_in_epoch"]
        self._expected = self._finished = stored.run["first_batch"]
        if self.data is not None:
            self._passes = self.data.passes
            ended = self._expected is not None and self._position.step == 0
            self.data.pass_over(self._position.epoch, compare=ended)
        return self._steps

    def epochs(self, epochs: int) -> Iterator[int]:
        """Yields the numbers of the remaining epochs, and saves every ``every_epochs``.

        While the loop runs, ``stop_signal`` makes it save and exit.

        Args:
            epochs: The epochs of the whole run, including those before a restart.
        """
        epochs = check_count("epochs", epochs, 0)
        self.fit_state.detach()
        self.listen()
        try:
            while self.epoch < epochs:
                yield self.epoch
                self._check_counted(self._position.step > 0)
                self.end_epoch()
        finally:
            self.stop_listening()

    def after_step(self, steps: int = 1, *, last: bool = False) -> None:
        """Counts steps; saves every ``every_steps``, or if the run must stop.

        Args:
            steps: The number of steps; ``logs["steps"]`` after ``logs = step.run(iterator, n)``.
            last: Whether the steps end the epoch; if the epoch end is saved too, this is not.

        Raises:
            CheckpointError: The steps did not read ``checkpoints.data``, or the data differs from
                the data before the restart.
            SystemExit: The stop signal came, here or on another worker, and the run was saved.
        """
        self._count(steps)
        self._stop_if_asked(steps)
        waits = last and self._epochs_are_due(self.epoch + 1)
        # If a callback stops the run, end the epoch before saving.
        if self._steps_are_due() and not waits and not self.fit_state.is_stopping():
            self.save()

    def end_epoch(self, steps: int = 0) -> None:
        """Ends an epoch after more steps, if any, and saves if it is time; ``epochs`` calls it."""
        if steps:
            self._count(steps)
        if self.data is not None:
            if self._expected is not None and self._passes == self.data.passes:
                iter(self.data)  # Resumed at the end of this epoch: its pass must count.
            self._check_data(self.data.first_hash)
            self._finished, self._passes = self.data.first_hash(), self.data.passes
        self._position.epoch, self._position.step = self.epoch + 1, 0
        self._stop_if_asked(steps, now=True)
        if self._epochs_are_due(self.epoch) or self._steps_are_due():
            self.save()

    def callback(self, every_steps: int | None = None, every_epochs: int | None = None) -> Any:
        """Returns a ``keras.callbacks.Callback`` that saves and resumes in ``tmg.fit``.

        Call ``restore`` first, and pass ``fit`` the ``data`` of this object, if it has any.

        Args:
            every_steps: Replaces ``every_steps`` of the class.
            every_epochs: Replaces ``every_epochs`` of the class; 1 if no interval was given.
        """
        self.every_steps = _interval("every_steps", every_steps) or self.every_steps
        self.every_epochs = _interval("every_epochs", every_epochs) or self.every_epochs
        if self.every_steps is None and self.every_epochs is None:
            self.every_epochs = 1
        return make_callback(self, self._exchange.workers > 1)

    def listen(self) -> None:
        """Checks directory and data, then handles the stop signal, before any training."""
        self._files.check(self.step)
        if self.data is not None and self._position.step == 0:
            self._check_data(self.data.hash_of_last_epoch)
        if self._signal is not None:
            self._signal.listen()

    def stop_listening(self) -> None:
        """Restores the earlier handler of the stop signal, which a late signal goes to."""
        if self._signal is not None:
            self._signal.stop_listening()

    def _count(self, steps: int) -> None:
        steps = check_count("steps", steps, 0)
        self._counts = True
        self._steps += steps
        self._position.step += steps
        if self.data is None:
            return
        if not self.data.was_read:
            raise CheckpointError(
                "The loop read other data than checkpoints.data, so the position in the data is "
                f"unknown. Received: steps={steps} before any pass over it. Write: for batch in "
                "checkpoints.data."
            )
        if self._passes == self.data.passes and self._position.step:
            raise CheckpointError(
                "An epoch reads the iterator of the epoch before, so a resumed run would start "
                f"with other batches. Received: steps in epoch {self.epoch} without a new pass. "
                "In each epoch, write: iterator = iter(checkpoints.data)."
            )
        self._check_data(self.data.first_hash)

    def _check_counted(self, is_counted: bool) -> None:
        if self.data is not None and not is_counted:
            raise CheckpointError(
                "The position in the data is unknown, because no steps were counted. Received: "
                f"epoch={self.epoch}, step={self.step} of the optimizer, step_in_epoch="
                f"{self.step_in_epoch}. Call checkpoints.after_step() after each step."
            )

    def _check_data(self, first_hash: Callable[[], int | None]) -> None:
        """Compares the first data after a restart with the data before it, once."""
        expected, self._expected = self._expected, None
        if (
            expected is not None
            and self._exchange("the data after a restart", [int(first_hash() != expected)]).any()
        ):
            raise CheckpointError(
                "The data differs from the data of the checkpoint. The run would train on some "
                "examples twice and skip others. Received: another first batch of the epoch, at "
                f"epoch {self.epoch} and step {self.step_in_epoch} of it. Give the same data and "
                "batch size as before. Data that shuffles by itself needs a function of the epoch, "
                "seeded by it: data=lambda epoch: dataset.shuffle(n, seed=epoch).batch(size)."
            )

    def _epochs_are_due(self, epochs: int) -> bool:
        return self.every_epochs is not None and epochs % self.every_epochs == 0

    def _steps_are_due(self) -> bool:
        every = self.every_steps
        return every is not None and self._steps // every > self._saved // every

    def _stop_if_asked(self, steps: int, now: bool = False) -> None:
        asked = self._signal is not None and self._signal.received
        if self._signal is None or not self._vote(asked, steps, now):
            return
        path = self.save()
        code, self._signal.received = self._signal.exit_code, False
        _log.warning("Asked to stop: saved step %d to %s, exiting with %d", self.step, path, code)
        raise SystemExit(code)


def _interval(name: str, number: Any) -> int | None:
    """Returns an interval, counted in steps or epochs; None means never."""
    return None if number is None else check_count(name, number, other="None")
