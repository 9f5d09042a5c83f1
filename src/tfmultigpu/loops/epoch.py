"""One epoch of training: calls of several steps, and the logs they add up to."""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfmultigpu.loops.callbacks import BatchHooks
from tfmultigpu.loops.compiled import compile_arguments, read_compiled
from tfmultigpu.loops.epoch_iterator import EpochIterator
from tfmultigpu.loops.evaluator import as_keras, distinct
from tfmultigpu.loops.own_loss import own_loss
from tfmultigpu.loops.step_cache import build, get_or_make
from tfmultigpu.loops.steps_per_call import StepsPerCallTuner
from tfmultigpu.loops.tracked_metrics import EpochMetrics, with_own_metrics
from tfmultigpu.loops.worker_agreement import has_several_workers, value_of_chief
from tfmultigpu.steps.chain import ChainedStep
from tfmultigpu.steps.multi_step import LastKey
from tfmultigpu.steps.train import TrainStep, make_train_step

__all__ = ["Trainer", "make_trainer"]


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Training of a model for epochs; that of a compiled model is cached with it.

    Attributes:
        metrics: The metrics in the logs.
        step: The train step.
        tuner: Chooses the steps per call.
    """

    metrics: EpochMetrics
    step: TrainStep | ChainedStep
    tuner: StepsPerCallTuner

    def epoch(
        self,
        epoch_iterator: EpochIterator,
        hooks: BatchHooks,
        *,
        first: int,
        sums: dict[str, float],
        steps_per_call: int | None,
        stops: bool,
        stopped: Callable[[bool], bool],
        clock: Clock,
    ) -> dict[str, Any] | None:
        """Trains for one epoch; call ``epoch_iterator.begin_epoch`` and reset the metrics first.

        Args:
            epoch_iterator: The batches.
            hooks: The batch hooks of the callbacks.
            first: Number of the first batch.
            sums: Sums over the batches of the epoch so far, and under a ``LastKey`` the value of
                the last one; updated by this call.
            steps_per_call: Steps in a call; None lets the tuner choose.
            stops: Whether a callback had asked to stop before the epoch.
            stopped: Returns whether to stop; called after each call of steps. Its argument says
                whether callbacks were called.
            clock: The clock that measures calls.

        Returns:
            The logs; None if there were no batches.
        """
        hooks.begin_epoch(stops)
        done = first
        while most := epoch_iterator.most(steps_per_call or self.tuner.steps):
            asked = hooks.before(done, most)
            began = time.perf_counter()
            found = self.step.totals(epoch_iterator.iterator, asked)
            # int() waits for the devices, so the time is right and Ctrl-C is handled here.
            ran = int(found.pop("steps"))
            if ran:
                for name, value in found.items():
                    before = 0.0 if isinstance(name, LastKey) else sums.get(name, 0.0)
                    sums[name] = before + float(value)
                clock.note(ran, time.perf_counter() - began)
                done += ran
                hooks.ran(ran)
                hooks.after(done - 1, functools.partial(self.logs, sums))
            if not epoch_iterator.took(ran, asked) or (stops and ran) or stopped(hooks.called):
                break
        if done == first:
            return None
        logs = self.logs(sums)
        hooks.finish(done - 1, logs)
        return self.epoch_logs(logs)

    def epoch_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Returns the logs of an epoch, from those after its last batch: the same."""
        return logs

    def logs(self, sums: Mapping[str, float]) -> dict[str, Any]:
        """Returns the logs of Keras: losses are means over batches, weighted by their examples.

        A value that ``forward`` returned with a weight is divided by the sum of its weights.
        """
        values = {name: sums[name] for name in sums if f"{name}_weight" in sums}
        means = {n: _divided(value, sums[f"{n}_weight"]) for n, value in values.items()}
        losses = {
            name: sums[name] / sums["rows"]
            for name in sums
            if name.endswith("loss") and name not in values
        }
        return as_keras(losses, distinct({**losses, **means}, means, self.metrics.results()))


def _divided(total: float, weight: float) -> float:
    return total / weight if weight else 0.0


class Clock:
    """Clock that reads the same on all workers.

    One worker measures the time. Several workers add up the expected durations of their calls.

    Attributes:
        elapsed: Returns the seconds since a fixed moment.
    """

    elapsed: Callable[[], float]

    def __init__(self, tuner: StepsPerCallTuner, strategy: tf.distribute.Strategy) -> None:
        """Stores the tuner, which knows the durations of calls."""
        self._tuner = tuner
        self._expected = 0.0
        several = has_several_workers(strategy)
        self.elapsed = (lambda: self._expected) if several else time.perf_counter

    def note(self, steps: int, seconds: float) -> None:
        """Records the duration of a call."""
        self._tuner.note(steps, seconds)
        self._expected += self._tuner.call + steps * self._tuner.step


def make_trainer(
    model: Any, strategy: tf.distribute.Strategy, spec: Any, **options: Any
) -> Trainer:
    """Returns the cached ``Trainer`` of a compiled model, or makes one.

    Args:
        model: A compiled model.
        strategy: Its strategy.
        spec: The type specs of a batch.
        options: More arguments for ``make_train_step``.
    """

    def make() -> Trainer:
        own = own_loss(model, strategy, spec)
        compiled = read_compiled(model, strategy, spec, None if own is None else own.loss)
        step = make_train_step(
            weakref.proxy(model),
            model.optimizer,
            compiled.losses,
            strategy,
            metrics=compiled.metrics,
            weighted_metrics=compiled.weighted_metrics,
            loss_weights=compiled.loss_weights,
            **options,
        )
        tuner = StepsPerCallTuner(functools.partial(value_of_chief, strategy))
        return Trainer(with_own_metrics(compiled, () if own is None else own.metrics), step, tuner)

    build(model, strategy, spec)
    # A new compile or a new layer needs a new step; the step itself handles frozen layers.
    variables = tuple(id(one) for one in model.variables)
    arguments = id(compile_arguments(model)), id(model.optimizer)
    trainer: Trainer = get_or_make(model, "fit", (strategy, arguments, variables, options), make)
    return trainer
