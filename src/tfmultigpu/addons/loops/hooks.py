"""Keras' list of callbacks, whose batch hooks come around calls of several batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import keras
import tensorflow as tf

from tfmultigpu._compat import is_part_of_keras, profiles_batches
from tfmultigpu.accumulation.loss_scale import unwrap_optimizer
from tfmultigpu.accumulation.update import update_of
from tfmultigpu.addons.loops.feed import Feed
from tfmultigpu.addons.loops.files import check_files
from tfmultigpu.addons.loops.loop import Loop, not_ending_the_epoch
from tfmultigpu.addons.loops.workers import check_alike, check_same_training, union
from tfmultigpu.data.positioned import Position
from tfmultigpu.data.preprocessing import draw_seed
from tfmultigpu.errors import CheckpointError, LossError
from tfmultigpu.steps.chain import ChainedStep
from tfmultigpu.strategies.topology import is_sharded
from tfmultigpu.strategies.worker_exchange import WorkerExchange
from tfmultigpu.types import FitStart, KerasModel, KerasOptimizer


class Hooks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """The callbacks of an evaluation or a prediction, as the loop of Keras calls them.

    Attributes:
        strategy: The strategy of the model.
        evaluation: The loop of an evaluation or a validation.
        outputs: The outputs of the last batch of a prediction.
    """

    evaluation: Loop
    outputs: Any = None

    def __init__(
        self, callbacks: Any, model: KerasModel, strategy: tf.distribute.Strategy, *, verbose: Any,
        step: Any = None, add_history: bool = False, **params: Any,
    ) -> None:  # fmt: skip
        """Makes the list, with a progress bar on the chief; ``params`` as in Keras' list."""
        if verbose not in (0, 1, 2, "auto"):
            raise ValueError(f"verbose must be 0, 1, 2 or 'auto'. Received: verbose={verbose!r}.")
        self._exchange = WorkerExchange(strategy)
        shown = verbose if self._exchange.is_chief else 0
        callbacks = to_list(callbacks)
        check_callbacks(callbacks, model, step)
        check_files(self._exchange, callbacks, model)
        adapt_callbacks(callbacks, getattr(model, "optimizer", None))
        super().__init__(
            callbacks, add_history=add_history, add_progbar=shown != 0, verbose=shown,
            model=model, **params,
        )  # fmt: skip
        self.strategy = strategy

    def serve(self, loop: Loop) -> None:
        """Calls the hooks of an evaluation."""
        self.evaluation = loop
        loop.hooks = self

    def read(self, feed: Feed) -> None:
        """Begins to read the data of a prediction once its callbacks know that it begins."""
        self._predicted = feed

    def every_batches(self, mode: str) -> list[int]:
        """Returns the numbers of batches after which callbacks of any worker want to be called."""
        wanted = [every_batches(callback, mode) for callback in self.callbacks]
        return union(self.strategy, {every for every in wanted if every is not None})

    def call(self, mode: str, moment: str, batch: int, logs: Any = None) -> None:
        """Calls a batch hook: ``moment`` is ``"begin"`` or ``"end"``."""
        for callback in self.callbacks:
            not_ending_the_epoch(getattr(callback, f"on_{mode}_batch_{moment}"), batch, logs)

    def agree_on_stopping(self, flag: str = "stop_training") -> None:
        """Sets a flag of the model on all workers if it is set on any."""
        if self._exchange.workers > 1:
            wanted = int(bool(getattr(self.model, flag, False)))
            setattr(self.model, flag, bool(self._exchange(flag, [wanted]).any()))

    def on_test_begin(self, logs: Any = None) -> None:
        """Begins a pass of an evaluation."""
        super().on_test_begin(logs)
        self.evaluation.feed.begin_epoch()
        self.evaluation.begin()

    def on_predict_begin(self, logs: Any = None) -> None:
        """Begins the pass of a prediction."""
        super().on_predict_begin(logs)
        self._predicted.begin_epoch()

    def _of_the_loop(self, batch: int, logs: Any = None) -> None:
        """Does nothing: Keras counts each batch, and a loop calls the hooks itself."""

    on_train_batch_begin = on_train_batch_end = _of_the_loop
    on_test_batch_begin = on_test_batch_end = _of_the_loop

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Calls the hooks with the outputs, which Keras is not given."""
        super().on_predict_batch_end(batch, {"outputs": self.outputs})
        self.agree_on_stopping("stop_predicting")


class FitHooks(Hooks):
    """The callbacks of a training: the ``types.RunningFit`` of those that save and resume it.

    Attributes:
        start: Where the training begins.
        position: The same place in the data; None if no callback resumes the training.
    """

    def __init__(
        self, callbacks: Any, model: KerasModel, strategy: tf.distribute.Strategy, *, verbose: Any,
        step: Any, epochs: int, first_epoch: int,
    ) -> None:  # fmt: skip
        """Makes the list, and asks the callback that resumes a training where to begin."""
        super().__init__(
            callbacks, model, strategy, verbose=verbose, step=step, add_history=True,
            epochs=epochs, steps=None,
        )  # fmt: skip
        self.epochs, self.first_epoch, self.seed = epochs, first_epoch, draw_seed(strategy)
        # They save the state of the others, and restore it: they come last.
        self._resuming = [each for each in self.callbacks if hasattr(each, "on_fit_begin")]
        self.callbacks.sort(key=lambda callback: callback in self._resuming)
        starts = [callback.on_fit_begin(self) for callback in self._resuming]
        as_asked = FitStart(self.seed, first_epoch, first_epoch, 0, 0)
        self.start: FitStart = next((s for s in starts if s is not None), as_asked)
        check_alike(strategy, "fit", {"the start of a resumed fit": self.start})
        self.seed, self.first_epoch = self.start.seed, self.start.first_epoch
        begin = Position(self.start.epoch - self.first_epoch, self.start.step)
        self.position: Position | None = begin if self._resuming else None

    def train(self, loop: Any) -> None:
        """Keeps the loop, whose steps train."""
        for part in loop.step.train_steps:
            if unwrap_optimizer(part.optimizer).use_ema and any(map(is_sharded, part.variables)):
                raise LossError(
                    "The fit of Keras cannot put moving averages into sharded variables at its "
                    "end.",
                    f"{type(part.optimizer).__name__} with use_ema=True",
                    "Leave out use_ema, or write a loop over tmg.make_train_step.",
                )
        loop.hooks = self
        self._training = loop
        self.sums, self.metric_variables = loop.sums, loop.metrics.variables
        self.changed_variables = loop.step.changed_variables
        self.other_states = loop.step.other_states
        loop.seen = self.start.batches
        self.set_params({**self.params, "steps": loop.feed.steps})
        own = [c for c in self.callbacks if not isinstance(c, keras.callbacks.ProgbarLogger)]
        kinds = {"kinds": [type(callback).__name__ for callback in own]}
        # Callbacks that only some workers have may change the weights of these alone.
        difference = self._exchange.find_difference("the callbacks of fit", kinds)
        self._compares_weights = difference is not None

    @property
    def batches(self) -> int:
        """Batches so far, with those before a restart."""
        return int(self._training.seen)

    @property
    def data(self) -> dict[str, Any]:
        """The known facts of the data, in JSON types."""
        feed = self._training.feed
        return {**feed.description, **({} if feed.steps is None else {"steps": feed.steps})}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins an epoch, or the rest of one."""
        loop, start = self._training, self.start
        skipped = start.step if epoch == start.epoch else 0
        if skipped:  # Metrics that wait for shapes are restored, so they must exist.
            loop.step.runner.settle(lambda: loop.feed.element_spec)
        super().on_epoch_begin(epoch, logs)
        loop.feed.begin_epoch()
        loop.feed.skip(skipped)
        loop.begin(skipped)
        self.agree_on_stopping()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Calls the hooks; then all workers have one model, or an error."""
        super().on_epoch_end(epoch, logs)
        self._check_workers()

    def on_train_end(self, logs: Any = None) -> None:
        """Puts averages into all trained variables, as Keras has for one optimizer."""
        for part in self._training.step.train_steps if self.epochs > 0 else ():
            update = update_of(part.optimizer)
            with nullcontext() if update is None else update.updating():
                part.optimizer.finalize_variable_values(part.variables)
        super().on_train_end(logs)
        self._check_workers()

    def _check_workers(self) -> None:
        trained = self._training.step.train_steps
        check_same_training(self._exchange, self.model, trained, self._compares_weights)

    def exit(self) -> None:
        """Tells callbacks that save and resume a training that it ends, also by an error."""
        for callback in self._resuming:
            callback.on_fit_exit()


def to_list(callbacks: Any) -> list[Any]:
    """Returns a callback, a sequence of them or a ``CallbackList`` as a list."""
    if isinstance(callbacks, keras.callbacks.Callback):
        return [callbacks]
    return list(getattr(callbacks, "callbacks", callbacks) or ())


def check_callbacks(callbacks: Iterable[Any], model: KerasModel = None, step: Any = None) -> None:
    """Checks that callbacks work in the loops of this library, and with a step of the user."""
    of_optimizer = (
        keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau,
        keras.callbacks.SwapEMAWeights, keras.callbacks.TensorBoard,
    )  # fmt: skip
    for callback in callbacks:
        kind = type(callback).__name__
        if not isinstance(callback, keras.callbacks.Callback):
            raise TypeError(
                f"A callback must be a keras.callbacks.Callback. Received: {callback!r} in "
                "callbacks. Write callbacks=[EarlyStopping()], or [checkpoints.callback()]."
            )
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise CheckpointError(
                "BackupAndRestore resumes only Keras' own fit, and not exactly.",
                "",
                "Write checkpoints = tmg.Checkpoints(directory, model, model.optimizer); "
                "checkpoints.restore(), and callbacks=[checkpoints.callback()] in tmg.fit.",
            )
        if isinstance(callback, keras.callbacks.TerminateOnNaN) and isinstance(step, ChainedStep):
            raise LossError(
                "TerminateOnNaN reads the log 'loss', and a chain logs a loss for each step.",
                f"TerminateOnNaN with steps {list(step.steps)}",
                "Write a callback that sets model.stop_training if a NAME_loss in its logs is not "
                "finite.",
            )
        if isinstance(callback, of_optimizer) and step is not None:
            own = unwrap_optimizer(getattr(model, "optimizer", None))
            if not any(own is unwrap_optimizer(part.optimizer) for part in step.train_steps):
                raise LossError(
                    f"{kind} uses the optimizer of the model, which the step does not train with.",
                    f"{kind}, and model {model.name!r} with "
                    f"{'no optimizer' if own is None else f'the optimizer {own.name!r}'}",
                    "In the scope, write model.compile(optimizer) with the optimizer of the step.",
                )


def adapt_callbacks(callbacks: Iterable[Any], optimizer: KerasOptimizer) -> None:
    """Makes callbacks that swap moving averages swap the averages of the replicas that own them."""

    def swapping(method: Callable[..., None], *args: Any) -> None:
        with update.updating() if (update := update_of(optimizer)) else nullcontext():
            method(*args)

    swaps = keras.callbacks.SwapEMAWeights
    for callback in callbacks if optimizer is not None else ():
        for hook in dir(swaps) if isinstance(callback, swaps) else ():
            if hook.startswith("on_") and hook.endswith(("begin", "end")) and "batch" not in hook:
                # Of the class, so that a second fit does not wrap twice.
                method = getattr(type(callback), hook).__get__(callback)
                setattr(callback, hook, functools.partial(swapping, method))


def every_batches(callback: Any, mode: str) -> int | None:
    """Returns the batches between calls of a callback; None for after calls of any length.

    A callback with batch hooks is called for each batch, or every ``every_batches`` batches: an
    optional attribute of it. The progress bar and callbacks without such hooks are not.
    """
    if hasattr(callback, "every_batches"):
        return None if callback.every_batches is None else int(callback.every_batches)
    names = [f"on_{mode}_batch_begin", f"on_{mode}_batch_end"]
    if mode == "train":
        names += ["on_batch_begin", "on_batch_end"]
    idle = [keras.callbacks.Callback, keras.callbacks.ProgbarLogger]
    # ModelCheckpoint and TensorBoard, if they do nothing after a batch.
    often = getattr(callback, "write_steps_per_second", False) or profiles_batches(callback)
    if "epoch" in (getattr(callback, "save_freq", 0), getattr(callback, "update_freq", 0)):
        idle += [] if often else filter(is_part_of_keras, type(callback).__mro__)
    owners = [kind for kind in (callback, *type(callback).__mro__) if kind not in idle]
    return 1 if any(name in vars(kind) for name in names for kind in owners) else None
