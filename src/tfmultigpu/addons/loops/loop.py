"""Functions that the loop of Keras calls for each batch: our steps, some batches ahead of it."""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
import tensorflow as tf

from tfmultigpu.addons.loops.compiled import EpochMetrics
from tfmultigpu.addons.loops.feed import Feed
from tfmultigpu.addons.loops.hooks import Hooks, Mode, not_ending_the_epoch
from tfmultigpu.addons.loops.logs import epoch_logs
from tfmultigpu.data.shard_iterator import ShardIterator
from tfmultigpu.errors import DataError, LossError
from tfmultigpu.steps.call_lengths import CallLength
from tfmultigpu.steps.chain import ChainedStep
from tfmultigpu.steps.evaluate import EvalStep
from tfmultigpu.steps.tally import Layout, Numbers
from tfmultigpu.steps.train import TrainStep
from tfmultigpu.types import Data, KerasModel, Nested, StepSums, Tensor
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

    def __call__(self, feed: Data) -> dict[str, Nested]:
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
        _, tallies = self.step.runner.run(iterator, steps, logs_last=False)
        if not self.seen:
            self._check_weights([tally.layout for tally in tallies.values()])
        for name, tally in tallies.items():
            values = tally.sums.numpy()  # Waits for the devices: Ctrl-C is handled here.
            if tally.layout is None or not values.ndim:  # Of no step it is a scalar.
                continue
            numbers = Numbers.of(values)
            ran, rows = int(numbers.steps), float(numbers.rows)
            terms = [dataclasses.asdict(term) for term in tally.layout.terms]
            if name in self.sums:
                values = np.add(values, self.sums[name].numbers)
            self.sums[name] = StepSums(values.tolist(), terms)
        if ran and not self.seen and self.mode == "train":
            self._warn_of_small_batches(rows / ran)
        return ran

    def read(self) -> dict[str, Tensor]:
        """Returns the logs of the epoch so far."""
        if not self.sums:
            return {}
        return epoch_logs(self.sums, self.metrics.results(), by_rows=self.by_rows)

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
        if rows < replicas:
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


def no_batches(data: Data) -> DataError:
    """Returns the error for empty data."""
    return DataError(
        "The data has no batches.",
        type(data).__name__,
        "Check its source, or a filter or take() that leaves nothing.",
    )
