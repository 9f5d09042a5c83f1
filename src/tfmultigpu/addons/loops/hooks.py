"""Keras' list of callbacks, whose batch hooks come around calls of several batches."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

import keras
import tensorflow as tf

from tfmultigpu._patch import setting
from tfmultigpu.accumulation.update import update_of
from tfmultigpu.addons.loops.callbacks import (
    adapt_callbacks,
    check_callbacks,
    every_batches,
    resuming,
    to_list,
)
from tfmultigpu.addons.loops.loop import Loop, not_ending_the_epoch
from tfmultigpu.addons.loops.workers import SameTraining, check_alike, union
from tfmultigpu.data.positioned import Position
from tfmultigpu.data.preprocessing import draw_seed
from tfmultigpu.errors import DataError
from tfmultigpu.strategies.topology import is_sharded
from tfmultigpu.strategies.worker_exchange import WorkerExchange
from tfmultigpu.types import FitStart


class Hooks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """The callbacks of an evaluation or a prediction, as the loop of Keras calls them.

    Attributes:
        strategy: The strategy of the model.
        outputs: The outputs of the last batch of a prediction.
    """

    outputs: Any = None

    def __init__(
        self, callbacks: Any, model: Any, strategy: tf.distribute.Strategy, *, verbose: Any,
        step: Any = None, add_history: bool = False, **params: Any,
    ) -> None:  # fmt: skip
        """Makes the list, with a progress bar on the chief; ``params`` are those of Keras' list."""
        if verbose not in (0, 1, 2, "auto"):
            raise ValueError(f"verbose must be 0, 1, 2 or 'auto'. Received: verbose={verbose!r}.")
        shown = verbose if WorkerExchange(strategy).is_chief else 0
        callbacks = to_list(callbacks)
        check_callbacks(callbacks, model, step)
        adapt_callbacks(callbacks, getattr(model, "optimizer", None))
        super().__init__(
            callbacks, add_history=add_history, add_progbar=shown != 0, verbose=shown,
            model=model, **params,
        )  # fmt: skip
        self.strategy = strategy
        self._loops: dict[str, Loop] = {}
        self._same = SameTraining(strategy, model)

    def serve(self, loop: Loop) -> None:
        """Calls the hooks of a loop from now on."""
        self._loops[loop.mode] = loop
        loop.hooks = self

    def loop(self, mode: str) -> Loop | None:
        """Returns the loop whose hooks are called, if there is one."""
        return self._loops.get(mode)

    def every_batches(self, mode: str) -> list[int]:
        """Returns the numbers of batches after which callbacks of any worker want to be called."""
        wanted = [every_batches(callback, mode) for callback in self.callbacks]
        return union(self.strategy, {every for every in wanted if every is not None})

    def call(self, mode: str, moment: str, batch: int, logs: Any = None) -> None:
        """Calls a batch hook: ``moment`` is ``"begin"`` or ``"end"``."""
        for callback in self.callbacks:
            not_ending_the_epoch(getattr(callback, f"on_{mode}_batch_{moment}"), batch, logs)

    def _after(self, loop: Loop | None) -> None:
        if loop is None or loop.waiting or not loop.ran:
            return
        self.call(loop.mode, "end", loop.done - 1, dict(loop.logs))
        self._same.agree_on_stopping(loop.flag)

    def on_test_begin(self, logs: Any = None) -> None:
        """Begins a pass of an evaluation."""
        super().on_test_begin(logs)
        if (loop := self._loops.get("test")) is not None:
            loop.feed.begin_epoch()
            loop.begin()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Does nothing: the loop calls the hooks."""

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Calls the hooks if Keras has counted all batches of a call."""
        self._after(self._loops.get("test"))

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Calls the hooks with the outputs, which Keras is not given."""
        super().on_predict_batch_end(batch, {"outputs": self.outputs})
        self._same.agree_on_stopping("stop_predicting")


class FitHooks(Hooks):
    """The callbacks of a training: the ``types.RunningFit`` of those that save and resume it.

    Attributes:
        start: Where a resumed training begins, or None.
    """

    def __init__(
        self, callbacks: Any, model: Any, strategy: tf.distribute.Strategy, *, verbose: Any,
        step: Any, epochs: int, first_epoch: int,
    ) -> None:  # fmt: skip
        """Makes the list, and asks the callback that resumes a training where to begin."""
        super().__init__(
            callbacks, model, strategy, verbose=verbose, step=step, add_history=True,
            epochs=epochs, steps=None,
        )  # fmt: skip
        self.epochs, self.first_epoch, self.seed = epochs, first_epoch, draw_seed(strategy)
        self._between_epochs = ExitStack()
        # They save the state of the others, and restore it: they come last.
        last = resuming(self.callbacks)
        self.callbacks.sort(key=lambda callback: callback in last)
        starts = [callback.on_fit_begin(self) for callback in last]
        self.start: FitStart | None = next((s for s in starts if s is not None), None)
        check_alike(strategy, "fit", {"the start of a resumed fit": self.start})
        if self.start is not None:
            self.seed, self.first_epoch = self.start.seed, self.start.first_epoch

    @property
    def position(self) -> Position | None:
        """Where the training begins; None if no callback resumes it."""
        if not resuming(self.callbacks):
            return None
        if self.start is None:
            return Position()
        return Position(self.start.epoch - self.first_epoch, self.start.step)

    def refuse_resuming(self, reason: str) -> None:
        """Raises a ``DataError`` if a callback resumes this training, which is impossible."""
        if self.position is not None:
            raise DataError(
                f"The training could not be resumed where it ends: {reason}. Received: a callback "
                "of tmg.Checkpoints. Write checkpoints = tmg.Checkpoints(directory, model=model, "
                "optimizer=model.optimizer, data=dataset), and tmg.fit(model, checkpoints.data)."
            )

    @property
    def begins_with(self) -> int:
        """The epoch to begin with."""
        return self.first_epoch if self.start is None else self.start.epoch

    def train(self, loop: Any, trained: Any) -> None:
        """Takes the loop and what it trains: each model with its optimizer and variables."""
        self.serve(loop)
        self._training, self._trained = loop, trained
        self.sums, self.metric_variables = loop.sums, loop.metric_variables
        self.changed_variables = loop.step.changed_variables
        loop.seen = 0 if self.start is None else self.start.batches
        self.set_params({**self.params, "steps": loop.feed.steps})
        own = [c for c in self.callbacks if not isinstance(c, keras.callbacks.ProgbarLogger)]
        self._same = SameTraining(self.strategy, self.model, trained, own)

    @property
    def batches(self) -> int:
        """Batches so far, with those before a restart."""
        return int(self._training.seen)

    @property
    def data(self) -> dict[str, Any]:
        """Description of the data, in JSON types."""
        description: dict[str, Any] = self._training.feed.describe()
        return description

    def on_train_begin(self, logs: Any = None) -> None:
        """Calls the hooks; there may be no epoch left to train."""
        super().on_train_begin(logs)
        self._keep_from_averaging()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins an epoch, or the rest of one."""
        self._between_epochs.close()
        loop, start = self._training, self.start
        loop.sums.clear()
        super().on_epoch_begin(epoch, logs)
        loop.feed.begin_epoch()
        skipped = 0
        if start is not None and epoch == start.epoch:
            skipped = loop.feed.skip(epoch - self.first_epoch, start.step)
        loop.begin(skipped)
        self._same.agree_on_stopping()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Does nothing: the loop calls the hooks."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Calls the hooks if Keras has counted all batches of a call."""
        self._after(self._training)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Calls the hooks; then all workers have one model, or an error."""
        super().on_epoch_end(epoch, logs)
        self._same.check()
        self._keep_from_averaging()

    def _keep_from_averaging(self) -> None:
        # Keras may end the training now, and cannot put averages into sharded variables.
        for part in self._trained:
            if any(is_sharded(variable) for variable in part.variables):
                nothing = {"finalize_variable_values": lambda variables: None}
                self._between_epochs.enter_context(setting(part.optimizer, **nothing))

    def on_train_end(self, logs: Any = None) -> None:
        """Puts averages into all trained variables, as Keras has for one optimizer."""
        self._between_epochs.close()
        for part in self._trained if self.epochs > 0 else ():
            update = update_of(part.optimizer)
            with nullcontext() if update is None else update.updating():
                part.optimizer.finalize_variable_values(part.variables)
        super().on_train_end(logs)
        self._same.check()

    def exit(self) -> None:
        """Calls ``on_fit_exit`` of callbacks that have it: the end of a training, or an error."""
        self._between_epochs.close()
        for callback in self.callbacks:
            if hasattr(callback, "on_fit_exit"):
                callback.on_fit_exit()
