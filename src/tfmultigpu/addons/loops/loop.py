"""Functions that the loop of Keras calls for each batch: our steps, some batches ahead of it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.addons.loops.compiled import EpochMetrics
from tfmultigpu.addons.loops.feed import Feed
from tfmultigpu.addons.loops.logs import epoch_logs
from tfmultigpu.errors import DataError
from tfmultigpu.steps.call_lengths import CallLength
from tfmultigpu.steps.tally import Numbers
from tfmultigpu.types import KerasModel

_log = logging.getLogger("tfmultigpu")


class Loop:
    """``model.train_function``: runs some batches ahead, and waits until Keras has counted them.

    Attributes:
        mode: ``"train"`` or ``"test"``.
        flag: The attribute of the model by which a callback ends the loop.
        by_rows: Whether losses are means of the batches' losses, as Keras', each by its rows.
        hooks: The callbacks; see ``hooks.Hooks``.
        feed: The data.
        step: The step that runs on it.
        metrics: The metrics in the logs.
        sums: For each step the sums of its tally over this epoch, and their terms, in JSON types: a
            run that resumes may have no further batch in it.
        done: Batches of this epoch.
        seen: Batches since the beginning.
        waiting: Batches that ran, and that Keras has not counted yet.
        ran: Whether a batch has run in this epoch, here.
        logs: The logs of this epoch, up to the last call of the hooks.
    """

    mode = "train"
    flag = "stop_training"
    by_rows = True

    def __init__(
        self, model: KerasModel, feed: Feed, step: Any, metrics: EpochMetrics, pace: CallLength,
        width: int | None = None,
    ) -> None:  # fmt: skip
        """Keeps the model (not alive), its data, the step, and the batches of a call.

        ``width`` is the number of batches in a call that the user has set, or None.
        """
        self.model, self.feed, self.step = weakref.proxy(model), feed, step
        self.metrics, self._pace, self._width = metrics, pace, width
        self.sums: dict[str, tuple[list[float], list[dict[str, Any]]]] = {}
        self.hooks: Any = None
        self.done = self.seen = self.waiting = 0
        self.ran = False
        self.logs: dict[str, Any] = {}

    def begin(self, skipped: int = 0) -> None:
        """Begins an epoch, some batches of which an earlier process has trained on."""
        self.done = self.waiting = skipped
        self.ran, self.logs = False, {}

    def __call__(self, feed: Any) -> dict[str, Any]:
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
                self.hooks.agree_on_stopping(self.flag)
        return self.logs

    def reset(self) -> None:
        """Forgets the batches of this epoch so far, in losses and metrics."""
        self.metrics.reset()
        self.sums.clear()

    def run(self, iterator: Any, steps: int) -> int:
        """Runs up to ``steps`` batches, and returns how many there were."""
        ran, rows = 0, 0.0
        for name, tally in self.step.runner.run(iterator, steps)[1].items():
            new = tally.sums.numpy()  # Waits for the devices: Ctrl-C is handled here.
            if new.ndim:  # Of no step it is a scalar.
                numbers = Numbers.of(new)
                ran, rows = int(numbers.steps), float(numbers.rows)
                terms = [dataclasses.asdict(term) for term in tally.layout.terms]
                before, _ = self.sums.get(name, (0.0, terms))
                self.sums[name] = np.add(new, before).tolist(), terms
        replicas = self.hooks.strategy.num_replicas_in_sync
        if ran and self.mode == "train" and not self.seen and rows < ran * replicas:
            _log.warning(
                f"A batch of {rows / ran:g} example(s) is smaller than {replicas} replicas: each "
                "computes all of it, so more devices make nothing faster. Write "
                f"batch_size={32 * replicas}, or dataset.batch({32 * replicas})."
            )
        return ran

    def read(self) -> dict[str, Any]:
        """Returns the logs of the epoch so far."""
        if not self.sums:
            return {}
        return epoch_logs(self.sums, self.metrics.results(), by_rows=self.by_rows)

    def _advance(self) -> None:
        asked = ran = 0
        while not ran and (asked := self.feed.most(self._most())):
            self.hooks.call(self.mode, "begin", self.done)
            began = time.perf_counter()
            ran = not_ending_the_epoch(self.run, self.feed.iterator, asked)
            self._pace.note(ran, began)
            if not self.feed.took(ran, asked):
                break
        if not ran:
            if not self.done:
                raise no_batches(self.feed.source)
            raise StopIteration  # The end of data of unknown length.
        self.done, self.seen, self.waiting, self.ran = self.done + ran, self.seen + ran, ran, True
        if getattr(self.model, self.flag, False):
            self.waiting = 1  # Keras stops after this batch.

    def _most(self) -> int:
        if self._width is not None:
            return self._width
        if getattr(self.model, self.flag, False):
            return 1
        return min([self._pace.steps, *(every - self.seen % every for every in self._every)])

    @functools.cached_property
    def _every(self) -> list[int]:
        """The numbers of batches after which callbacks want to be called."""
        return list(self.hooks.every_batches(self.mode))


class EvaluationLoop(Loop):
    """``model.test_function``: its losses count all rows, however these are batched."""

    mode = "test"
    flag = "stop_evaluating"
    by_rows = False


def not_ending_the_epoch(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a callback or a step; to Keras two kinds of its errors would be the end of the data."""
    try:
        return function(*args)
    except (StopIteration, tf.errors.OutOfRangeError) as error:
        raise RuntimeError(
            f"A callback or the data raised what ends an epoch without a word: {error!r}. To stop, "
            "set model.stop_training = True."
        ) from error


def no_batches(data: Any) -> DataError:
    """Returns the error for empty data."""
    return DataError(
        "The data has no batches.",
        type(data).__name__,
        "Check its source, or a filter or take() that leaves nothing.",
    )
