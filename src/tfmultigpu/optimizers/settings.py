"""Settings of an optimizer, which a trace takes in as they are: whether they were changed since."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tfmultigpu._compat import is_own_class_of_keras
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.optimizers.loss_scaling import unwrap_optimizer

__all__ = ["Settings", "explaining_settings"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), set, frozenset, tuple)


class Settings:
    """Remembers the attributes of an optimizer, those it wraps, and their schedules.

    Whatever Keras reads of them while it makes an update becomes part of the trace: clipping,
    decay, momentum, a schedule and its numbers. Variables are no settings, for they are read in
    each step: a learning rate set to a number changes no attribute.
    """

    def __init__(self) -> None:
        """Remembers nothing, so that any optimizer is a change."""
        self._optimizer: Any = None
        self._holders: list[dict[str, Any]] = []
        self._noted: list[dict[str, Any]] = []
        self._values: list[Any] = []
        self._state: set[str] = set()

    def note(self, optimizer: Any, *, traced: bool = False) -> None:
        """Remembers an optimizer as it is now.

        Args:
            optimizer: The optimizer.
            traced: Whether this is the end of a trace. An attribute that differs was then changed
                by the trace, such as a cache, and from now on is no setting.
        """
        if traced:
            for holder, noted in zip(self._holders, self._noted, strict=True):
                self._state |= set(self._differing(holder, noted))
        self._optimizer = optimizer
        self._holders = _holders(optimizer)
        self._noted = [dict(holder) for holder in self._holders]
        self._values = self._read()

    def changed(self, optimizer: Any) -> bool:
        """Returns whether it is another optimizer, or one with other settings; asked each step."""
        if optimizer is not self._optimizer:
            return True
        values = self._read()
        if len(values) == len(self._values) and all(map(operator.is_, values, self._values)):
            return False
        for holder, noted in zip(self._holders, self._noted, strict=True):
            if any(True for _ in self._differing(holder, noted)):
                return True
        self.note(optimizer)  # Equal numbers, in other objects.
        return False

    def _read(self) -> list[Any]:
        return [value for holder in self._holders for value in holder.values()]

    def _differing(self, holder: dict[str, Any], noted: dict[str, Any]) -> Iterator[str]:
        for name in holder.keys() | noted.keys():
            # What TensorFlow keeps for checkpoints begins like this.
            if name in self._state or name.startswith("_self_"):
                continue
            if name not in holder or name not in noted or not _same(holder[name], noted[name]):
                yield name


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, _PLAIN) and one == other


def _holders(optimizer: Any) -> list[dict[str, Any]]:
    """The attributes of all optimizers there are in one, and of their schedules."""
    import keras

    inner = unwrap_optimizer(optimizer)
    every = {id(one): one for one in (optimizer, inner, *getattr(inner, "optimizers", ()))}
    found = [vars(one) for one in every.values()]
    schedule = keras.optimizers.schedules.LearningRateSchedule
    held = [value for one in found for value in one.values() if isinstance(value, schedule)]
    return [*found, *(vars(one) for one in held)]


@contextmanager
def explaining_settings(optimizer: Any) -> Iterator[None]:
    """Says what an error means that Keras' own optimizers only raise for settings made too late.

    Raises:
        TfMultiGpuError: In place of what Keras raises.
    """
    try:
        yield
    except (AttributeError, IndexError) as error:
        if not is_own_class_of_keras(optimizer):
            raise
        name = type(optimizer).__name__
        raise TfMultiGpuError(
            f"{name} cannot make an update with the settings it has now: {error}. It makes what "
            "it remembers of each variable when it is built, so momentum, amsgrad, centered and "
            f"use_ema cannot be turned on later. Create a new optimizer with them, {name}(...)."
        ) from error
