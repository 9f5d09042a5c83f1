"""Checkpoints of a whole training run, from which it goes on as if nothing had happened."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.checkpoints import state
from tfmultigpu.checkpoints.arguments import (
    check_extra,
    check_outside,
    check_step,
    check_workers,
    read_directory,
    read_interval,
)
from tfmultigpu.checkpoints.callback import make_callback
from tfmultigpu.checkpoints.fit_part import Fit, FitPart
from tfmultigpu.checkpoints.marks import DataMarks
from tfmultigpu.checkpoints.optimizer import restore_variables
from tfmultigpu.checkpoints.shared_storage import SharedFiles, tell_damaged
from tfmultigpu.data.resumable import Position, PositionedDataset, position_data
from tfmultigpu.errors import CheckpointError
from tfmultigpu.losses.build_model import prepare_model
from tfmultigpu.optimizers.update import build_optimizer
from tfmultigpu.strategies.scopes import check_kinds
from tfmultigpu.strategies.stop_signals import StopSignal, StopVote
from tfmultigpu.strategies.topology import strategy_of
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["Checkpoints"]

_log = logging.getLogger("tfmultigpu")


class Checkpoints:
    """Saves a training run, and goes on with it after a crash, a restart or on other devices.

    A run that was killed and gone on with ends with the weights of one that was not: equal to the
    bit on the same number of replicas, as exact as this library is on another number. Saved are all
    variables of model and optimizer, what random layers draw from, the loss scale, the counters,
    the place in the data, and what callbacks of ``fit`` remember.

    Under several workers all of them must make this object and call its methods, with one directory
    that they share; the chief alone writes.

    Attributes:
        directory: Where checkpoints are.
        data: The data, for the loop: a pass begins where the run is. None where none was given.
        keep: How many checkpoints are kept.

    Example:
        >>> import tempfile, keras, numpy as np, tfmultigpu as tmg
        >>> def train(directory, epochs):
        ...     keras.utils.set_random_seed(0)
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     optimizer = keras.optimizers.Adam()
        ...     step = tmg.make_train_step(model, optimizer, "mse")
        ...     data = tmg.distribute_dataset((np.eye(3), np.ones((3, 1))), batch_size=2)
        ...     checkpoints = tmg.Checkpoints(directory, model, optimizer, data, every_epochs=1)
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
        model: Any = None,
        optimizer: Any = None,
        data: Any = None,
        keep: int = 3,
        *,
        train_step: Any = None,
        every_steps: int | None = None,
        every_epochs: int | None = None,
        extra: Mapping[str, Any] | None = None,
        stop_signal: int | None = signal.SIGTERM,
    ) -> None:
        """Writes and reads nothing yet.

        Args:
            directory: A folder of this run alone; made when first saved. Under several workers a
                folder that all of them see.
            model: A Keras model.
            optimizer: Its Keras optimizer; None saves none.
            data: What ``distribute_dataset`` takes, or returned; or a function of the epoch (an
                int) that returns what it takes. Its batches must be the same in each run.
            keep: How many checkpoints to keep, the newest.
            train_step: What ``make_train_step`` returned, in place of model and optimizer.
            every_steps: Save after so many steps, counted from the run's first, by ``after_step``.
            every_epochs: Save after so many epochs, at their end.
            extra: Further objects to save, by name: metrics, or whatever has ``variables``, or
                lists of variables.
            stop_signal: The signal after which a running loop saves and exits with code
                128 + signal, 143 for SIGTERM. None: none.

        Raises:
            TypeError: An argument is something else.
            ValueError: A number is less than 1, or the directory is an address or a file.
        """
        if train_step is not None:
            check_step(train_step, model, optimizer)
            model, optimizer = train_step.model, train_step.optimizer
        self._strategy = strategy_of(model) if hasattr(model, "variables") else None
        if optimizer is None:
            check_kinds(model, self._strategy or tf.distribute.get_strategy())
        else:
            check_kinds(model, self._strategy, optimizer)
        self.directory = read_directory(directory)
        self.keep = check_count("keep", keep)
        self.every_steps = read_interval("every_steps", every_steps)
        self.every_epochs = read_interval("every_epochs", every_epochs)
        self._model, self._optimizer = model, optimizer
        self._extra = check_extra(extra)
        self._exchange = WorkerExchange(self._strategy)
        check_workers(self._exchange.workers)
        self._vote = StopVote(self._exchange)
        self._signal = None if stop_signal is None else StopSignal(stop_signal)
        self._position = Position()
        self.data: PositionedDataset | None = (
            None if data is None else position_data(data, self._strategy, self._position)
        )
        self._steps, self._iterations = self._count_iterations(), self._count_iterations()
        self._counts = False
        self._saved = self._steps
        self._marks = DataMarks(self.data, self._position, self._exchange)
        self._fit = FitPart()
        self._shared = SharedFiles(self.directory, self._exchange)

    @property
    def step(self) -> int:
        """Steps so far: those told by ``after_step``, or else those of the optimizer."""
        if self._counts:
            return self._steps
        return self._steps + self._count_iterations() - self._iterations

    @property
    def epoch(self) -> int:
        """Epochs so far."""
        return self._position.epoch

    @property
    def step_in_epoch(self) -> int:
        """Steps of the present epoch so far."""
        return self._position.step

    def save(self) -> Path:
        """Saves the run as it is now; all workers must call it.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: It could not be written, the directory has later steps, which were not
                restored, or the place in the data is not known.
            RestoreMismatchError: A worker does not see what the chief has written.
        """
        check_outside()
        position = self._place()
        self._build()
        arrays, variables = state.read_state(self._slots(), self._exchange)
        facts = {
            "epoch": position.epoch,
            "step_in_epoch": position.step,
            **self._marks.facts(position),
            "replicas": self._exchange.strategy.num_replicas_in_sync,
            "tensorflow": tf.__version__,
            "variables": variables,
        }
        of_fit, more = self._fit.read(position.step > 0)
        path = self._shared.write(self.step, {**arrays, **more}, {**facts, **of_fit}, self.keep)
        self._saved = self.step
        return path

    def restore(self) -> int | None:
        """Puts the newest whole checkpoint back; all workers must call it.

        Call it once strategy, model, optimizer and train step were made, before the first step.

        Returns:
            The step it was saved after; None where there is no checkpoint, and nothing changed.

        Raises:
            CheckpointError: It is that of another model, or there are only damaged ones.
            RestoreMismatchError: Workers see different checkpoints.
        """
        check_outside()
        found, arrays, damaged = self._shared.read_newest()
        tell_damaged(self.directory, damaged, found)
        if found is None:
            return None
        self._build_model()
        facts = found.facts["variables"]
        run = self._model, self._optimizer, self._extra
        restore_variables(*run, self._exchange, facts, arrays, found.path)
        self._fit.keep(found.facts, arrays)
        self._shared.set_aside(damaged)
        self._steps, self._iterations = found.step, self._count_iterations()
        self._saved = found.step
        self._position.epoch = found.facts["epoch"]
        self._position.step = found.facts["step_in_epoch"]
        self._marks.expect(found.facts)
        return found.step

    def epochs(self, epochs: int) -> Iterator[int]:
        """Yields the numbers of the epochs that are left, and ends each where the loop goes on.

        While it runs, ``stop_signal`` makes the run save and exit. Saves every ``every_epochs``.

        Args:
            epochs: How many epochs the whole run has, those before a restart included.
        """
        epochs = check_count("epochs", epochs, 0)
        self._fit.forget()
        self.listen()
        try:
            while self.epoch < epochs:
                yield self.epoch
                if self.data is not None and not self._position.step:
                    raise CheckpointError(
                        "An epoch ended, and nobody said how many steps it had, so its place in "
                        "the data is not known. Call checkpoints.after_step() after each step."
                    )
                self.end_epoch()
        finally:
            self.stop_listening()

    def after_step(self, steps: int = 1, *, last: bool = False) -> None:
        """Counts steps that were made; saves if it is time for it, or if the run has to stop.

        Args:
            steps: How many; after ``logs = step.run(iterator, n)`` these are ``logs["steps"]``.
            last: Whether the epoch ends with them: where its end is saved, that is enough.

        Raises:
            SystemExit: The stop signal came, here or on another worker, and the run was saved.
            RestoreMismatchError: The data is not what it was before the restart.
        """
        if self.data is not None and not self.data.was_read:
            raise CheckpointError(
                "Steps were made on other data than checkpoints.data, so the place in the data is "
                "not known. Write: for batch in checkpoints.data."
            )
        steps = check_count("steps", steps, 0)
        self._counts = True
        self._steps += steps
        self._position.step += steps
        self._marks.check()
        self._stop_if_wanted(steps)
        every = self.every_steps
        due = every is not None and self._steps // every > self._saved // every
        # Where a callback ends the run, its epoch is ended first.
        if due and not (last and self._saves_after(self.epoch + 1)) and not self._fit.ends():
            self.save()

    def end_epoch(self) -> None:
        """Ends an epoch, which ``epochs`` and the callback do by themselves; saves if it is time.

        Raises:
            SystemExit: As ``after_step``.
            RestoreMismatchError: As ``after_step``.
        """
        self._marks.check()
        self._next_epoch()
        self._stop_if_wanted(0, now=True)
        if self._saves_after(self.epoch):
            self.save()

    def _saves_after(self, epochs: int) -> bool:
        return self.every_epochs is not None and epochs % self.every_epochs == 0

    def callback(self, every_steps: int | None = None, every_epochs: int | None = None) -> Any:
        """Returns a ``keras.callbacks.Callback`` for ``tmg.fit`` that does all this by itself.

        Call ``restore`` first: ``fit`` then goes on where the checkpoint was saved. Give ``fit``
        the ``data`` of this object, or, where it has none, the data itself.

        Args:
            every_steps: As for the class, in its place.
            every_epochs: As for the class, in its place; 1 where nothing was said anywhere.
        """
        self.every_steps = read_interval("every_steps", every_steps) or self.every_steps
        self.every_epochs = read_interval("every_epochs", every_epochs) or self.every_epochs
        if self.every_steps is None and self.every_epochs is None:
            self.every_epochs = 1
        return make_callback(self, self._exchange.workers > 1)

    def skip_finished_epoch(self, steps: int | None) -> None:
        """Goes to the next epoch if the present one has no more steps than were made.

        For the callback: ``fit`` would take such an epoch for one without data.

        Args:
            steps: Batches of an epoch, or None where unknown.
        """
        if steps and self.step_in_epoch >= steps and not self._fit.is_known:
            self._next_epoch()

    def attach(self, fit: Fit) -> None:
        """Saves what ``fit`` holds from now on, and gives it what was restored; for the callback.

        Raises:
            RestoreMismatchError: Its data is other data than when the checkpoint was saved.
        """
        begun = self.epoch > 0 or self.step_in_epoch > 0
        self._fit.attach(fit, self._slots(), self._exchange, begun)

    @property
    def of_fit(self) -> FitPart:
        """The part of the run that ``fit`` holds; for the callback."""
        return self._fit

    def _next_epoch(self) -> None:
        self._marks.end_epoch()
        self._position.epoch += 1
        self._position.step = 0

    def listen(self) -> None:
        """Begins to note the stop signal; ``epochs`` and the callback do so.

        Raises:
            CheckpointError: The directory has later steps, which were not restored, or cannot be
                written to.
            RestoreMismatchError: The directory or the data is not what it must be.
            WorkersDifferError: Workers would not save alike.
        """
        settings = {
            "every_steps": self.every_steps,
            "every_epochs": self.every_epochs,
            "stop_signal is None": self._signal is None,
            "data is None": self.data is None,
            "extra": sorted(self._extra),
        }
        self._shared.check_settings(settings)
        self._shared.check_writable()
        self._shared.check_own(self.step)
        self._marks.check_past()
        if self._signal is not None:
            self._signal.listen()

    def stop_listening(self) -> None:
        """Gives the stop signal back to who had it; ``epochs`` and the callback do so."""
        if self._signal is not None:
            self._signal.stop_listening()

    def _stop_if_wanted(self, steps: int, now: bool = False) -> None:
        wanted = self._signal is not None and self._signal.received
        if self._signal is None or not self._vote(wanted, steps, now):
            return
        path = self.save()
        code = self._signal.exit_code
        _log.warning("Asked to stop: saved step %d to %s, exiting with %d", self.step, path, code)
        raise SystemExit(code)

    def _place(self) -> Position:
        """Where the run is in its data."""
        if self._counts or self.data is None or self._count_iterations() == self._iterations:
            return self._position
        try:
            return Position(*divmod(self.step, len(self.data)))
        except TypeError:
            raise CheckpointError(
                "The place in the data is unknown: its length is, and nobody counted steps. Call "
                "checkpoints.after_step() after each step."
            ) from None

    def _count_iterations(self) -> int:
        return 0 if self._optimizer is None else int(self._optimizer.iterations.numpy())

    def _build_model(self) -> None:
        if not self._model.built:
            if self.data is None:
                raise CheckpointError(
                    "The model has no variables yet, so there is nothing to save or to restore "
                    f"into. Received: model {self._model.name!r}. Build it first, inside the "
                    "scope: with strategy.scope(): model.build(input_shape)."
                )
            prepare_model(self._model, self._strategy, self.data.element_spec)

    def _build(self) -> None:
        """Makes the variables that are not there yet."""
        self._build_model()
        if self._optimizer is not None and not self._optimizer.built:
            build_optimizer(self._optimizer, self._model.trainable_variables, self._strategy)

    def _slots(self) -> dict[str, state.StateVariable]:
        return state.slots_of(self._model, self._optimizer, self._extra)
