"""Contexts that record what Keras calls on this thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu._patch import patching


def recording_added_losses() -> AbstractContextManager[list[tuple[Any, Any]]]:
    """Records the layer and the value of each ``add_loss``, also of activity regularizers.

    The public ``model.losses`` is one list per model: with a synchronized layer, replicas clear and
    read each other's losses.
    """
    import keras

    return _recording(keras.layers.Layer, "add_loss", lambda losses, _: tf.nest.flatten(losses))


def recording_calls() -> AbstractContextManager[list[tuple[Any, Any]]]:
    """Records each finished call of a layer or operation, with its result.

    Keras offers no access to the outputs of layers inside a subclassed model.
    """
    import keras

    # Every layer is an Operation.
    return _recording(keras.Operation, "__call__", lambda _, result: [result])


def noting_losses_read(note: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Calls ``note(layer)`` for each layer whose ``losses`` are read, if it has any."""
    import keras

    def read(original: Any, layer: Any) -> Any:
        losses = original(layer)
        if losses:
            note(layer)
        return losses

    return patching(keras.layers.Layer, "losses", read)


@contextmanager
def _recording(owner: Any, method: str, values: Callable[..., list[Any]]) -> Iterator[list[Any]]:
    recorded: list[Any] = []

    def collect(original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(layer, *args, **kwargs)
        recorded.extend((layer, value) for value in values(args, result))
        return result

    with patching(owner, method, collect):
        yield recorded
