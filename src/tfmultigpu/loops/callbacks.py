"""Keras callbacks: which of them are called when, and what that asks of the calls of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu._compat import is_part_of_keras, profiles_batches, set_swaps
from tfmultigpu.errors import CompileError
from tfmultigpu.optimizers.loss_scaling import unwrap_optimizer
from tfmultigpu.optimizers.sharded import owned_variables, reset_averages, swap_averages

__all__ = [
    "BatchHooks",
    "adapt_callbacks",
    "check_callbacks",
    "count_of_all_workers",
    "leaving",
    "make_callbacks",
    "names_of",
    "passes_over",
    "resume_at",
    "to_list",
]

_CHECKPOINTS = (
    "Write callbacks=[tmg.Checkpoints(directory, model=model, "
    "optimizer=model.optimizer).callback(every_epochs=1)], which goes on exactly."
)
# Seconds between two calls of what is content with being called from time to time.
_INTERVAL = 0.1


def make_callbacks(
    callbacks: Any, model: Any, *, epochs: int, steps: int | None, verbose: Any, shown: bool
) -> Any:
    """Returns the ``keras.callbacks.CallbackList`` of a training, History and progress bar in it.

    Args:
        callbacks: What the user gave: a callback, a sequence of them, or a ``CallbackList``.
        model: The model.
        epochs: Number of the last epoch.
        steps: Batches of an epoch, or None.
        verbose: 0, 1, 2 or ``"auto"``.
        shown: Whether this process may print.

    Raises:
        ValueError: ``verbose`` is something else.
    """
    import keras

    if verbose not in (0, 1, 2, "auto"):
        raise ValueError(f"verbose is 0, 1, 2 or 'auto'. Received: verbose={verbose!r}.")
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
    called = keras.callbacks.CallbackList(
        to_list(callbacks),
        add_history=True,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=epochs,
        steps=steps,
        model=model,
    )
    _put_last(called)
    return called


def _put_last(callbacks: Any) -> None:
    """Moves those to the end that say so by ``comes_last``: they save what the others remember."""
    callbacks.callbacks.sort(key=lambda one: bool(getattr(one, "comes_last", False)))


def check_callbacks(callbacks: Any, optimizer: Any) -> None:
    """Checks that callbacks work here.

    Args:
        callbacks: As for ``make_callbacks``.
        optimizer: The optimizer of the model.

    Raises:
        CompileError: One of them does not work outside of Keras' own ``fit``, or on a strategy.
        TypeError: One is no callback.
    """
    import keras

    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", ())
    for one in to_list(callbacks):
        if isinstance(one, orbax) and _exists_per_replica(optimizer.iterations):
            raise CompileError(
                "OrbaxCheckpoint takes the optimizer's step count for a variable of one device, "
                "and fails on a strategy, in Keras' own fit too. Received: "
                f"{type(one).__name__}. {_CHECKPOINTS}"
            )
        if isinstance(one, keras.callbacks.BackupAndRestore):
            raise CompileError(
                "BackupAndRestore can tell only Keras' own fit in which epoch to go on, begins an "
                "epoch anew with weights from its middle, and keeps neither the state of random "
                "layers nor the place in the data. Received: "
                f"{type(one).__name__}. {_CHECKPOINTS}"
            )
        if not isinstance(one, keras.callbacks.Callback):
            raise TypeError(
                f"A callback is a keras.callbacks.Callback. Received: {one!r} in callbacks."
            )


def adapt_callbacks(callbacks: Any, optimizer: Any) -> None:
    """Has callbacks that write to the state of the optimizer find it where it is.

    Args:
        callbacks: As for ``make_callbacks``.
        optimizer: The optimizer of the model, once its step was made.
    """
    import keras

    if owned_variables(unwrap_optimizer(optimizer)):
        for one in to_list(callbacks):
            if isinstance(one, keras.callbacks.SwapEMAWeights):
                set_swaps(one, swap_averages, reset_averages)


def to_list(callbacks: Any) -> list[Any]:
    """Returns callbacks as a list, which can be gone through more than once."""
    import keras

    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    if isinstance(callbacks, keras.callbacks.Callback):
        return [callbacks]
    return list(callbacks or ())


def resume_at(callbacks: Any) -> tuple[int, int] | None:
    """Returns where to go on, ``(epoch, step)``, if a callback says so by ``resume_at``."""
    found = [getattr(one, "resume_at", None) for one in callbacks.callbacks]
    places = [place for place in found if place is not None]
    return (int(places[0][0]), int(places[0][1])) if places else None


def passes_over(callbacks: Any) -> bool:
    """Returns whether a callback says by ``passes_over`` that the data passes over batches."""
    return any(getattr(one, "passes_over", False) for one in callbacks.callbacks)


def names_of(callbacks: Any) -> list[str]:
    """Returns the names of the classes of what the user gave."""
    return [type(one).__name__ for one in to_list(callbacks)]


def count_of_all_workers(callbacks: Any) -> int:
    """Returns how many callbacks say by ``for_all_workers`` that no worker can be without them."""
    return sum(bool(getattr(one, "for_all_workers", False)) for one in to_list(callbacks))


@contextmanager
def leaving(callbacks: Any) -> Iterator[None]:
    """Tells callbacks that have ``on_fit_exit`` however the block ends, by an error too."""
    try:
        yield
    finally:
        for one in callbacks.callbacks:
            if hasattr(one, "on_fit_exit"):
                one.on_fit_exit()


class BatchHooks:
    """Calls the hooks around batches, of training or of evaluation.

    A callback without such hooks, and the progress bar, are content with being called from time to
    time. One that has them is called for each batch, or after each ``every_batches`` of them: an
    attribute it may have, None for from time to time.

    Attributes:
        called: Whether the hooks were called for the last call of steps.
        seen: Batches so far.
    """

    def __init__(
        self,
        callbacks: Any,
        what: str,
        *,
        steps_per_call: int | None,
        elapsed: Callable[[], float],
        agree: Callable[[Iterable[int]], list[int]] = sorted,
        stopping: Callable[[], bool] = bool,
    ) -> None:
        """Takes the callbacks.

        Args:
            callbacks: A ``CallbackList``.
            what: ``"train"`` or ``"test"``.
            steps_per_call: What the user asked for, to be called after each call; or None.
            elapsed: A clock, in seconds.
            agree: Returns what any worker has among numbers, sorted. Logs are read by all workers
                together, so all call their callbacks after the same batches.
            stopping: Whether a callback wants no more batches; asked where any was called.
        """
        self._stopping = stopping
        self._begin = getattr(callbacks, f"on_{what}_batch_begin")
        self._end = getattr(callbacks, f"on_{what}_batch_end")
        found = [_every_batches(one, what) for one in callbacks.callbacks]
        self._every = agree({one for one in found if one is not None})
        self._steps_per_call = steps_per_call
        self._elapsed = elapsed
        self._shown = elapsed()
        self.seen = 0
        self.called = False
        self._last = -1
        self._stops = False

    def begin_epoch(self, stops: bool = False) -> None:
        """Begins to count batches from 0.

        Args:
            stops: Whether a callback has asked to stop already, which Keras does after one batch.
        """
        self._last = -1
        self._stops = stops

    def most(self, steps: int) -> int:
        """Returns how many of ``steps`` steps a call may take."""
        if self._steps_per_call is None:
            steps = min(steps, 1) if self._stops else steps
            for every in self._every:
                steps = min(steps, every - self.seen % every)
        return steps

    def before(self, batch: int, steps: int) -> int:
        """Is told that ``steps`` batches come next, of which the first is ``batch``."""
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
        """Is told how many batches ran."""
        self.seen += steps

    def after(self, batch: int, logs: Callable[[], dict[str, Any]]) -> None:
        """Is told the last batch that ran; ``logs()`` are those of the epoch so far."""
        if self.called:
            self._tell(batch, logs())

    def stopped(self) -> bool:
        """Returns whether a callback wants no more batches."""
        return self._stops or (self.called and self._stopping())

    def finish(self, batch: int, logs: dict[str, Any]) -> None:
        """Tells of the last batch of an epoch, if that was not done."""
        if self._last < batch:
            self._begin(batch)
            self._tell(batch, logs)

    def _tell(self, batch: int, logs: dict[str, Any]) -> None:
        self._end(batch, logs)
        self._last = batch
        self._shown = self._elapsed()


def _exists_per_replica(variable: Any) -> bool:
    return isinstance(variable.value, tf.distribute.DistributedValues)


def _every_batches(callback: Any, what: str) -> int | None:
    """After how many batches a callback must be called; None: from time to time."""
    import keras

    if hasattr(callback, "every_batches"):
        return None if callback.every_batches is None else int(callback.every_batches)
    names = [f"on_{what}_batch_begin", f"on_{what}_batch_end"]
    if what == "train":
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
    """The class a method comes from; None where the object itself has it."""
    if name in vars(callback):
        return None
    return next(one for one in type(callback).__mro__ if name in vars(one))
