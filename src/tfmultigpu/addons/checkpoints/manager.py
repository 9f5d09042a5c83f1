"""Checkpoints of a whole training run."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfmultigpu.addons.checkpoints.callback import CheckpointCallback, EventsOfFit
from tfmultigpu.addons.checkpoints.files import newest, save
from tfmultigpu.addons.checkpoints.state import RunVariables
from tfmultigpu.addons.checkpoints.stop_signals import StopSignal, StopVote
from tfmultigpu.arguments import check_count
from tfmultigpu.data.positioned import Position, PositionedDataset, position_data
from tfmultigpu.errors import CheckpointError
from tfmultigpu.strategies.topology import kernels_of
from tfmultigpu.types import Model, Optimizer

_log = logging.getLogger("tfmultigpu")
_FIRST = "first_batch"


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
        extra: Mapping[str, object] | None = None,
    ) -> None:
        """Checks the arguments; reads and writes no files.

        Args:
            directory: A directory for this run alone, created by the first save.
            model: A Keras model.
            optimizer: Its Keras optimizer; None leaves it out, which ``fit`` refuses.
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
        self._kernels = kernels_of(self._exchange.strategy)  # Asks the driver, so once.
        self._vote = StopVote(self._exchange)
        self._signal = StopSignal(signal.SIGTERM)
        self._position = Position()
        self.data: PositionedDataset | None = None
        if data is not None:
            self.data = position_data(data, self._exchange.strategy, self._position)
            self.data.call_when_resumed(self._compare_first_batch)
        self._steps = self._variables.count_updates()
        self._updates: int | None = self._steps  # None once steps are counted.
        # What is known of the data, and what a checkpoint says of it until it was compared.
        self._known: dict[str, Any] = {}
        self._expected: dict[str, Any] = {}
        events = EventsOfFit(
            begin=self._listen,
            read_data=self._note_data,
            end_epoch=self._end_epoch,
            end=self._signal.stop_listening,
        )
        self._callback = CheckpointCallback(self, self._variables, events)

    @property
    def epoch(self) -> int:
        """Epochs so far."""
        return self._position.epoch

    @property
    def step_in_epoch(self) -> int:
        """Steps of the current epoch so far."""
        return self._position.step_in_epoch

    @property
    def step(self) -> int:
        """Steps so far: those counted by ``after_step``, or else the optimizer's."""
        if self._updates is None:
            return self._steps
        return self._steps + self._variables.count_updates() - self._updates

    def save(self) -> Path:
        """Saves the run, and returns the file.

        Raises:
            CheckpointError: The chief could not write it; the directory has later steps; no steps
                were counted; or a step changes variables that are not saved.
            ClusterError: Workers have different weights or learning rates.
        """
        self._check_counted(self.step == self._steps)
        arrays = self._variables.read(self.data)
        fit, arrays_of_fit = self._callback.read()
        run = {
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "data": self._known,
            "owned": self._variables.is_owned,
            "logical_replicas": self._variables.logical_replicas,
            "fit": fit,
            "kernels": self._kernels,
        }
        content = run, {**arrays, **arrays_of_fit}
        return save(self.directory, self._exchange, self.step, self.keep, content)

    def restore(self) -> int | None:
        """Restores the newest intact checkpoint, and returns its step; None if there is none.

        Call it after creating model, optimizer and train step, and before the first step.

        Raises:
            CheckpointError: The checkpoint is of another model, all checkpoints are damaged, or
                workers see different checkpoints.
        """
        stored = newest(self.directory, self._exchange)
        if stored is None:
            return None
        self._variables.restore(stored, self.data)
        self._callback.load(stored)
        self._steps, self._updates = stored.run["step"], self._variables.count_updates()
        self._position.move_to(stored.run["epoch"], stored.run["step_in_epoch"])
        self._known, self._expected = stored.run["data"], dict(stored.run["data"])
        if (before := stored.run["kernels"]) != self._kernels:
            _log.warning(
                f"The checkpoint was computed by {before}, and the run goes on with "
                f"{self._kernels}. "
                "Kernels may add in another order there, so the end is equal to rounding, and not "
                "bit for bit. For the same bits take devices of the same type, and on CPUs set "
                "TF_NUM_INTRAOP_THREADS to one number on all machines."
            )
        if self.data is not None:
            self.data.pass_over(self.epoch, compare=not self.step_in_epoch)
        return self._steps

    def epochs(self, epochs: int) -> Iterator[int]:
        """Yields the numbers of the remaining epochs; after SIGTERM it saves and exits with 143.

        Args:
            epochs: The epochs of the whole run, including those before a restart.
        """
        epochs = check_count("epochs", epochs, 0)
        self._callback.load(None)
        self._listen()
        try:
            while self.epoch < epochs:
                yield self.epoch
                self._end_epoch()
        finally:
            self._signal.stop_listening()

    def after_step(self, steps: int = 1) -> None:
        """Counts steps; saves and exits if SIGTERM came.

        Args:
            steps: The number of steps; ``logs["steps"]`` after ``logs = step.run(iterator, n)``.

        Raises:
            CheckpointError: The steps did not read ``checkpoints.data``, or the data differs from
                the data before the restart.
            SystemExit: SIGTERM came, here or on another worker, and the run was saved.
        """
        steps = check_count("steps", steps, 0)
        self._steps, self._updates = self._steps + steps, None
        self._position.count(steps)
        if self.data is not None:
            # An iterator of the epoch before would make a resumed run begin with other batches.
            self._check_counted(self._position.is_begun)
            if self.step_in_epoch == steps or _FIRST in self._expected:  # The first of an epoch.
                self._note_data({_FIRST: self.data.first_hash()})
        self._stop_if_asked(steps)

    def _end_epoch(self) -> None:
        if self.data is not None:
            self._check_counted(self.step_in_epoch > 0 and self._position.is_begun)
            self._note_data({_FIRST: self.data.first_hash()})  # Of a pass without more steps.
        self._position.end_epoch()
        self._stop_if_asked(0, now=True)

    def callback(self, every_steps: int | None = None) -> CheckpointCallback:
        """Returns a ``keras.callbacks.Callback`` that saves and resumes in ``tmg.fit``.

        Call ``restore`` first, and pass ``fit`` the ``data`` of this object, if it has any.

        Args:
            every_steps: Save after every so many steps of the run; None means after each epoch.
        """
        if every_steps is not None:
            every_steps = check_count("every_steps", every_steps)
        self._callback.save_every(every_steps)
        return self._callback

    def _listen(self) -> None:
        """Checks directory and data, then handles SIGTERM, before any training."""
        save(self.directory, self._exchange, self.step, self.keep)
        if self.data is not None and _FIRST in self._expected and not self.step_in_epoch:
            self._note_data({_FIRST: self.data.hash_of_last_epoch()})
        if not self._signal.listen():
            name = threading.current_thread().name
            warnings.warn(
                "SIGTERM will not be heard, as Python handles signals in the main thread alone: a "
                "preemption ends the process without a last checkpoint. Received: a training in "
                f"thread {name!r}. Train in the main thread; if you cannot, save often: "
                "checkpoints.callback(every_steps=100), or checkpoints.save() in a loop.",
                stacklevel=2,
            )

    def _compare_first_batch(self) -> None:
        """Compares the first batch of a resumed epoch, if it was read over: before any step."""
        if self.data is not None and _FIRST in self._expected:
            first = self.data.first_hash()
            if first is not None:  # With ``preprocess`` the next batch tells.
                self._note_data({_FIRST: first})

    def _check_counted(self, is_counted: bool) -> None:
        if self.data is not None and not is_counted:
            raise CheckpointError(
                "The position in the data is unknown, because not every step was counted, or the "
                "epoch did not read a new pass over checkpoints.data.",
                f"epoch={self.epoch}, step_in_epoch={self.step_in_epoch}, step={self.step}",
                "In each epoch, write iterator = iter(checkpoints.data), or: for batch in "
                "checkpoints.data. Call checkpoints.after_step() after each step.",
            )

    def _note_data(self, description: Mapping[str, Any]) -> None:
        """Notes what is known of the data, and compares it once with the hash in the checkpoint."""
        compared = description.keys() & self._expected.keys()
        told = []
        for name, value in description.items():
            if name in compared:
                expected = self._expected.pop(name)
                if value != expected:
                    told.append(f"{name}={value!r}, in the checkpoint {expected!r}")
        if compared and self._exchange("the data of a checkpoint", [len(told)]).any():
            raise CheckpointError(
                "The data differs from the data of the checkpoint. The run would train on some "
                "examples twice and skip others.",
                f"{', '.join(told)}; at epoch {self.epoch} and step {self.step_in_epoch} of it",
                "Give a shuffle a seed, dataset.shuffle(n, seed=1), and the same data and "
                "batch_size as before, or start in another directory; tmg.Checkpoints(directory, "
                "model, optimizer) without data restores the weights. What shuffles by itself "
                "needs a function of the epoch: data=lambda epoch: dataset.shuffle(n, "
                "seed=epoch).batch(size).",
            )
        for name, value in description.items():
            if value is not None:
                self._known[name] = value

    def _stop_if_asked(self, steps: int, now: bool = False) -> None:
        is_asked = self._vote(self._signal.received, steps, now)
        # If a callback stops fit, its epoch ends before it is saved.
        if is_asked and not (self.step_in_epoch and self._callback.is_stopping()):
            path = self.save()
            self._signal.obey()
            code = 128 + signal.SIGTERM  # As a shell reports it.
            _log.warning("Asked to stop: saved step %d to %s, exit %d", self.step, path, code)
            raise SystemExit(code)
