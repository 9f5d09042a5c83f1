"""What the loops of Keras get as their callbacks: hooks of the user, and what begins an epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import keras

from tfmultigpu.accumulation.loss_scale import unwrap_optimizer
from tfmultigpu.accumulation.update import update_of
from tfmultigpu.addons.loops.hooks import Hooks
from tfmultigpu.addons.loops.loop import EvaluationLoop, TrainingLoop
from tfmultigpu.addons.loops.workers import check_same_training
from tfmultigpu.errors import LossError
from tfmultigpu.steps.other_states import OtherState
from tfmultigpu.steps.train import TrainStep
from tfmultigpu.strategies.topology import is_sharded
from tfmultigpu.types import FitStart, KerasVariable, Logs, RunningFit, StepSums, Tensor


class EvaluationCallbacks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """The callbacks of an evaluation, as the loop of Keras calls them.

    Attributes:
        evaluation: The loop of an evaluation or a validation; None for a training without.
    """

    def __init__(self, hooks: Hooks, evaluation: EvaluationLoop | None, **params: object) -> None:
        # ``hooks`` has given its callbacks their model and their parameters.
        super().__init__(hooks.callbacks, **params)
        self.evaluation = evaluation

    def on_test_begin(self, logs: Logs = None) -> None:
        """Begins a pass of an evaluation."""
        super().on_test_begin(logs)
        assert self.evaluation is not None
        self.evaluation.begin()
        self.evaluation.agree_on_stopping()

    def _of_the_loop(self, batch: int, logs: Logs = None) -> None:
        """Does nothing: Keras counts each batch, and a loop calls the hooks itself."""

    on_train_batch_begin = on_train_batch_end = _of_the_loop
    on_test_batch_begin = on_test_batch_end = _of_the_loop


class FitCallbacks(EvaluationCallbacks, RunningFit):
    """The callbacks of a training; to those that save and resume it, the running ``fit``."""

    def __init__(
        self,
        hooks: Hooks,
        start: FitStart,
        training: TrainingLoop,
        evaluation: EvaluationLoop | None,
    ) -> None:
        trained = training.step.train_steps
        _check_averages(trained)
        super().__init__(hooks, evaluation, **{**hooks.params, "steps": training.feed.steps})
        self.start = start
        self._hooks, self._training, self._trained = hooks, training, trained
        kinds = []
        for callback in hooks.callbacks:
            if not isinstance(callback, keras.callbacks.ProgbarLogger):  # Of the chief alone.
                kinds.append(type(callback).__name__)
        # Callbacks that only some workers have may change the weights of these alone.
        difference = hooks.exchange.find_difference("the callbacks of fit", {"kinds": kinds})
        self._compares_weights = difference is not None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Begins an epoch, or the rest of one."""
        skipped = self.start.step if epoch == self.start.epoch else 0
        if skipped:  # Metrics that wait for shapes are restored, so they must exist.
            self._training.step.runner.settle(lambda: self._training.feed.element_spec)
        super().on_epoch_begin(epoch, logs)
        self._training.begin(skipped)
        self._training.agree_on_stopping()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Calls the hooks; then all workers have one model, or an error."""
        super().on_epoch_end(epoch, logs)
        self._check_workers()

    def on_train_end(self, logs: Logs = None) -> None:
        """Puts averages into all trained variables, as Keras has for one optimizer."""
        if self._hooks.params["epochs"] > 0:
            for part in self._trained:
                update = update_of(part.optimizer)
                with nullcontext() if update is None else update.updating():
                    part.optimizer.finalize_variable_values(part.variables)
        super().on_train_end(logs)
        self._check_workers()

    def _check_workers(self) -> None:
        hooks = self._hooks
        check_same_training(hooks.exchange, hooks.model, self._trained, self._compares_weights)

    # What a callback asks that saves and resumes a training. --------------------------------------

    def batches(self) -> int:
        """Returns the batches so far, with those before a restart."""
        return self._training.seen

    def sums(self) -> Mapping[str, StepSums]:
        """Returns the sums of this epoch, which the loop adds up."""
        return self._training.sums

    def restore_sums(self, sums: Mapping[str, Sequence[Tensor]]) -> None:
        """Puts back the sums of a resumed epoch."""
        self._training.sums.update((name, StepSums(*fields)) for name, fields in sums.items())

    def data(self) -> Mapping[str, object]:
        """Returns the known facts of the data, in JSON types."""
        feed = self._training.feed
        return feed.description if feed.steps is None else {**feed.description, "steps": feed.steps}

    def metric_variables(self) -> list[KerasVariable]:
        """Returns the variables of the metrics in the logs."""
        return self._training.metrics.variables()

    def changed_variables(self) -> list[KerasVariable]:
        """Returns the variables that the steps change."""
        return self._training.step.changed_variables()

    def other_states(self) -> list[OtherState]:
        """Returns the state that the traces of the steps change."""
        return self._training.step.other_states()


def _check_averages(trained: Sequence[TrainStep]) -> None:
    """Checks that the ``fit`` of Keras can put moving averages into the variables at its end."""
    for part in trained:
        if unwrap_optimizer(part.optimizer).use_ema and any(map(is_sharded, part.variables)):
            raise LossError(
                "The fit of Keras cannot put moving averages into sharded variables at its end.",
                f"{type(part.optimizer).__name__} with use_ema=True",
                "Leave out use_ema, or write a loop over tmg.make_train_step.",
            )
