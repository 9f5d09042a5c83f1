"""An optimizer that reads its counter and its learning rate once per update.

Keras' optimizers read them for each variable. A read is an operation of its own, and what is
computed from it, such as the bias corrections of Adam, is computed again for each variable, because
TensorFlow cannot know that two reads give the same. From one tensor it computes that once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu._compat import is_own_class_of_keras

__all__ = ["reading_once"]


@contextmanager
def reading_once(optimizer: Any) -> Iterator[None]:
    """Has ``optimizer.apply`` read scalars once; the values that result are the same.

    Args:
        optimizer: A built optimizer. Of other than Keras' own classes nothing is known, so these
            are left to read as they do.
    """
    import keras

    if not is_own_class_of_keras(optimizer):
        yield
        return
    # A schedule, or a function, is not to be asked here: one with a state would advance it.
    rate = [variable for variable in optimizer.variables if variable.name == "learning_rate"]
    read = [optimizer.iterations, *rate]
    behind = {id(variable): variable.value for variable in read}

    class ReadOnce(keras.StatelessScope):  # type: ignore[misc]
        """Reads what was read before, and assigns at once, where its base only notes it."""

        def add_update(self, update: tuple[Any, Any]) -> None:
            variable, value = update
            if id(variable) in behind:
                super().add_update(update)
            behind.get(id(variable), variable.value).assign(value)

    with ReadOnce([(variable, tf.convert_to_tensor(variable.value)) for variable in read]):
        yield
