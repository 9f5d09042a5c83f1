"""Settings of an optimizer, which a trace takes in as they are: whether they have changed since."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tfmultigpu._compat import is_own_class_of_keras
from tfmultigpu.accumulation.loss_scale import unwrap_optimizer
from tfmultigpu.errors import TfMultiGpuError

__all__ = ["Settings", "explaining_settings"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), set, frozenset, tuple)


class Settings:
    """Remembers the attributes of an optimizer, of those inside it, and of their schedules.

    Variables are not settings, for each step reads them: a learning rate that is set to a number
    changes no attribute.
    """

    def __init__(self) -> None:
        """Remembers nothing, so that any optimizer is a change."""
        self._optimizer: Any = None
        self._holders: list[dict[str, Any]] = []
        self._noted: list[dict[str, Any]] = []
        self._ignored: set[str] = set()

    def note(self, optimizer: Any, *, traced: bool = False) -> None:
        """Remembers an optimizer as it is now.

        Args:
            optimizer: The optimizer.
            traced: Whether this is the end of a trace. The trace has changed what differs, such as
                a cache, and that is not a setting from now on.
        """
        if traced:
            self._ignored.update(self._differing())
        self._optimizer = optimizer
        self._holders = _holders(optimizer)
        self._noted = [dict(holder) for holder in self._holders]

    def changed(self, optimizer: Any) -> bool:
        """Returns whether this is another optimizer, or one with other settings; asked each step.

        Args:
            optimizer: The optimizer.
        """
        if optimizer is not self._optimizer:
            return True
        if all(
            len(holder) == len(noted) and all(map(operator.is_, holder.values(), noted.values()))
            for holder, noted in zip(self._holders, self._noted, strict=True)
        ):
            return False
        if any(self._differing()):  # Of names, which are not empty.
            return True
        self.note(optimizer)  # Equal numbers, in other objects.
        return False

    def _differing(self) -> Iterator[str]:
        for holder, noted in zip(self._holders, self._noted, strict=True):
            for name in holder.keys() | noted.keys():
                # What TensorFlow keeps for checkpoints begins like this.
                ignored = name in self._ignored or name.startswith("_self_")
                # An attribute that is missing is not equal to any.
                if not ignored and not _equal(holder.get(name, Settings), noted.get(name, self)):
                    yield name


def _equal(value: Any, noted: Any) -> bool:
    plain = type(value) is type(noted) and isinstance(value, _PLAIN)
    return value is noted or (plain and bool(value == noted))


def _holders(optimizer: Any) -> list[dict[str, Any]]:
    """Returns the attributes of all optimizers that there are in one, and of their schedules."""
    import keras

    inner = unwrap_optimizer(optimizer)
    every = {id(each): vars(each) for each in (optimizer, inner, *getattr(inner, "optimizers", ()))}
    kind = keras.optimizers.schedules.LearningRateSchedule
    values = [value for holder in every.values() for value in holder.values()]
    return [*every.values(), *(vars(value) for value in values if isinstance(value, kind))]


@contextmanager
def explaining_settings(optimizer: Any) -> Iterator[None]:
    """Explains an error that Keras' own optimizers only raise for settings made too late.

    Raises:
        TfMultiGpuError: In place of the error of Keras.
    """
    try:
        yield
    except (AttributeError, IndexError) as error:
        if not is_own_class_of_keras(optimizer):
            raise
        name = type(optimizer).__name__
        raise TfMultiGpuError(
            f"{name} cannot make an update with the settings it has now: {error}. It creates its "
            "state of each variable when it is built, so momentum, amsgrad, centered and use_ema "
            f"cannot be turned on later. Create a new optimizer with them, {name}(...)."
        ) from error
