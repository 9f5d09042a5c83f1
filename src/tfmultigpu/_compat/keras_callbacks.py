"""What callbacks of Keras do not tell."""

from __future__ import annotations

from tfmultigpu.types import KerasCallback


def profiles_batches(callback: KerasCallback) -> bool:
    """Returns whether a ``keras.callbacks.TensorBoard`` was given a ``profile_batch``.

    Private: ``callback._should_trace``. The callback does not keep the argument. False without the
    attribute: the callback then counts calls instead of batches.
    """
    return bool(getattr(callback, "_should_trace", False))
