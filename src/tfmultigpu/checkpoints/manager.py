"""Checkpoints of a whole training run."""

from __future__ import annotations

import functools
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
    check_one_source,
    check_outside,
    check_workers,
    read_directory,
    read_interval,
    split_chain,
)
from tfmultigpu.checkpoints.callback import make_callback
from tfmultigpu.checkpoints.companions import Turns
from tfmultigpu.checkpoints.fit_part import Fit, FitPart
from tfmultigpu.checkpoints.marks import DataMarks
from tfmultigpu.checkpoints.optimizer import restore_variables
from tfmultigpu.checkpoints.shared_storage import SharedFiles, warn_damaged
from tfmultigpu.data.resumable import Position, PositionedDataset, position_data
from tfmultigpu.errors import CheckpointError, ClusterError
from tfmultigpu.losses.build_model import prepare_model
from tfmultigpu.optimizers.update import build_optimizer
from tfmultigpu.steps.train_step import Trained
from tfmultigpu.steps.value_agreement import check_values_alike
from tfmultigpu.strategies.scopes import check_kinds
from tfmultigpu.strategies.stop_signals import StopSignal, StopVote
from tfmultigpu.strategies.topology import strategy_of
from tfmultigpu.strategies.worker_exchange import WorkerExchange
from tfmultigpu.types import Model, Optimizer

__all__ = ["Checkpoints"]

_log = logging.getLogger("tfmultigpu")


class Checkpoints:
    """Saves a training run, and resumes it after a crash, a preemption or on other devices.

    A resumed run ends with the weights of an uninterrupted one. They are bit-equal on the same
    number of replicas, and equal to float rounding on another number. A checkpoint holds all
    variables of model and optimizer, the random seeds, the loss scale, the counters, the position
    in the data and the state of the callbacks of ``fit``.

    All workers must create this object with one shared directory and call its methods; only the
    chief writes.

    Attributes:
        directory: The directory of the checkpoints.
        data: The data for the loop; a pass begins at the run's position. None if none was given.
        keep: The number of checkpoints to keep.

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
            directory: A directory for this run alone, created by the first save. Several workers
                need a directory that all of them see.
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
            stop_signal: The signal that makes a running loop save and exit with code
                128 + signal, 143 for SIGTERM. None handles no signal.

        Raises:
            TypeError: An argument has a wrong type.
            ValueError: A number is less than 1, or the directory is a URL or a file.
        """
        self._updates_per_step = 1
        check_one_source(train_step, model, optimizer)
        if train_step is not None:
            train_step, others, self._updates_per_step = split_chain(train_step)
            model, optimizer = train_step.model, train_step.optimizer
            extra = {**others, **(extra or {})}
        self._train_step = train_step
        self._strategy = strategy_of(model) if hasattr(model, "variables") else None
        if optimizer is None:
            check_kinds(model, self._strategy or tf.distribute.get_strategy())
        else:
            check_kinds(model, self._strategy, optimizer)
        self.directory = read_directory(directory)
        self.keep = check_count("keep", keep)
        self.every_steps = read_interval("every_steps", every_steps)
        self.every_epochs = read_interval("every_epochs", every_epochs)
        self._model: Any = model
        self._optimizer: Any = optimizer
        self._extra, self._steps_of_extra = check_extra(extra)
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
        self._turns = Turns(self.directory)
        self._shared = SharedFiles(self.directory, self._exchange)

    @property
    def step(self) -> int:
        """Steps so far: those counted by ``after_step``, or else those of the optimizer."""
        if self._counts:
            return self._steps
        return self._steps + self._count_iterations() - self._iterations

    @property
    def epoch(self) -> int:
        """Epochs so far."""
        return self._position.epoch

    @property
    def step_in_epoch(self) -> int:
        """Steps of the current epoch so far."""
        return self._position.step

    def save(self) -> Path:
        """Saves the current state of the run; all workers must call it.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: The chief could not write it; the directory has later steps, which were
                not restored; the position in the data is unknown; or a step changes variables that
                are not saved.
            CheckpointError: A worker does not see the files of the chief.
            ClusterError: Workers have different weights, learning rates or positions.
        """
        check_outside()
        position = self._find_position()
        self._build()
        state.check_holds(self._variables(), self._states_beside_models)
        self._check_alike(position)
        arrays, variables = state.read_state(self._variables(), self._exchange)
        metadata = {
            "epoch": position.epoch,
            "step_in_epoch": position.step,
            **self._marks.read(position),
            "replicas": self._exchange.strategy.num_replicas_in_sync,
            "tensorflow": tf.__version__,
            "variables": variables,
        }
        fit_metadata, fit_arrays = self._fit.read(position.step > 0)
        path = self._shared.write(
            self.step, {**arrays, **fit_arrays}, {**metadata, **fit_metadata}, self.keep
        )
        self._saved = self.step
        return path

    def restore(self) -> int | None:
        """Restores the newest intact checkpoint; all workers must call it.

        Call it after creating strategy, model, optimizer and train step, before the first step.

        Returns:
            The step of the checkpoint; None if there is none, and nothing changes.

        Raises:
            CheckpointError: The checkpoint is of another model, or all checkpoints are damaged.
            CheckpointError: Workers see different checkpoints.
        """
        check_outside()
        found, arrays, damaged = self._shared.read_newest()
        warn_damaged(self.directory, damaged, found)
        if found is None:
            return None
        self._build_model()
        entries = found.metadata["variables"]
        for name, step in self._steps_of_extra.items():
            entries, of_step, own = state.split_entries(entries, arrays, name, found.path)
            (trained,) = step.trained
            restore_variables(trained, {}, self._exchange, of_step, own, found.path)
        trained, *_ = self._trained()
        restore_variables(trained, self._extra, self._exchange, entries, arrays, found.path)
        self._fit.load(found.metadata, arrays)
        self._shared.set_aside(damaged)
        self._steps, self._iterations = found.step, self._count_iterations()
        self._saved = found.step
        self._position.epoch = found.metadata["epoch"]
        self._position.step = found.metadata["step_in_epoch"]
        self._marks.expect(found.metadata)
        return found.step

    def epochs(self, epochs: int) -> Iterator[int]:
        """Yields the numbers of the remaining epochs, and saves every ``every_epochs``.

        While the loop runs, ``stop_signal`` makes it save and exit.

        Args:
            epochs: The epochs of the whole run, including those before a restart.
        """
        epochs = check_count("epochs", epochs, 0)
        self._fit.detach()
        self.listen()
        try:
            while self.epoch < epochs:
                yield self.epoch
                if self.data is not None and not self._position.step:
                    raise CheckpointError(
                        "An epoch ended without any counted step, so the position in the data is "
                        f"unknown. Received: epoch={self.epoch} with 0 steps. Call "
                        "checkpoints.after_step() after each step."
                    )
                self.end_epoch()
        finally:
            self.stop_listening()

    def after_step(self, steps: int = 1, *, last: bool = False) -> None:
        """Counts steps; saves every ``every_steps``, or if the run must stop.

        Args:
            steps: The number of steps; ``logs["steps"]`` after ``logs = step.run(iterator, n)``.
            last: Whether the steps end the epoch; if the epoch end is saved too, this is not.

        Raises:
            CheckpointError: The steps did not read ``checkpoints.data``.
            CheckpointError: The data differs from the data before the restart, or another
                ``Checkpoints`` of the loop was restored at another step of the loop.
            SystemExit: The stop signal came, here or on another worker, and the run was saved.
        """
        self._count(steps)
        self._stop_if_wanted(steps)
        waits = last and self._saves_after(self.epoch + 1)
        # If a callback stops the run, end the epoch before saving.
        if self._steps_are_due() and not waits and not self._fit.is_stopping():
            self.save()

    def end_epoch(self, steps: int = 0) -> None:
        """Ends an epoch, and saves if it is time; ``epochs`` and the callback call it.

        Args:
            steps: The last steps of the epoch, if ``after_step`` has not counted them.

        Raises:
            CheckpointError: As ``after_step``.
            CheckpointError: As ``after_step``.
            SystemExit: As ``after_step``.
        """
        if steps:
            self._count(steps)
        self._marks.check()
        self._next_epoch()
        self._stop_if_wanted(steps, now=True)
        if self._saves_after(self.epoch) or self._steps_are_due():
            self.save()

    def _count(self, steps: int) -> None:
        if self.data is not None and not self.data.was_read:
            raise CheckpointError(
                "The loop read other data than checkpoints.data, so the position in the data is "
                f"unknown. Received: steps={steps} before any pass over it. Write: for batch in "
                "checkpoints.data."
            )
        steps = check_count("steps", steps, 0)
        self._counts = True
        self._steps += steps
        self._position.step += steps
        self._turns.count()
        self._marks.check()

    def _saves_after(self, epochs: int) -> bool:
        return self.every_epochs is not None and epochs % self.every_epochs == 0

    def _steps_are_due(self) -> bool:
        every = self.every_steps
        return every is not None and self._steps // every > self._saved // every

    def callback(self, every_steps: int | None = None, every_epochs: int | None = None) -> Any:
        """Returns a ``keras.callbacks.Callback`` that saves and resumes in ``tmg.fit``.

        Call ``restore`` first: ``fit`` then resumes at the checkpoint. Pass ``fit`` the ``data`` of
        this object or, if it has none, the data itself.

        Args:
            every_steps: Replaces ``every_steps`` of the class.
            every_epochs: Replaces ``every_epochs`` of the class; 1 if no interval was given.
        """
        self.every_steps = read_interval("every_steps", every_steps) or self.every_steps
        self.every_epochs = read_interval("every_epochs", every_epochs) or self.every_epochs
        if self.every_steps is None and self.every_epochs is None:
            self.every_epochs = 1
        return make_callback(self, self._exchange.workers > 1)

    def skip_finished_epoch(self, steps: int | None) -> None:
        """Moves to the next epoch if all steps of the current one are done.

        For the callback: ``fit`` would take such an epoch for one without data.

        Args:
            steps: Batches of an epoch; None if unknown.
        """
        if steps and self.step_in_epoch >= steps and not self._fit.is_present:
            self._next_epoch()

    def attach(self, fit: Fit) -> None:
        """Restores the state of ``fit``, and saves it from now on; for the callback.

        Raises:
            CheckpointError: The data differs from the data of the checkpoint.
        """
        state.check_holds(self._variables(), fit.changed_variables())
        self._fit.attach(fit, self._variables(), self._exchange, self._position)

    def skips_fit(self, epochs: int) -> bool:
        """Returns whether a ``fit`` ended before the checkpoint was saved; for the callback.

        Args:
            epochs: The number of its last epoch.
        """
        return self._fit.skips(epochs, self._position, self._variables(), self._exchange)

    @property
    def fit_part(self) -> FitPart:
        """The state of ``fit`` in the run; for the callback."""
        return self._fit

    def _next_epoch(self) -> None:
        self._marks.end_epoch()
        self._position.epoch += 1
        self._position.step = 0

    def listen(self) -> None:
        """Checks directory, data and settings, then handles the stop signal.

        ``epochs`` and the callback call it before any training.

        Raises:
            CheckpointError: The directory has later steps, which were not restored, or is not
                writable.
            CheckpointError: The directory is not shared, or the data differs.
            ClusterError: Workers have different settings.
        """
        settings = {
            "every_steps": self.every_steps,
            "every_epochs": self.every_epochs,
            "stop_signal is None": self._signal is None,
            "data is None": self.data is None,
            "extra": sorted([*self._extra, *self._steps_of_extra]),
        }
        self._shared.check_settings(settings)
        self._shared.check_writable()
        self._shared.check_no_later_steps(self.step)
        self._marks.check_finished_epoch()
        if self._signal is not None:
            self._signal.listen()

    def stop_listening(self) -> None:
        """Restores the earlier handler of the stop signal; ``epochs`` and the callback call it.

        A signal that came after the last step goes to that handler.
        """
        if self._signal is not None:
            self._signal.stop_listening()

    def _stop_if_wanted(self, steps: int, now: bool = False) -> None:
        wanted = self._signal is not None and self._signal.received
        if self._signal is None or not self._vote(wanted, steps, now):
            return
        path = self.save()
        code, self._signal.received = self._signal.exit_code, False
        _log.warning("Asked to stop: saved step %d to %s, exiting with %d", self.step, path, code)
        raise SystemExit(code)

    def _find_position(self) -> Position:
        """Returns the position of the run in its data."""
        if self._counts or self.data is None or self._count_iterations() == self._iterations:
            return self._position
        try:
            return Position(*divmod(self.step, len(self.data)))
        except TypeError:
            raise CheckpointError(
                "The position in the data is unknown, because its length is unknown and no steps "
                f"were counted. Received: step={self.step} of the optimizer. Call "
                "checkpoints.after_step() after each step."
            ) from None

    def _count_iterations(self) -> int:
        if self._optimizer is None:
            return 0
        return int(self._optimizer.iterations.numpy()) // self._updates_per_step

    def _build_model(self) -> None:
        if not self._model.built:
            if self.data is None:
                raise CheckpointError(
                    "The model has no variables yet, so it can be neither saved nor restored. "
                    f"Received: model {self._model.name!r}. Build it inside the scope: with "
                    "strategy.scope(): model.build(input_shape)."
                )
            prepare_model(self._model, self._strategy, self.data.element_spec)

    def _build(self) -> None:
        """Builds model and optimizer if they have no variables yet."""
        self._build_model()
        for _, optimizer, variables in self._trained():
            if optimizer is not None and not optimizer.built:
                build_optimizer(optimizer, variables, self._exchange.strategy)

    @functools.cached_property
    def _states_beside_models(self) -> list[Any]:
        """States that the steps change and no model of them has; tracing takes a moment."""
        steps = [*self._steps_of_extra.values()]
        steps += [] if self._train_step is None else [self._train_step]
        return [state for step in steps for state in step.states_beside_model()]

    def _check_alike(self, position: Position) -> None:
        """Checks that all workers are about to save the same run.

        Raises:
            ClusterError: Their positions, weights or optimizers differ.
        """
        own = [self.step, position.epoch, position.step]
        places = self._exchange(own).tolist()
        if any(place != own for place in places):
            raise ClusterError(
                "The workers save at different positions, so they have trained on other batches. "
                f"Received: [step, epoch, step in epoch] of each worker: {places}. Every worker "
                "must make the same steps."
            )
        for model, optimizer, _ in self._trained():
            check_values_alike(self._exchange.strategy, model, optimizer)

    def _trained(self) -> list[Trained]:
        """Returns each trained model with its optimizer and variables."""
        others = [one for step in self._steps_of_extra.values() for one in step.trained]
        if self._train_step is not None:
            return [*self._train_step.trained, *others]
        variables = self._model.trainable_variables
        return [Trained(self._model, self._optimizer, variables), *others]

    def _variables(self) -> dict[str, state.StateVariable]:
        found = state.state_variables(self._model, self._optimizer, self._extra)
        for name, step in self._steps_of_extra.items():
            found |= state.step_variables(name, step)
        return found
