"""The state of ``fit`` in a run: where it begins, its callbacks, and the logs of its epoch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

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


class FitState:
    """The running ``fit``, or a stored one until a ``fit`` takes it; all workers call alike."""

    def __init__(
        self, position: Position, variables: RunVariables, exchange: WorkerExchange
    ) -> None:
        """Stores the parts of the run."""
        self._position, self._variables, self._exchange = position, variables, exchange
        self._fit: RunningFit | None = None
        self._has_trained = False
        self._callback: Any = None
        self._callbacks = CallbackStates(())
        # The stored fit until a fit takes it, and the fit that was taken until it has resumed.
        self._stored: Mapping[str, Any] | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._arrays: Arrays = {}
        # The variables of the run as hooks must leave them; all of them, once fit begins.
        self._is_restored = False
        self._restored: tuple[state.Entries, Arrays] | None = None

    def load(self, run: Mapping[str, Any], arrays: Arrays) -> None:
        """Takes this part of a checkpoint."""
        self._fit = self._restored = None
        self._stored, self._has_trained = run["fit"], False
        self._arrays = {name: value for name, value in arrays.items() if name.startswith("fit/")}
        self._is_restored = True

    def begin(self, fit: RunningFit, callback: Any) -> FitStart | None:
        """Returns where a ``fit`` begins, before its data is prepared; None if as asked."""
        if self._has_trained:
            raise CheckpointError(
                "Checkpoints hold one fit. Received: another call of fit with the same ones. To "
                "resume the first, call checkpoints.restore() again. For a second one, write "
                "tmg.Checkpoints(another_directory, model, model.optimizer) just before it, and "
                "restore() that."
            )
        self._fit, self._callback = fit, callback
        self._callbacks = CallbackStates(fit.callbacks)
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
        missing = self._exchange(
            "callbacks without a state", [len(self._callbacks.missing(stored["callbacks"]))]
        )[0, 0]
        if stored["stopped"] and not missing:
            _log.warning(
                "A callback ended this run before its last epoch, as its checkpoint records. To "
                "train further, leave out that callback."
            )
            epoch = fit.epochs
        return FitStart(stored["seed"], first_epoch, epoch, step, stored["batches"])

    def begin_training(self) -> None:
        """Restores what all other ``on_train_begin`` have changed, such as a learning rate."""
        assert self._fit is not None
        self._has_trained = True
        self._variables.check_holds(self._fit.changed_variables())
        if self._resumed is not None:
            self._check_data(self._resumed["data"], self._fit.data)
            self._callbacks.write(self._resumed["callbacks"], self._arrays)
            if missing := self._callbacks.missing(self._resumed["callbacks"]):
                _log.warning(
                    "The checkpoint was saved with callbacks that were not passed. The run may end "
                    "differently than without the restart: %s",
                    ", ".join(missing),
                )
        self._undo_hooks(forget=not self._position.step)

    def begin_epoch(self) -> None:
        """Restores the logs of a resumed epoch; call it after all other ``on_epoch_begin``."""
        assert self._fit is not None
        resumed, self._resumed = self._resumed, None
        if self._position.step:
            self._undo_hooks(forget=True)
        if resumed is None or not self._position.step:
            return
        self._callbacks.write(resumed["callbacks"], self._arrays)
        metrics, where = self._metric_variables(), "a checkpoint within an epoch"
        state.write_state(metrics, resumed["metrics"], self._arrays, self._exchange, where)
        self._fit.sums.update(resumed["sums"])

    def detach(self) -> None:
        """Drops the state of ``fit``: the run continues in a loop without it."""
        self._fit = self._stored = None
        self._is_restored = False
        self._undo_hooks(forget=True)

    def read(self) -> tuple[dict[str, Any], Arrays]:
        """Returns the description for a checkpoint, and its arrays."""
        if self._fit is None or self._stored is not None:
            return {"fit": self._stored}, self._arrays
        metrics, arrays = state.read_state(self._metric_variables(), self._exchange)
        of_callbacks: dict[str, np.ndarray[Any, Any]] = {}
        fit = {
            "callbacks": self._callbacks.read(of_callbacks),
            "stopped": not self._position.step and self.is_stopping(),
            "batches": self._fit.batches,
            "seed": self._fit.seed,
            "first_epoch": self._fit.first_epoch,
            "data": dict(self._fit.data),
            "sums": dict(self._fit.sums),
            "metrics": metrics,
        }
        return {"fit": fit}, {**arrays, **of_callbacks}

    def is_stopping(self) -> bool:
        """Returns whether a callback of any worker ends the run."""
        if self._fit is None:
            return False
        return bool(
            self._exchange("whether fit stops", [int(self._callback.model.stop_training)]).any()
        )

    def _undo_hooks(self, forget: bool) -> None:
        if self._restored is not None:
            state.write_state(self._variables.all(), *self._restored, self._exchange)
        if forget:  # What the next hooks do is new.
            self._restored = None

    def _metric_variables(self) -> list[state.StateVariable]:
        assert self._fit is not None
        return state.numbered("fit/metrics", self._fit.metric_variables(), may_differ=True)

    def _check_data(self, stored: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        differing = [
            f"{name}={here[name]!r}, in the checkpoint {value!r}"
            for name, value in stored.items()
            if None not in (value, here.get(name)) and value != here[name]
        ]
        if self._exchange("the data of a checkpoint", [len(differing)]).any():
            raise CheckpointError(
                "The data differs from the data of the checkpoint. The run would train on some "
                f"examples twice and skip others. Received: {', '.join(differing)}. Give fit the "
                "same data and batch_size as before, or give Checkpoints another directory to "
                "start over."
            )
