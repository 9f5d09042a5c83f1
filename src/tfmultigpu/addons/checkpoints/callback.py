"""The Keras callback that saves and resumes a run in ``fit``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfmultigpu.addons.checkpoints import state
from tfmultigpu.addons.checkpoints.callback_states import CallbackStates
from tfmultigpu.addons.checkpoints.files import Arrays
from tfmultigpu.addons.checkpoints.state import RunVariables
from tfmultigpu.data.positioned import Position
from tfmultigpu.errors import CheckpointError
from tfmultigpu.strategies.worker_exchange import WorkerExchange
from tfmultigpu.types import FitStart, RunningFit

_log = logging.getLogger("tfmultigpu")
_METRICS = "fit/metrics"
# Several workers vote on the stop signal at least once in this many steps.
_STEPS_BETWEEN_VOTES = 10


class CheckpointCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """The running ``fit`` of a ``Checkpoints``, or a stored one until a ``fit`` takes it.

    ``types.RunningFit`` says when ``fit`` calls it; all workers call alike.

    Attributes:
        every_steps: Steps of the run between two checkpoints; None means an epoch.
    """

    every_steps: int | None = None

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
        self._fit: Any = None  # A ``RunningFit``, once it has begun.
        self._callbacks = CallbackStates(())
        self._counted, self._has_trained = 0, False
        # The stored fit until a fit takes it, and the fit that was taken until it has resumed.
        self._stored = stored
        self._resumed: Mapping[str, Any] | None = None
        self._arrays = {name: value for name, value in arrays.items() if name.startswith("fit/")}
        # The variables of the run as hooks must leave them; all of them, once fit begins.
        self._is_restored = bool(arrays)
        self._restored: Arrays | None = None

    def read(self) -> tuple[Mapping[str, Any] | None, Arrays]:
        """Returns the description of the ``fit`` for a checkpoint, and its arrays."""
        if self._fit is None or self._stored is not None:
            return self._stored, self._arrays
        arrays = dict(state.read_state(self._metric_variables(), self._exchange))
        fit = {
            "callbacks": self._callbacks.read(arrays),
            "stopped": not self._position.step and self._is_stopping(),
            "batches": self._fit.batches,
            "seed": self._fit.seed,
            "first_epoch": self._fit.first_epoch,
            "data": dict(self._fit.data),
            "sums": dict(self._fit.sums),
        }
        return fit, arrays

    def on_fit_begin(self, fit: RunningFit) -> FitStart:
        """Returns where a ``fit`` begins, before its data is prepared."""
        if self._has_trained:
            raise CheckpointError(
                "Checkpoints hold one fit. Received: another call of fit. To resume the first, "
                "call checkpoints.restore() again. Just before a second one write, and restore, "
                "tmg.Checkpoints(another_directory, model, model.optimizer)."
            )
        self._fit, self._callbacks = fit, CallbackStates(fit.callbacks)
        if self._is_restored:
            # What the program changed since ``restore`` is part of the run.
            self._is_restored, self._restored = False, self._variables.read()
        stored, self._resumed, self._stored = self._stored, self._stored, None
        first_epoch = fit.first_epoch if stored is None else stored["first_epoch"]
        epoch, step = first_epoch + self._position.epoch, self._position.step
        if stored is None:
            return FitStart(fit.seed, fit.first_epoch, epoch, step, 0)
        # The checkpoint has the callbacks of the chief; other workers may have fewer.
        missing = len(self._callbacks.missing(stored["callbacks"]))
        missing = self._exchange("callbacks without a state", [missing])[0, 0]
        if stored["stopped"] and not missing:
            _log.warning("A callback ended this run. To train further, leave out that callback.")
            epoch = fit.epochs
        return FitStart(stored["seed"], first_epoch, epoch, step, stored["batches"])

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores what all other ``on_train_begin`` have changed, such as a learning rate."""
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
            if missing := self._callbacks.missing(self._resumed["callbacks"]):
                _log.warning(
                    "The checkpoint has callbacks that were not passed, so the run may end "
                    "differently than without the restart: %s",
                    ", ".join(missing),
                )
        self._undo_hooks()
        if not self._position.step:  # What the next hooks do is new.
            self._resumed = self._restored = None
        self._counted = self._fit.batches

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restores the logs of a resumed epoch, after all other ``on_epoch_begin``."""
        self._undo_hooks()
        if self._resumed is not None:
            of_metrics = {n: a for n, a in self._arrays.items() if n.startswith(_METRICS)}
            where = "a checkpoint within an epoch"
            state.write_state(self._metric_variables(), of_metrics, self._exchange, where)
            self._fit.sums.update(self._resumed["sums"])
        self._resumed = self._restored = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts steps, and saves when it is time."""
        # fit calls at other times, too, which may differ between workers.
        if self._exchange.workers == 1 or self._fit.batches % (self.every_batches or 1) == 0:
            self._run.after_step(new := self._new_steps())
            # If a callback stops the run, its epoch ends before it is saved.
            if self._is_due(new) and not self._is_stopping():
                self._run.save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts the epoch, and saves when it is time."""
        self._run.end_epoch(new := self._new_steps())
        if self.every_steps is None or self._is_due(new):
            self._run.save()

    def on_fit_exit(self) -> None:
        """Restores the handler of the stop signal, also after an error."""
        self._run.stop_listening()

    def _new_steps(self) -> int:
        before, self._counted = self._counted, int(self._fit.batches)
        return self._counted - before

    def _is_due(self, new: int) -> bool:
        every, step = self.every_steps, self._run.step
        return every is not None and step // every > (step - new) // every

    def _is_stopping(self) -> bool:
        """Returns whether a callback of any worker ends the run."""
        return bool(self._exchange("whether fit stops", [int(self.model.stop_training)]).any())

    def _undo_hooks(self) -> None:
        if self._restored is not None:
            state.write_state(self._variables.all(), self._restored, self._exchange)
        if self._resumed is not None:
            self._callbacks.write(self._resumed["callbacks"], self._arrays)

    def _metric_variables(self) -> list[state.StateVariable]:
        return state.numbered(_METRICS, self._fit.metric_variables(), may_differ=True)


def check_data(differences: Sequence[str], exchange: WorkerExchange) -> None:
    """Checks that the data of no worker differs from that of the checkpoint."""
    if exchange("the data of a checkpoint", [len(differences)]).any():
        raise CheckpointError(
            "The data differs from the data of the checkpoint. The run would train on some "
            f"examples twice and skip others. Received: {', '.join(differences)}. Give a shuffle a "
            "seed, dataset.shuffle(n, seed=1), and the same data and batch_size as before, or "
            "start in another directory. What shuffles by itself needs a function of the epoch: "
            "data=lambda epoch: dataset.shuffle(n, seed=epoch).batch(size)."
        )
