"""The Keras callback that saves and resumes a run in ``fit``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfmultigpu.addons.checkpoints import state
from tfmultigpu.addons.checkpoints.callback_states import CallbackStates
from tfmultigpu.addons.checkpoints.files import Arrays
from tfmultigpu.addons.checkpoints.state import RunVariables
from tfmultigpu.data.positioned import Position
from tfmultigpu.errors import CheckpointError
from tfmultigpu.strategies.worker_exchange import WorkerExchange
from tfmultigpu.types import FitStart, RunningFit

_log = logging.getLogger("tfmultigpu")
# Several workers vote on the stop signal at least once in this many steps.
_STEPS_BETWEEN_VOTES = 10


class CheckpointCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """The running ``fit`` of a ``Checkpoints``, or a stored one until a ``fit`` takes it.

    ``types.RunningFit`` says when ``fit`` calls it; all workers call alike.

    Attributes:
        every_steps: Steps of the run between two checkpoints, or None.
        every_epochs: Epochs between two checkpoints, or None.
    """

    every_steps: int | None = None
    every_epochs: int | None = None

    def __init__(self, run: Any, position: Position, variables: RunVariables) -> None:
        """Takes the ``Checkpoints`` and its parts."""
        super().__init__()
        self._run, self._position, self._variables = run, position, variables
        self._exchange = variables.exchange
        self.load(None, {})

    @property
    def every_batches(self) -> int | None:
        """The batches between two calls; None leaves them to ``fit``."""
        if self._exchange.workers == 1:
            return self.every_steps
        return min(self.every_steps or _STEPS_BETWEEN_VOTES, _STEPS_BETWEEN_VOTES)

    def load(self, stored: Mapping[str, Any] | None, arrays: Arrays) -> None:
        """Takes the ``fit`` of a checkpoint; None if the run continues in a loop without it."""
        self._fit: RunningFit | None = None
        self._callbacks = CallbackStates(())
        self._counted, self._has_trained = 0, False
        # The stored fit until a fit takes it, and the fit that was taken until it has resumed.
        self._stored = stored
        self._resumed: Mapping[str, Any] | None = None
        self._arrays = {name: value for name, value in arrays.items() if name.startswith("fit/")}
        # The variables of the run as hooks must leave them; all of them, once fit begins.
        self._is_restored = bool(arrays)
        self._restored: tuple[state.Entries, Arrays] | None = None

    def read(self) -> tuple[Mapping[str, Any] | None, Arrays]:
        """Returns the description of the ``fit`` for a checkpoint, and its arrays."""
        if self._fit is None or self._stored is not None:
            return self._stored, self._arrays
        metrics, arrays = state.read_state(self._metric_variables(), self._exchange)
        of_callbacks: dict[str, np.ndarray[Any, Any]] = {}
        fit = {
            "callbacks": self._callbacks.read(of_callbacks),
            "stopped": not self._position.step and self._is_stopping(),
            "batches": self._fit.batches,
            "seed": self._fit.seed,
            "first_epoch": self._fit.first_epoch,
            "data": dict(self._fit.data),
            "sums": dict(self._fit.sums),
            "metrics": metrics,
        }
        return fit, {**arrays, **of_callbacks}

    def on_fit_begin(self, fit: RunningFit) -> FitStart | None:
        """Returns where a ``fit`` begins, before its data is prepared; None if as asked."""
        if self._has_trained:
            raise CheckpointError(
                "Checkpoints hold one fit. Received: another call of fit with the same ones. To "
                "resume the first, call checkpoints.restore() again. For a second one, write "
                "tmg.Checkpoints(another_directory, model, model.optimizer) just before it, and "
                "restore() that."
            )
        self._fit, self._callbacks = fit, CallbackStates(fit.callbacks)
        if self._is_restored:
            # What the program changed since ``restore`` is part of the run.
            self._is_restored, self._restored = False, self._variables.read()
        stored, self._resumed, self._stored = self._stored, self._stored, None
        first_epoch = fit.first_epoch if stored is None else stored["first_epoch"]
        epoch, step = first_epoch + self._position.epoch, self._position.step
        if stored is None:
            begins = (epoch, step) == (fit.first_epoch, 0)
            return None if begins else FitStart(fit.seed, fit.first_epoch, epoch, step, 0)
        # The checkpoint has the callbacks of the chief; other workers may have fewer.
        missing = len(self._callbacks.missing(stored["callbacks"]))
        missing = self._exchange("callbacks without a state", [missing])[0, 0]
        if stored["stopped"] and not missing:
            _log.warning(
                "A callback ended this run before its last epoch, as its checkpoint records. To "
                "train further, leave out that callback."
            )
            epoch = fit.epochs
        return FitStart(stored["seed"], first_epoch, epoch, step, stored["batches"])

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores what all other ``on_train_begin`` have changed, such as a learning rate."""
        assert self._fit is not None
        self._run.listen()
        self._has_trained = True
        self._variables.check_holds(self._fit.changed_variables())
        if self._resumed is not None:
            here = self._fit.data
            differing = [
                f"{name}={here[name]!r}, in the checkpoint {value!r}"
                for name, value in self._resumed["data"].items()
                if None not in (value, here.get(name)) and value != here[name]
            ]
            check_data(differing, self._exchange)
            self._callbacks.write(self._resumed["callbacks"], self._arrays)
            if missing := self._callbacks.missing(self._resumed["callbacks"]):
                _log.warning(
                    "The checkpoint was saved with callbacks that were not passed. The run may end "
                    "differently than without the restart: %s",
                    ", ".join(missing),
                )
        self._undo_hooks(forget=not self._position.step)
        self._counted = self._fit.batches

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restores the logs of a resumed epoch, after all other ``on_epoch_begin``."""
        assert self._fit is not None
        resumed, self._resumed = self._resumed, None
        if not self._position.step:
            return
        self._undo_hooks(forget=True)
        if resumed is not None:
            self._callbacks.write(resumed["callbacks"], self._arrays)
            metrics, where = self._metric_variables(), "a checkpoint within an epoch"
            state.write_state(metrics, resumed["metrics"], self._arrays, self._exchange, where)
            self._fit.sums.update(resumed["sums"])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts steps, and saves when it is time."""
        assert self._fit is not None
        # fit calls at other times, too, which may differ between workers.
        if self._exchange.workers == 1 or self._fit.batches % (self.every_batches or 1) == 0:
            self._run.after_step(new := self._new_steps())
            # If a callback stops the run, its epoch ends before it is saved.
            if self._is_due(new) and not self._is_stopping():
                self._run.save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts the epoch, and saves when it is time."""
        self._run.end_epoch(new := self._new_steps())
        every = self.every_epochs
        if self._is_due(new) or (every is not None and self._run.epoch % every == 0):
            self._run.save()

    def on_fit_exit(self) -> None:
        """Restores the handler of the stop signal, also after an error."""
        self._run.stop_listening()

    def _new_steps(self) -> int:
        assert self._fit is not None
        before, self._counted = self._counted, self._fit.batches
        return self._counted - before

    def _is_due(self, new: int) -> bool:
        every, step = self.every_steps, self._run.step
        return every is not None and step // every > (step - new) // every

    def _is_stopping(self) -> bool:
        """Returns whether a callback of any worker ends the run."""
        return bool(self._exchange("whether fit stops", [int(self.model.stop_training)]).any())

    def _undo_hooks(self, forget: bool) -> None:
        if self._restored is not None:
            state.write_state(self._variables.all(), *self._restored, self._exchange)
        if forget:  # What the next hooks do is new.
            self._restored = None

    def _metric_variables(self) -> list[state.StateVariable]:
        assert self._fit is not None
        return state.numbered("fit/metrics", self._fit.metric_variables(), may_differ=True)


def check_data(differences: Sequence[str], exchange: WorkerExchange) -> None:
    """Checks that the data of no worker differs from that of the checkpoint."""
    if exchange("the data of a checkpoint", [len(differences)]).any():
        raise CheckpointError(
            "The data differs from the data of the checkpoint. The run would train on some "
            f"examples twice and skip others. Received: {', '.join(differences)}. Give the same "
            "data and batch_size as before, or another directory to start over. Data that shuffles "
            "by itself needs a function of the epoch, seeded by it: data=lambda epoch: "
            "dataset.shuffle(n, seed=epoch).batch(size)."
        )
