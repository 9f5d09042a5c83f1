"""Checkpoints of a whole training run."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tfmultigpu.addons.checkpoints.callback import CheckpointCallback, check_data
from tfmultigpu.addons.checkpoints.files import Directory
from tfmultigpu.addons.checkpoints.state import RunVariables
from tfmultigpu.arguments import check_count
from tfmultigpu.data.positioned import Position, PositionedDataset, position_data
from tfmultigpu.errors import CheckpointError
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
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> step = tmg.make_train_step(model, keras.optimizers.Adam(), "mse")
        >>> data = tmg.distribute_dataset((np.eye(3), np.ones((3, 1))), batch_size=2)
        >>> checkpoints = tmg.Checkpoints(tempfile.mkdtemp(), train_step=step, data=data)
        >>> for epoch in checkpoints.epochs(2):
        ...     for batch in checkpoints.data:
        ...         logs = step(batch)
        ...         checkpoints.after_step()
        >>> checkpoints.save().name, checkpoints.restore()
        ('step-00000004.npz', 4)
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
        extra: Mapping[str, Any] | None = None,
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
            extra: More objects to save, by name: metrics, other objects with ``variables``, or
                lists of variables.

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
        self._variables = RunVariables(model, optimizer, train_step, extra)
        self._exchange = self._variables.exchange
        self._files = Directory(self.directory, self._exchange)
        self._vote = StopVote(self._exchange)
        self._signal = StopSignal(signal.SIGTERM)
        self._position = Position()
        self.data: PositionedDataset | None = None
        if data is not None:
            self.data = position_data(data, self._exchange.strategy, self._position)
        self._steps = self._updates = self._variables.count_updates()
        self._counts = False
        # A hash of the first batch of the epoch that was saved or has ended, to be compared, and
        # the passes over the data at its end.
        self._expected: int | None = None
        self._finished: int | None = None
        self._passes = 0
        self._callback = CheckpointCallback(self, self._position, self._variables)

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
            ClusterError: Workers have different weights or learning rates.
        """
        self._check_counted(self.step == self._steps)
        self._variables.prepare_to_save(self.data)
        fit, arrays_of_fit = self._callback.read()
        arrays = {**self._variables.read(), **arrays_of_fit}
        first_batch = self._finished
        if self.data is not None and self.step_in_epoch:
            first_batch = self.data.first_hash() if self._expected is None else self._expected
        run = {
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "first_batch": first_batch,
            "owned": self._variables.owned(),
            "fit": fit,
        }
        return self._files.write(self.step, arrays, run, self.keep)

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
        self._callback.load(stored.run["fit"], stored.arrays)
        self._steps, self._updates = stored.run["step"], self._variables.count_updates()
        self._position.epoch, self._position.step = stored.run["epoch"], stored.run["step_in_epoch"]
        self._expected = self._finished = stored.run["first_batch"]
        if self.data is not None:
            self._passes = self.data.passes
            ended = self._expected is not None and self._position.step == 0
            self.data.pass_over(self._position.epoch, compare=ended)
        return self._steps

    def epochs(self, epochs: int) -> Iterator[int]:
        """Yields the numbers of the remaining epochs; SIGTERM makes it save and exit with 143.

        Args:
            epochs: The epochs of the whole run, including those before a restart.
        """
        epochs = check_count("epochs", epochs, 0)
        self._callback.load(None, {})
        self.listen()
        try:
            while self.epoch < epochs:
                yield self.epoch
                self._check_counted(self._position.step > 0)
                self.end_epoch()
        finally:
            self.stop_listening()

    def after_step(self, steps: int = 1) -> None:
        """Counts steps; saves and exits if SIGTERM came.

        Args:
            steps: The number of steps; ``logs["steps"]`` after ``logs = step.run(iterator, n)``.

        Raises:
            CheckpointError: The steps did not read ``checkpoints.data``, or the data differs from
                the data before the restart.
            SystemExit: SIGTERM came, here or on another worker, and the run was saved.
        """
        self._count(steps)
        self._stop_if_asked(steps)

    def end_epoch(self, steps: int = 0) -> None:
        """Ends an epoch after more steps, if any; ``epochs`` and ``fit`` call it."""
        if steps:
            self._count(steps)
        if self.data is not None:
            if self._expected is not None and self._passes == self.data.passes:
                iter(self.data)  # Resumed at the end of this epoch: its pass must count.
            self._check_data(self.data.first_hash)
            self._finished, self._passes = self.data.first_hash(), self.data.passes
        self._position.epoch, self._position.step = self.epoch + 1, 0
        self._stop_if_asked(steps, now=True)

    def callback(self, every_steps: int | None = None) -> CheckpointCallback:
        """Returns a ``keras.callbacks.Callback`` that saves and resumes in ``tmg.fit``.

        Call ``restore`` first, and pass ``fit`` the ``data`` of this object, if it has any.

        Args:
            every_steps: Save after every so many steps of the run; None means after each epoch.
        """
        every = None if every_steps is None else check_count("every_steps", every_steps)
        self._callback.every_steps = every
        return self._callback

    def listen(self) -> None:
        """Checks directory and data, then handles SIGTERM, before any training."""
        self._files.check(self.step)
        if self.data is not None and self._position.step == 0:
            self._check_data(self.data.hash_of_last_epoch)
        self._signal.listen()

    def stop_listening(self) -> None:
        """Restores the earlier handler of SIGTERM, which a late signal goes to."""
        self._signal.stop_listening()

    def _count(self, steps: int) -> None:
        steps = check_count("steps", steps, 0)
        self._counts = True
        self._steps += steps
        self._position.step += steps
        if self.data is not None:
            # An iterator of the epoch before would make a resumed run begin with other batches.
            is_new = self._passes != self.data.passes or not self._position.step
            self._check_counted(self.data.was_read and is_new)
            self._check_data(self.data.first_hash)

    def _check_counted(self, is_counted: bool) -> None:
        if self.data is not None and not is_counted:
            raise CheckpointError(
                "The position in the data is unknown, because not every step was counted, or the "
                f"epoch did not read a new pass over checkpoints.data. Received: epoch={self.epoch}"
                f", step_in_epoch={self.step_in_epoch}, step={self.step}. In each epoch, write "
                "iterator = iter(checkpoints.data), or: for batch in checkpoints.data. Call "
                "checkpoints.after_step() after each step."
            )

    def _check_data(self, first_hash: Callable[[], int | None]) -> None:
        """Compares the first data after a restart with the data before it, once."""
        expected, self._expected = self._expected, None
        if expected is not None:
            place = f"epoch {self.epoch} and step {self.step_in_epoch} of it"
            told = [] if first_hash() == expected else [f"another first batch, at {place}"]
            check_data(told, self._exchange)

    def _stop_if_asked(self, steps: int, now: bool = False) -> None:
        if self._vote(self._signal.received, steps, now):
            path = self.save()
            code, self._signal.received = self._signal.exit_code, False
            _log.warning("Asked to stop: saved step %d to %s, exit %d", self.step, path, code)
            raise SystemExit(code)
