"""One epoch of training: calls of many steps, and what they add up to."""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfmultigpu.loops.callbacks import BatchHooks
from tfmultigpu.loops.compiled import Compiled, compile_arguments, read_compiled
from tfmultigpu.loops.epoch_iterator import EpochIterator
from tfmultigpu.loops.evaluate import as_keras
from tfmultigpu.loops.step_cache import build, kept
from tfmultigpu.loops.steps_per_call import StepsPerCallTuner
from tfmultigpu.loops.worker_agreement import of_chief, several_workers
from tfmultigpu.steps.train import TrainStep, make_train_step

__all__ = ["Trainer", "make_trainer"]


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains with what a model was compiled with; kept with the model.

    Attributes:
        compiled: What that is.
        step: The step made of it.
        pace: How many steps a call should take.
    """

    compiled: Compiled
    step: TrainStep
    pace: StepsPerCallTuner

    def epoch(
        self,
        feed: EpochIterator,
        hooks: BatchHooks,
        *,
        first: int,
        sums: dict[str, float],
        steps_per_call: int | None,
        stops: bool,
        stopped: Callable[[bool], bool],
        clock: Clock,
    ) -> dict[str, Any] | None:
        """Trains for one epoch, which ``feed`` has begun.

        Args:
            feed: The batches.
            hooks: Who is told of batches.
            first: Number of the first batch.
            sums: Sums over the batches of the epoch so far; those of this call are added. Metrics
                must have been reset.
            steps_per_call: Steps in a call, or None for as many as pay.
            stops: Whether a callback has asked to stop when the epoch began.
            stopped: Whether to stop; asked after each call, with whether callbacks were called.
            clock: What measures calls.

        Returns:
            The logs; None where there were no batches.
        """
        hooks.begin_epoch(stops)
        done = first
        while most := feed.most(steps_per_call or self.pace.steps):
            asked = hooks.before(done, most)
            began = time.perf_counter()
            found = self.step.totals(feed.iterator, asked)
            # Reading numbers waits for the devices, so that the clock is right and Ctrl-C is heard.
            ran = int(found.pop("steps"))
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            if ran:
                clock.note(ran, time.perf_counter() - began)
                done += ran
                hooks.ran(ran)
                hooks.after(done - 1, functools.partial(self.logs, sums))
            if not feed.took(ran, asked) or (stops and ran) or stopped(hooks.called):
                break
        if done == first:
            return None
        logs = self.logs(sums)
        hooks.finish(done - 1, logs)
        return logs

    def logs(self, sums: Mapping[str, float]) -> dict[str, Any]:
        """Returns what Keras reports: losses as means over batches, weighted by their rows."""
        losses = {name: sums[name] / sums["rows"] for name in sums if name.endswith("loss")}
        return as_keras(losses, self.compiled.results())


class Clock:
    """Time as all workers see it: measured where there is one, else what calls should have taken.

    Attributes:
        elapsed: Returns the seconds since some moment.
    """

    elapsed: Callable[[], float]

    def __init__(self, pace: StepsPerCallTuner, strategy: tf.distribute.Strategy) -> None:
        """Takes what knows how long calls take."""
        self._pace = pace
        self._told = 0.0
        self.elapsed = (lambda: self._told) if several_workers(strategy) else time.perf_counter

    def note(self, steps: int, seconds: float) -> None:
        """Takes note of a call that ran."""
        self._pace.note(steps, seconds)
        self._told += self._pace.call + steps * self._pace.step


def make_trainer(
    model: Any, strategy: tf.distribute.Strategy, spec: Any, **options: Any
) -> Trainer:
    """Returns what trains a compiled model on batches of these types; kept with the model.

    Args:
        model: A compiled model.
        strategy: Where it lives.
        spec: The types of a batch.
        options: More arguments for ``make_train_step``.
    """

    def make() -> Trainer:
        compiled = read_compiled(model, strategy, spec)
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
        pace = StepsPerCallTuner(functools.partial(of_chief, strategy))
        return Trainer(compiled, step, pace)

    build(model, strategy, spec)
    # The step itself knows what is frozen; another compile or another layer is another step.
    variables = tuple(id(one) for one in model.variables)
    arguments = id(compile_arguments(model)), id(model.optimizer)
    trainer: Trainer = kept(model, "fit", (strategy, arguments, variables, options), make)
    return trainer
