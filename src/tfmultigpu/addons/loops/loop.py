"""Loops that the loop of Keras calls: our steps, some batches ahead of it, and the callbacks."""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.accumulation.loss_scale import unwrap_optimizer
from tfmultigpu.accumulation.losses import LossTerm
from tfmultigpu.accumulation.update import update_of
from tfmultigpu.addons.loops.compiled import EpochMetrics
from tfmultigpu.addons.loops.feed import Feed
from tfmultigpu.addons.loops.hooks import Hooks, Mode, not_ending_the_epoch
from tfmultigpu.addons.loops.workers import check_same_training
from tfmultigpu.data.shard_iterator import ShardIterator
from tfmultigpu.errors import DataError, LossError
from tfmultigpu.recorder import noting
from tfmultigpu.steps.chain import ChainedStep
from tfmultigpu.steps.evaluate import EvalStep
from tfmultigpu.steps.other_states import OtherState
from tfmultigpu.steps.pace import CallLength
from tfmultigpu.steps.tally import Layout, Numbers, Tally
from tfmultigpu.steps.train import TrainStep
from tfmultigpu.strategies.row_parts import sharded_of
from tfmultigpu.types import (
    Array,
    FitStart,
    KerasModel,
    KerasVariable,
    Nested,
    RunningFit,
    Scalar,
    StepSums,
    Tensor,
)
from tfmultigpu.user_code import warn

_log = logging.getLogger("tfmultigpu")
_Step = TypeVar("_Step", bound=TrainStep | ChainedStep | EvalStep)


class Loop(Generic[_Step]):
    """``model.train_function``: runs some batches ahead, and waits until Keras has counted them.

    Keras' ``fit`` is the outer loop. It calls what is on the right, in this order::

        reset_metrics()                       reset: no sums, empty metrics
        for epoch in range(start, epochs):
            reset_metrics()                   reset
            callbacks.on_epoch_begin(epoch)   hooks of the user; begin: the feed begins a pass
            for batch in feed:                the feed has no batch, Keras only counts
                logs = train_function(feed)   __call__:
                                                  if no batch is waiting to be counted:
                                                      steps = until a callback wants to be called
                                                      on_train_batch_begin
                                                      waiting = step.run(feed.iterator, steps)
                                                  waiting -= 1
                                                  if no batch is waiting:
                                                      logs = sums / weights, metrics
                                                      on_train_batch_end(logs)
                if model.stop_training: break
            logs = get_metrics_result()       logs
            evaluate(validation_data)         the same with an EvaluationLoop
            callbacks.on_epoch_end(logs)      hooks of the user; workers compare their models

    Attributes:
        mode: ``"train"`` or ``"test"``.
        flag: The attribute of the model by which a callback ends the loop.
        by_rows: Whether losses are means of the batches' losses, as Keras', each by its rows.
        hooks: The callbacks.
        feed: The data.
        step: The step that runs on it.
        metrics: The metrics in the logs.
        width: The batches of a call that the user has set, or None: ``pace`` finds how many fit.
        sums: For each step the sums of its tally over this epoch.
        done: Batches of this epoch.
        every: The numbers of batches after which callbacks of any worker want to be called. Workers
            exchange them where the first epoch begins, which none of them leaves out.
        seen: Batches since the beginning.
        waiting: Batches that ran, and that Keras has not counted yet.
        ran: Whether a batch has run in this epoch, here.
        logs: The logs of this epoch, up to the last call of the hooks.
    """

    mode: Mode
    flag: str
    by_rows: bool

    def __init__(
        self,
        model: KerasModel,
        hooks: Hooks,
        feed: Feed,
        step: _Step,
        metrics: EpochMetrics,
        pace: CallLength,
        *,
        width: int | None = None,
        seen: int = 0,
    ) -> None:
        self.model, self.hooks, self.feed, self.step = weakref.proxy(model), hooks, feed, step
        self.metrics, self.pace, self.width = metrics, pace, width
        self.sums: dict[str, StepSums] = {}
        self.done = self.waiting = 0
        self.every: list[int] | None = None
        self.seen = seen
        self.ran = False
        self.logs: dict[str, Nested] = {}

    def begin(self, skipped: int = 0) -> None:
        """Begins an epoch, some batches of which an earlier process has trained on."""
        if self.every is None:
            self.every = self.hooks.every_batches(self.mode)
        self.feed.begin_epoch()
        if skipped:
            self.feed.skip(skipped)
        self.done = self.waiting = skipped
        self.ran, self.logs = False, {}

    def agree_on_stopping(self) -> None:
        """Has all workers end the loop if a callback of any asks for it."""
        self.hooks.agree_on_stopping(self.flag)

    def __call__(self, feed: Any) -> dict[str, Nested]:
        """Trains or evaluates for Keras: the next batch, or batches that come after it too."""
        if not isinstance(feed, Feed):
            raise RuntimeError(
                "Keras gave its own data to a step of tfmultigpu, as model.fit, train_on_batch, "
                "test_on_batch or predict_on_batch do in a callback of tmg.fit. Received: "
                f"{type(feed).__name__}. Write self.model.evaluate(x, y) or self.model.predict(x) "
                "there; to train, call step(batch) of tmg.make_train_step."
            )
        if not self.waiting:
            self._advance()
        self.waiting -= 1
        if not self.waiting:
            self.logs = self.read()
            if self.ran:
                self.hooks.call(self.mode, "end", self.done - 1, dict(self.logs))
                self.agree_on_stopping()
        return self.logs

    def reset(self) -> None:
        """Forgets the batches of this epoch so far, in losses and metrics."""
        self.metrics.reset()
        self.sums.clear()

    def run(self, iterator: ShardIterator, steps: int) -> int:
        """Runs up to ``steps`` batches, and returns how many there were."""
        ran, rows = 0, 0.0
        # One sum over the epoch: how many steps a call computes depends on their time.
        before = {name: _tally_of(sums) for name, sums in self.sums.items()}
        _, tallies = self.step.runner.run(iterator, steps, logs_last=False, before=before)
        if not self.seen:
            self._check_weights([tally.layout for tally in tallies.values()])
        for name, tally in tallies.items():
            with noting("logs", "of the last steps"):
                values = tally.sums.numpy()  # Waits for the devices: Ctrl-C is handled here.
            if tally.layout is None or not values.ndim:  # Of no step it is a scalar.
                continue
            numbers = Numbers.of(values)
            ran, rows = int(numbers.steps), float(numbers.rows)
            if name in self.sums:
                ran -= int(Numbers.of(self.sums[name].numbers).steps)
            terms = [dataclasses.asdict(term) for term in tally.layout.terms]
            self.sums[name] = StepSums(values.tolist(), terms)
        if ran and not self.seen and self.mode == "train":
            self._warn_of_small_batches(rows / ran)
        return ran

    def read(self) -> dict[str, Tensor]:
        """Returns the logs of the epoch so far."""
        if not self.sums:
            return {}
        with noting("logs", "of the epoch so far"):
            return _epoch_logs(self.sums, self.metrics.results(), by_rows=self.by_rows)

    def _advance(self) -> None:
        """Runs the next batches in one call; raises StopIteration at the end of the data."""
        ran = 0
        while not ran:
            asked = self.feed.most(self._most())
            if not asked:
                break
            self.hooks.call(self.mode, "begin", self.done)
            began = time.perf_counter()
            ran = not_ending_the_epoch(self.run, self.feed.iterator, asked)
            self.pace.note(ran, began)
            if not self.feed.took(ran, asked):
                break
        if not ran:
            if not self.done:
                raise no_batches(self.feed.source)
            raise StopIteration  # The end of data of unknown length.
        self.done += ran
        self.seen += ran
        self.waiting, self.ran = ran, True
        if getattr(self.model, self.flag, False):
            self.waiting = 1  # Keras stops after this batch.

    def _most(self) -> int:
        """Returns the largest number of batches in the next call."""
        if self.width is not None:
            return self.width
        if getattr(self.model, self.flag, False):
            return 1
        most = self.pace.steps
        for every in self.every or ():
            most = min(most, every - self.seen % every)
        return most

    def _check_weights(self, layouts: Sequence[Layout | None]) -> None:
        """Checks that the loss of a step reads the sample weights that the user gives."""
        known = [layout for layout in layouts if layout is not None]
        if not known or any(layout.reads_weights for layout in known):
            return
        third = self.feed.element_spec[2]
        what = "The forward computes a loss that the sample weights do not reach."
        write = (
            "Write x, y, weight = batch in it, and return tmg.loss_sum(loss, y, outputs, weight)."
        )
        if self.feed.weights:
            raise LossError(what, f"{self.feed.weights}, and a batch (x, y, weight)", write)
        if all(leaf.dtype.is_floating for leaf in tf.nest.flatten(third)):
            warn(
                f"{what} Received: batches of three parts, the last of {third}. {write} Or leave "
                "that part out of the data."
            )

    def _warn_of_small_batches(self, rows: float) -> None:
        replicas = self.hooks.strategy.num_replicas_in_sync
        if rows < replicas and self.step.logical_replicas is None:  # Those without rows have none.
            _log.warning(
                f"A batch of {rows:g} example(s) is smaller than {replicas} replicas: each "
                "computes all of it, so more devices make nothing faster. Write "
                f"batch_size={32 * replicas}, or dataset.batch({32 * replicas})."
            )


class TrainingLoop(Loop[TrainStep | ChainedStep]):
    """``model.train_function``."""

    mode = "train"
    flag = "stop_training"
    by_rows = True


class EvaluationLoop(Loop[EvalStep]):
    """``model.test_function``: its losses count all rows, however these are batched."""

    mode = "test"
    flag = "stop_evaluating"
    by_rows = False


def no_batches(data: Any) -> DataError:
    """Returns the error for empty data."""
    return DataError(
        "The data has no batches.",
        type(data).__name__,
        "Check its source, or a filter or take() that leaves nothing.",
    )


def _layout_of(sums: StepSums) -> Layout:
    return Layout(tuple([LossTerm(**each) for each in sums.terms]))


def _tally_of(sums: StepSums) -> Tally:
    """Returns the tally that has these sums, without the logs of a last step."""
    return Tally(_layout_of(sums), tf.constant(sums.numbers, tf.float64), Tally.empty().last)


def _epoch_logs(
    sums: Mapping[str, StepSums], metrics: Mapping[str, Scalar], *, by_rows: bool
) -> dict[str, Scalar | Array]:
    """Returns the logs of an epoch, sorted: with the losses of outputs only if there are several.

    Args:
        sums: For each step the sums of its tally.
        metrics: The results of the metrics.
        by_rows: Whether losses are means of the batches' losses, each by its rows.
    """
    losses: dict[str, Tensor] = {}
    for step, step_sums in sums.items():
        means = _layout_of(step_sums).means(Numbers.of(step_sums.numbers), by_rows=by_rows)
        for name, value in means.items():
            if name.endswith("loss"):
                losses[f"{step}_{name}" if step else name] = value
    if both := sorted(losses.keys() & metrics.keys()):
        raise ValueError(
            "A metric has the name of a loss, so one of them would be lost. Received: "
            f"{both}. Give the metric another name: keras.metrics.Mean(name=...)."
        )
    logs = dict(losses)
    if len(losses) == 2 and "loss" in losses:  # Of one output, which has the same loss.
        logs = {"loss": losses["loss"]}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            logs.update(value)
        else:
            logs[name] = value
    return {name: _number(logs[name]) for name in sorted(logs)}


def _number(value: Scalar) -> Scalar | Array:
    array = np.asarray(value)
    if array.ndim:
        return array
    return array.item()


class EvaluationCallbacks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """The callbacks of an evaluation, as the loop of Keras calls them.

    Attributes:
        evaluation: The loop of an evaluation or a validation; None for a training without.
    """

    def __init__(self, hooks: Hooks, evaluation: EvaluationLoop | None, **params: object) -> None:
        # ``hooks`` has given its callbacks their model and their parameters.
        super().__init__(hooks.callbacks, **params)
        self.evaluation = evaluation

    def on_test_begin(self, logs: Any = None) -> None:
        """Begins a pass of an evaluation."""
        super().on_test_begin(logs)
        assert self.evaluation is not None
        self.evaluation.begin()
        self.evaluation.agree_on_stopping()

    def _of_the_loop(self, batch: int, logs: Any = None) -> None:
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

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins an epoch, or the rest of one."""
        skipped = self.start.step if epoch == self.start.epoch else 0
        if skipped:  # Metrics that wait for shapes are restored, so they must exist.
            self._training.step.runner.settle(lambda: self._training.feed.element_spec)
        super().on_epoch_begin(epoch, logs)
        self._training.begin(skipped)
        self._training.agree_on_stopping()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Calls the hooks; then all workers have one model, or an error."""
        with noting("callback", "on_epoch_end", epoch + 1):
            super().on_epoch_end(epoch, logs)
        self._check_workers()

    def on_train_end(self, logs: Any = None) -> None:
        """Puts averages into all trained variables, as Keras has for one optimizer."""
        if self._hooks.params["epochs"] > 0:
            for part in self._trained:
                finalize = part.optimizer.finalize_variable_values
                # Keras has called it already. Its own may run twice, one of a user may not.
                of_fit = part.optimizer is self._hooks.model.optimizer
                if of_fit and not _compat.is_part_of_keras(finalize):
                    continue
                update = update_of(part.optimizer)
                with nullcontext() if update is None else update.updating():
                    finalize(part.variables)
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

    @property
    def logical_replicas(self) -> int | None:
        """Into how many the step cuts each batch; None if into one for each replica."""
        return self._training.step.logical_replicas

    def changed_variables(self) -> list[KerasVariable]:
        """Returns the variables that the steps change."""
        return self._training.step.changed_variables()

    def other_states(self) -> list[OtherState]:
        """Returns the state that the traces of the steps change."""
        return self._training.step.other_states()


def _check_averages(trained: Sequence[TrainStep]) -> None:
    """Checks that the ``fit`` of Keras can put moving averages into the variables at its end."""
    for part in trained:
        if unwrap_optimizer(part.optimizer).use_ema and sharded_of(part.variables):
            raise LossError(
                "The fit of Keras cannot put moving averages into sharded variables at its end.",
                f"{type(part.optimizer).__name__} with use_ema=True",
                "Leave out use_ema, or write a loop over tmg.make_train_step.",
            )
