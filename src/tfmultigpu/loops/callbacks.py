"""Keras callbacks: checks, the attributes they may have, and when their hooks are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu._compat import is_part_of_keras, profiles_batches, set_swaps
from tfmultigpu.errors import LossError
from tfmultigpu.optimizers.loss_scaling import unwrap_optimizer
from tfmultigpu.optimizers.sharded import owned_variables, reset_averages, swap_averages

__all__ = [
    "BatchHooks",
    "adapt_callbacks",
    "check_are_callbacks",
    "check_callbacks",
    "class_names",
    "count_required_on_all_workers",
    "data_skips_batches",
    "make_callbacks",
    "on_exit",
    "resume_at",
    "skips_fit",
    "to_list",
]

_CHECKPOINTS = (
    "Write callbacks=[tmg.Checkpoints(directory, model=model, "
    "optimizer=model.optimizer).callback(every_epochs=1)], which resumes exactly."
)
# Seconds between calls of hooks that do not need every batch.
_INTERVAL = 0.1


def make_callbacks(
    callbacks: Any, model: Any, *, epochs: int, steps: int | None, verbose: Any, shown: bool
) -> Any:
    """Returns the ``keras.callbacks.CallbackList`` of a training, with History and progress bar.

    Args:
        callbacks: A callback, a sequence of them, or a ``CallbackList``.
        model: The model.
        epochs: Number of the last epoch.
        steps: Batches of an epoch, or None.
        verbose: 0, 1, 2 or ``"auto"``.
        shown: Whether this process may print.

    Raises:
        ValueError: ``verbose`` has another value.
    """
    import keras

    if verbose not in (0, 1, 2, "auto"):
        raise ValueError(f"verbose must be 0, 1, 2 or 'auto'. Received: verbose={verbose!r}.")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        history = keras.callbacks.History
        known = [one for one in callbacks.callbacks if isinstance(one, history)]
        if not known:
            known = [history()]
            callbacks.callbacks.append(known[0])
        callbacks.set_model(model)
        model.history = known[0]
        _put_last(callbacks)
        return callbacks
    verbose = verbose if shown else 0
    made = keras.callbacks.CallbackList(
        to_list(callbacks),
        add_history=True,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=epochs,
        steps=steps,
        model=model,
    )
    _put_last(made)
    return made


def _put_last(callbacks: Any) -> None:
    """Moves callbacks with ``runs_last`` to the end: they save the state of the others."""
    callbacks.callbacks.sort(key=lambda one: bool(getattr(one, "runs_last", False)))


def check_callbacks(callbacks: Any, optimizer: Any) -> None:
    """Checks that callbacks work in ``tmg.fit``.

    Args:
        callbacks: See ``make_callbacks``.
        optimizer: The optimizer of the model.

    Raises:
        LossError: A callback works only in Keras' own ``fit``, or not on a strategy.
        TypeError: An item is not a callback.
    """
    import keras

    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", ())
    for one in to_list(callbacks):
        if isinstance(one, orbax) and _exists_per_replica(optimizer.iterations):
            raise LossError(
                "OrbaxCheckpoint reads the optimizer's step count as a variable of one device, so "
                "it fails on a strategy, in Keras' own fit too. Received: "
                f"{type(one).__name__}. {_CHECKPOINTS}"
            )
        if isinstance(one, keras.callbacks.BackupAndRestore):
            raise LossError(
                "BackupAndRestore resumes only Keras' own fit. It restarts an epoch with weights "
                "from its middle, and saves neither random seeds nor the position in the data. "
                f"Received: {type(one).__name__}. {_CHECKPOINTS}"
            )
    check_are_callbacks(to_list(callbacks))


def check_are_callbacks(callbacks: Iterable[Any]) -> None:
    """Checks that everything in a list is a callback.

    Raises:
        TypeError: An item is not.
    """
    import keras

    for one in callbacks:
        if not isinstance(one, keras.callbacks.Callback):
            raise TypeError(
                f"A callback must be a keras.callbacks.Callback. Received: {one!r} in callbacks. "
                "Make one of a class, callbacks=[EarlyStopping()]; of checkpoints it is "
                "callbacks=[checkpoints.callback()]."
            )


def adapt_callbacks(callbacks: Any, optimizer: Any) -> None:
    """Makes callbacks that write optimizer slots find them on the replicas that own them.

    Args:
        callbacks: See ``make_callbacks``.
        optimizer: The optimizer of the model, after its step was made.
    """
    import keras

    if owned_variables(unwrap_optimizer(optimizer)):
        for one in to_list(callbacks):
            if isinstance(one, keras.callbacks.SwapEMAWeights):
                set_swaps(one, swap_averages, reset_averages)


def to_list(callbacks: Any) -> list[Any]:
    """Returns callbacks as a list."""
    import keras

    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    if isinstance(callbacks, keras.callbacks.Callback):
        return [callbacks]
    return list(callbacks or ())


def resume_at(callbacks: Any) -> tuple[int, int] | None:
    """Returns the first ``resume_at`` of the callbacks, ``(epoch, step)``, or None."""
    found = [getattr(one, "resume_at", None) for one in callbacks.callbacks]
    places = [place for place in found if place is not None]
    return (int(places[0][0]), int(places[0][1])) if places else None


def skips_fit(callbacks: Any, model: Any, epochs: int) -> bool:
    """Returns whether a callback has ``skips_fit``, which says that this ``fit`` is over.

    The model then gets an empty ``History``.
    """
    skips = [one.skips_fit(epochs) for one in to_list(callbacks) if hasattr(one, "skips_fit")]
    if not any(skips):
        return False
    make_callbacks(callbacks, model, epochs=epochs, steps=None, verbose=0, shown=False)
    model.history.on_train_begin()
    return True


def data_skips_batches(callbacks: Any) -> bool:
    """Returns whether a callback has ``data_skips_batches``: the data skips finished batches."""
    return any(getattr(one, "data_skips_batches", False) for one in callbacks.callbacks)


def class_names(callbacks: Any) -> list[str]:
    """Returns the names of the callbacks' classes."""
    return [type(one).__name__ for one in to_list(callbacks)]


def count_required_on_all_workers(callbacks: Any) -> int:
    """Returns the number of callbacks with ``required_on_all_workers``."""
    return sum(bool(getattr(one, "required_on_all_workers", False)) for one in to_list(callbacks))


@contextmanager
def on_exit(callbacks: Any) -> Iterator[None]:
    """Calls ``on_fit_exit`` of callbacks that have it at the end of the block, on errors too."""
    try:
        yield
    finally:
        for one in callbacks.callbacks:
            if hasattr(one, "on_fit_exit"):
                one.on_fit_exit()


class BatchHooks:
    """Calls the batch hooks of callbacks, in training or in evaluation.

    A callback with batch hooks is called for each batch, or every ``every_batches`` batches: an
    optional attribute of it. The progress bar, other callbacks and ``every_batches = None`` are
    called only from time to time.

    Attributes:
        called: Whether the hooks were called for the last call of steps.
        seen: Batches so far.
    """

    def __init__(
        self,
        callbacks: Any,
        mode: str,
        *,
        steps_per_call: int | None,
        elapsed: Callable[[], float],
        agree: Callable[[Iterable[int]], list[int]] = sorted,
        stopping: Callable[[], bool] = bool,
    ) -> None:
        """Finds out how often each callback must be called.

        Args:
            callbacks: A ``CallbackList``.
            mode: ``"train"``, ``"test"`` or ``"predict"``.
            steps_per_call: The number the user set: hooks are then called after each call. Or None.
            elapsed: A clock, in seconds.
            agree: Returns the sorted union of the workers' numbers. All workers read logs together,
                so they call their callbacks after the same batches.
            stopping: Returns whether a callback wants to stop; asked after hooks were called.
        """
        self._stopping = stopping
        self._begin = getattr(callbacks, f"on_{mode}_batch_begin")
        self._end = getattr(callbacks, f"on_{mode}_batch_end")
        found = [_every_batches(one, mode) for one in callbacks.callbacks]
        self._every = agree({one for one in found if one is not None})
        self._steps_per_call = steps_per_call
        self._elapsed = elapsed
        self._shown = elapsed()
        self.seen = 0
        self.called = False
        self._last = -1
        self._stops = False

    def begin_epoch(self, stops: bool = False) -> None:
        """Starts to count the batches of an epoch.

        Args:
            stops: Whether a callback has asked to stop already; Keras then stops after one batch.
        """
        self._last = -1
        self._stops = stops

    def most(self, steps: int) -> int:
        """Returns the largest number of steps that a call may make, up to ``steps``."""
        if self._steps_per_call is None:
            steps = min(steps, 1) if self._stops else steps
            for every in self._every:
                steps = min(steps, every - self.seen % every)
        return steps

    def before(self, batch: int, steps: int) -> int:
        """Calls the begin hooks if they are due, and returns the steps of the next call.

        Args:
            batch: The number of the next batch.
            steps: The largest number of steps.
        """
        steps = self.most(steps)
        seen = self.seen + steps
        due = bool(self._every) and (
            self._steps_per_call is not None or any(seen % every == 0 for every in self._every)
        )
        self.called = due or self._elapsed() - self._shown >= _INTERVAL
        if self.called:
            self._begin(batch)
        return steps

    def ran(self, steps: int) -> None:
        """Counts batches that ran."""
        self.seen += steps

    def after(self, batch: int, logs: Callable[[], dict[str, Any]]) -> None:
        """Calls the end hooks if ``before`` called the begin hooks.

        Args:
            batch: The number of the last batch that ran.
            logs: Returns the logs of the epoch so far.
        """
        if self.called:
            self._call_end(batch, logs())

    def stopped(self) -> bool:
        """Returns whether a callback wants to stop."""
        return self._stops or (self.called and self._stopping())

    def finish(self, batch: int, logs: dict[str, Any]) -> None:
        """Calls both hooks for the last batch of an epoch, if they were not called."""
        if self._last < batch:
            self._begin(batch)
            self._call_end(batch, logs)

    def _call_end(self, batch: int, logs: dict[str, Any]) -> None:
        self._end(batch, logs)
        self._last = batch
        self._shown = self._elapsed()


def _exists_per_replica(variable: Any) -> bool:
    return isinstance(variable.value, tf.distribute.DistributedValues)


def _every_batches(callback: Any, mode: str) -> int | None:
    """Returns the batches between calls of a callback; None for from time to time."""
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
    return next(one for one in type(callback).__mro__ if name in vars(one))
