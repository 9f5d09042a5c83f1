"""Keras callbacks: what does not work with replicas, and how often each wants to be called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tfmultigpu._compat import is_part_of_keras, profiles_batches, set_swaps
from tfmultigpu.errors import LossError
from tfmultigpu.optimizers.loss_scaling import unwrap_optimizer
from tfmultigpu.optimizers.sharded import owned_variables, reset_averages, swap_averages

__all__ = ["adapt_callbacks", "check_callbacks", "check_optimizers", "every_batches", "to_list"]


def to_list(callbacks: Any) -> list[Any]:
    """Returns a callback, a sequence of them or a ``CallbackList`` as a list."""
    import keras

    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    if isinstance(callbacks, keras.callbacks.Callback):
        return [callbacks]
    return list(callbacks or ())


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Checks that callbacks work in the loops of this library.

    Raises:
        LossError: A callback works only in Keras' own ``fit``.
        TypeError: An item is not a callback.
    """
    import keras

    for callback in callbacks:
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


def check_optimizers(
    callbacks: Iterable[Any], model: Any, steps: Iterable[str], trained: Any
) -> None:
    """Checks that callbacks that use the optimizer of the model find one that a step trains.

    Raises:
        LossError: One would find another, or none, or a log that a chain of steps has not.
    """
    import keras

    named = list(steps)
    names = ("LearningRateScheduler", "ReduceLROnPlateau", "SwapEMAWeights", "TensorBoard")
    kinds = tuple(getattr(keras.callbacks, name) for name in names)
    own = unwrap_optimizer(getattr(model, "optimizer", None))
    known = any(own is unwrap_optimizer(part.optimizer) for part in trained)
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.TerminateOnNaN) and named:
            raise LossError(
                "TerminateOnNaN reads the log 'loss', and a chain logs a loss for each step. "
                f"Received: TerminateOnNaN with steps {named}. Write a callback that sets "
                f"model.stop_training if logs['{named[0]}_loss'] is not finite."
            )
        if isinstance(callback, kinds) and not known:
            received = "no optimizer" if own is None else f"the optimizer {own.name!r}"
            name = type(callback).__name__
            raise LossError(
                f"{name} uses the optimizer of the model, which the step does not train with. "
                f"Received: {name}, and model {model.name!r} with {received}. In the scope, write "
                "model.compile(optimizer) with the optimizer given to make_train_step."
            )


def adapt_callbacks(callbacks: Iterable[Any], optimizer: Any) -> None:
    """Makes callbacks that write optimizer slots find them on the replicas that own them."""
    import keras

    if optimizer is not None and owned_variables(unwrap_optimizer(optimizer)):
        for callback in callbacks:
            if isinstance(callback, keras.callbacks.SwapEMAWeights):
                set_swaps(callback, swap_averages, reset_averages)


def every_batches(callback: Any, mode: str) -> int | None:
    """Returns the batches between calls of a callback; None for after calls of any length.

    A callback with batch hooks is called for each batch, or every ``every_batches`` batches: an
    optional attribute of it. The progress bar and callbacks without such hooks are not.
    """
    import keras

    if hasattr(callback, "every_batches"):
        return None if callback.every_batches is None else int(callback.every_batches)
    names = [f"on_{mode}_batch_begin", f"on_{mode}_batch_end"]
    if mode == "train":
        names += ["on_batch_begin", "on_batch_end"]
    every: list[int] = []
    for name in names:
        owner = _owner(callback, name)
        if owner in (keras.callbacks.Callback, keras.callbacks.ProgbarLogger):
            continue
        saves = getattr(callback, "save_freq", None)
        if owner is not None and is_part_of_keras(owner) and saves is not None:
            every += [] if saves == "epoch" else [int(saves)]
        elif owner is keras.callbacks.TensorBoard and callback.update_freq == "epoch":
            every += [1] if callback.write_steps_per_second or profiles_batches(callback) else []
        else:
            every.append(1)
    return min(every, default=None)


def _owner(callback: Any, name: str) -> type | None:
    """Returns the class that defines a method; None if the object itself does."""
    if name in vars(callback):
        return None
    return next(kind for kind in type(callback).__mro__ if name in vars(kind))
