"""The callbacks of a call, whose batch hooks come around calls of several batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import keras
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import setting
from tfmultigpu.accumulation.loss_scale import unwrap_optimizer
from tfmultigpu.accumulation.update import update_of
from tfmultigpu.addons.loops.files import check_files
from tfmultigpu.addons.loops.workers import check_alike, union
from tfmultigpu.arguments import brief, check_count
from tfmultigpu.data.preprocessing import draw_seed
from tfmultigpu.errors import CheckpointError, LossError
from tfmultigpu.recorder import noting
from tfmultigpu.steps.chain import ChainedStep
from tfmultigpu.steps.train import TrainStep
from tfmultigpu.strategies.worker_exchange import WorkerExchange
from tfmultigpu.types import (
    FitStart,
    KerasModel,
    KerasOptimizer,
    ResumingCallback,
    RunningFit,
    Verbose,
)

# Keras' loops, by whose names hooks and functions of a model are called.
Mode = Literal["train", "test", "predict"]
_Result = TypeVar("_Result")


class Hooks:
    """The callbacks of a call of ``fit``, ``evaluate`` or ``predict``, as a loop calls them.

    Attributes:
        callbacks: All of them, with a progress bar on the chief, and ``History`` if asked.
        model: The model that they see.
        strategy: The strategy of the model.
        exchange: What the workers tell each other.
        params: What the callbacks know of the call.
    """

    def __init__(
        self,
        callbacks: object,
        model: KerasModel,
        strategy: tf.distribute.Strategy,
        *,
        verbose: Verbose,
        epochs: int = 1,
        steps: int | None = None,
        step: TrainStep | ChainedStep | None = None,
        add_history: bool = False,
    ) -> None:
        if verbose not in (0, 1, 2, "auto"):
            raise ValueError(
                f"verbose must be 0, 1, 2 or 'auto'. Received: verbose={brief(verbose)}."
            )
        self.model, self.strategy = model, strategy
        self.exchange = WorkerExchange(strategy)
        shown = verbose if self.exchange.is_chief else 0
        given = to_list(callbacks)
        _check_callbacks(given, model, step)
        check_files(self.exchange, given, model)
        of_keras = keras.callbacks.CallbackList(
            given,
            add_history=add_history,
            add_progbar=shown != 0,
            model=model,
            verbose=shown,
            epochs=epochs,
            steps=steps,
        )
        self.params = dict(of_keras.params)
        # Those that resume a training save the state of the others, and restore it: they come last.
        self.callbacks = sorted(of_keras.callbacks, key=is_resuming)
        self._resuming: list[ResumingCallback] = [c for c in self.callbacks if is_resuming(c)]

    def every_batches(self, mode: Mode) -> list[int]:
        """Returns the numbers of batches after which callbacks of any worker want to be called."""
        wanted = []
        for callback in self.callbacks:
            every = every_batches(callback, mode)
            if every is not None:
                wanted.append(every)
        return union(self.strategy, wanted)

    def call(self, mode: Mode, moment: str, batch: int, logs: Any = None) -> None:
        """Calls a batch hook: ``moment`` is ``"begin"`` or ``"end"``."""
        for callback in self.callbacks:
            hook = getattr(callback, f"on_{mode}_batch_{moment}")
            with noting("callback", type(callback).__name__, batch + 1):
                not_ending_the_epoch(hook, batch, logs)

    def agree_on_stopping(self, flag: str) -> None:
        """Sets a flag of the model on all workers if it is set on any."""
        if self.exchange.workers > 1:
            wanted = int(bool(getattr(self.model, flag, False)))
            setattr(self.model, flag, bool(self.exchange(flag, [wanted]).any()))

    # A callback that saves and resumes a training. ------------------------------------------------

    @property
    def resumes(self) -> bool:
        """Whether a callback saves and resumes the training."""
        return bool(self._resuming)

    def find_start(self, first_epoch: int) -> FitStart:
        """Returns where a training begins; all workers must begin alike."""
        seed = draw_seed(self.strategy)
        asked = FitStart(seed, first_epoch, first_epoch)
        start = None
        for callback in self._resuming:
            wanted = callback.on_fit_begin(asked, self.params["epochs"])
            start = start or wanted
        start = start or asked
        check_alike(self.strategy, {"the start of a resumed fit": start})
        return start

    def announce(self, fit: RunningFit) -> None:
        """Gives the running ``fit`` to a callback that saves and resumes it."""
        for callback in self._resuming:
            callback.on_fit_ready(fit)

    def exit(self) -> None:
        """Tells callbacks that save and resume a training that it ends, also by an error."""
        for callback in self._resuming:
            callback.on_fit_exit()


def is_resuming(callback: Any) -> bool:
    """Returns whether a callback saves and resumes a training."""
    return isinstance(callback, ResumingCallback)


def not_ending_the_epoch(function: Callable[..., _Result], *args: object) -> _Result:
    """Calls a callback or a step; to Keras two kinds of its errors would be the end of the data."""
    try:
        return function(*args)
    except (StopIteration, tf.errors.OutOfRangeError) as error:
        raise RuntimeError(
            "A callback or the data raised an error with which Keras silently ends an epoch: "
            f"{error!r}. To stop, set model.stop_training = True."
        ) from error


def to_list(callbacks: Any) -> list[Any]:
    """Returns a callback, a sequence of them or a ``CallbackList`` as a list."""
    if isinstance(callbacks, keras.callbacks.Callback):
        return [callbacks]
    given: Iterable[Any] = getattr(callbacks, "callbacks", callbacks) or ()
    return list(given)


def _check_callbacks(
    callbacks: Iterable[Any], model: KerasModel, step: TrainStep | ChainedStep | None
) -> None:
    """Checks that callbacks work in the loops of this library, and with a step of the user."""
    of_optimizer = (
        keras.callbacks.LearningRateScheduler,
        keras.callbacks.ReduceLROnPlateau,
        keras.callbacks.SwapEMAWeights,
        keras.callbacks.TensorBoard,
    )
    for callback in callbacks:
        kind = type(callback).__name__
        if not isinstance(callback, keras.callbacks.Callback):
            raise TypeError(
                f"A callback must be a keras.callbacks.Callback. Received: {brief(callback)} in "
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


@contextmanager
def swapping_averages(callbacks: Iterable[Any], optimizer: KerasOptimizer) -> Iterator[None]:
    """Has callbacks that swap moving averages swap the averages of the replicas that own them.

    Nothing of it stays on the callbacks of the user.
    """
    swaps = keras.callbacks.SwapEMAWeights

    def swapping(method: Callable[..., None], *args: object) -> None:
        update = update_of(optimizer)
        with nullcontext() if update is None else update.updating():
            method(*args)

    hooks = []
    for name in dir(swaps):
        if name.startswith("on_") and name.endswith(("begin", "end")) and "batch" not in name:
            hooks.append(name)
    with ExitStack() as contexts:
        for callback in callbacks:
            if optimizer is not None and isinstance(callback, swaps):
                wrapped = {}
                for hook in hooks:
                    # Of the class, so that a validation in a fit does not wrap twice.
                    method = getattr(type(callback), hook).__get__(callback)
                    wrapped[hook] = functools.partial(swapping, method)
                contexts.enter_context(setting(callback, **wrapped))
        yield


def every_batches(callback: Any, mode: Mode) -> int | None:
    """Returns the batches between calls of a callback; None for after calls of any length.

    A callback with batch hooks is called for each batch, or every ``every_batches`` batches: an
    optional attribute of it. The progress bar and callbacks without such hooks are not.
    """
    if hasattr(callback, "every_batches"):
        every = callback.every_batches
        return None if every is None else check_count("every_batches", every, other="None")
    hooks = {f"on_{mode}_batch_begin", f"on_{mode}_batch_end"}
    if mode == "train":
        hooks |= {"on_batch_begin", "on_batch_end"}

    # ModelCheckpoint and TensorBoard, if they do nothing after a batch.
    often = getattr(callback, "write_steps_per_second", False) or _compat.profiles_batches(callback)
    frequencies = getattr(callback, "save_freq", 0), getattr(callback, "update_freq", 0)
    is_idle = "epoch" in frequencies and not often

    for owner in (callback, *type(callback).__mro__):
        if owner in (keras.callbacks.Callback, keras.callbacks.ProgbarLogger):
            continue
        if is_idle and isinstance(owner, type) and _compat.is_part_of_keras(owner):
            continue
        if not hooks.isdisjoint(vars(owner)):
            return 1
    return None
