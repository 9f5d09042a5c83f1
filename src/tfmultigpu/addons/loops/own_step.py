"""A ``train_step`` or ``test_step`` of a model itself, on one replica: Keras runs it."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import tensorflow as tf

from tfmultigpu.addons.loops.feed import Feed
from tfmultigpu.addons.loops.loop import Loop, Pace
from tfmultigpu.addons.loops.methods import installed
from tfmultigpu.addons.loops.own_methods import own_optimizers
from tfmultigpu.losses.build_model import has_call, prepare_model

__all__ = ["KerasLoop", "build_for_keras"]


class KerasLoop(Loop):
    """The function that Keras makes of a ``train_step`` or ``test_step``, read from our data.

    Attributes:
        sums: Empty: the logs are those of the last batch.
    """

    def __init__(self, model: Any, feed: Feed, mode: str, strategy: tf.distribute.Strategy) -> None:
        """Has Keras make the function.

        Args:
            model: The model.
            feed: The data.
            mode: ``"train"`` or ``"test"``.
            strategy: Its strategy, of one replica.
        """
        import keras

        width = int(model.steps_per_execution or 1)
        super().__init__(model, feed, Pace(strategy, width), width)
        self.mode = mode
        self.flag = "stop_training" if mode == "train" else "stop_evaluating"
        self.sums: dict[str, float] = {}
        name = f"{mode}_function"
        if vars(model).get(name) is None or isinstance(vars(model)[name], Loop):
            getattr(keras.Model, f"make_{name}")(model, force=True)
        self._function = vars(model)[name]

    def metric_variables(self) -> list[Any]:
        """Returns the variables of the metrics of the model, which Keras resets."""
        return [variable for metric in self.model.metrics for variable in metric.variables]

    def changed_variables(self) -> list[Any]:
        """Returns what the training may change."""
        optimizers = own_optimizers(self.model).values()
        return [*self.model.variables, *(v for each in optimizers for v in each.variables)]

    def begin(self, skipped: int = 0) -> None:
        """Begins an epoch, some batches of which an earlier process has trained on."""
        super().begin(skipped)
        self.logs = {}

    def __call__(self, feed: Any) -> Any:
        """Runs the next batches, and returns the logs of the last of them."""
        if self.waiting:
            return super().__call__(feed)
        width = self._most()
        asked = self.feed.most(width)
        if not asked:
            raise StopIteration
        self.hooks.call(self.mode, "begin", self.done)
        batches: Any = self.feed.iterator.source
        if asked < width or self.feed.most(sys.maxsize) == sys.maxsize:
            # The function of Keras reads on, and at the end of data it draws random numbers.
            known = list(itertools.islice(batches, asked))
            asked, batches = len(known), iter(known)
        if not asked:
            raise StopIteration
        with installed(self.model, steps_per_execution=asked):
            logs = self._function(batches)
        self.feed.took(asked, asked)
        self.advanced(asked)
        self.logs = logs
        self.waiting -= 1
        return logs


def build_for_keras(model: Any, strategy: tf.distribute.Strategy, spec: Any) -> None:
    """Builds what Keras would build in its first step: a checkpoint may restore it before.

    Args:
        model: The model.
        strategy: Its strategy.
        spec: The type specs of a batch.
    """
    if not model.built and has_call(model):
        prepare_model(model, strategy, spec)
    optimizers = list(own_optimizers(model).values())
    if len(optimizers) == 1 and not optimizers[0].built:
        with strategy.scope():
            optimizers[0].build(model.trainable_variables)
