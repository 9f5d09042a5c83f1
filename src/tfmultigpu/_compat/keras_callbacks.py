"""Attributes that Keras sets in callbacks."""

from __future__ import annotations

from typing import Any


def profiles_batches(callback: Any) -> bool:
    """Returns whether a ``keras.callbacks.TensorBoard`` was given a ``profile_batch``.

    Private: ``callback._should_trace``. The callback does not keep the argument. False without the
    attribute: the callback then counts calls instead of batches.
    """
    return bool(getattr(callback, "_should_trace", False))


def set_by_loops() -> set[str]:
    """Returns the names of attributes that the loops of Keras set in each callback.

    Private: ``callback._model``, which the public ``callback.model`` returns; ``_params`` likewise.
    Without it a checkpoint would keep a model as the state of its callbacks.
    """
    return {"model", "params", "_model", "_params"}
