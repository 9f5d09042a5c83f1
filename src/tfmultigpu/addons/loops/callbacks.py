"""Keras callbacks: what does not work with replicas, and how often each wants to be called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import keras

from tfmultigpu._compat import is_part_of_keras, profiles_batches
from tfmultigpu.accumulation.loss_scale import unwrap_optimizer
from tfmultigpu.accumulation.update import update_of
from tfmultigpu.errors import LossError
from tfmultigpu.steps.chain import ChainedStep


def to_list(callbacks: Any) -> list[Any]:
    """Returns a callback, a sequence of them or a ``CallbackList`` as a list."""
    if isinstance(callbacks, keras.callbacks.Callback):
        return [callbacks]
    return list(getattr(callbacks, "callbacks", callbacks) or ())


def resuming(callbacks: Iterable[Any]) -> list[Any]:
    """Returns the callbacks that save and resume a training; see ``types.RunningFit``."""
    return [callback for callback in callbacks if hasattr(callback, "on_fit_begin")]


def check_callbacks(callbacks: Iterable[Any], model: Any = None, step: Any = None) -> None:
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
                "callbacks. Make an object of a class, callbacks=[EarlyStopping()]; of checkpoints "
                "it is callbacks=[checkpoints.callback()]."
            )
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise LossError(
                "BackupAndRestore resumes only Keras' own fit. It restarts an epoch with weights "
                "from its middle, and saves neither random seeds nor the position in the data. "
                "Write callbacks=[tmg.Checkpoints(directory, model=model, optimizer="
                "model.optimizer).callback(every_epochs=1)], which resumes exactly."
            )
        if isinstance(callback, keras.callbacks.TerminateOnNaN) and isinstance(step, ChainedStep):
            raise LossError(
                "TerminateOnNaN reads the log 'loss', and a chain logs a loss for each step. "
                f"Received: TerminateOnNaN with steps {list(step.steps)}. Write a callback that "
                "sets model.stop_training if a NAME_loss in its logs is not finite."
            )
        if isinstance(callback, of_optimizer) and step is not None:
            own = unwrap_optimizer(getattr(model, "optimizer", None))
            if not any(own is unwrap_optimizer(part.optimizer) for part in step.trained):
                raise LossError(
                    f"{kind} uses the optimizer of the model, which the step does not train with. "
                    f"Received: {kind}, and model {model.name!r} with "
                    f"{'no optimizer' if own is None else f'the optimizer {own.name!r}'}. In the "
                    "scope, write model.compile(optimizer) with the optimizer of the step."
                )


def adapt_callbacks(callbacks: Iterable[Any], optimizer: Any) -> None:
    """Makes callbacks that swap moving averages swap those of the replicas that own them."""

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
    every: list[int] = []
    for name in names:
        kinds = [callback, *type(callback).__mro__]
        owner = next(kind for kind in kinds if name in vars(kind))
        saves = getattr(callback, "save_freq", None)
        if owner in (keras.callbacks.Callback, keras.callbacks.ProgbarLogger):
            continue
        if owner is not callback and is_part_of_keras(owner) and saves is not None:
            every += [] if saves == "epoch" else [int(saves)]
        elif owner is keras.callbacks.TensorBoard and callback.update_freq == "epoch":
            every += [1] if callback.write_steps_per_second or profiles_batches(callback) else []
        else:
            every.append(1)
    return min(every, default=None)
