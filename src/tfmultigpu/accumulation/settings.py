"""Settings of an optimizer, which a trace takes in as they are: whether they have changed since."""

from __future__ import annotations

from typing import Any

from tfmultigpu.accumulation.loss_scale import unwrap_optimizer
from tfmultigpu.accumulation.owners import parts_of

__all__ = ["Settings"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), set, frozenset, tuple)
_Key = tuple[int, str]  # The ``id`` of what has an attribute, and the name of it.


class Settings:
    """Remembers the attributes of an optimizer, of those inside it, and of their schedules.

    Variables are not settings, for each step reads them: a learning rate that is set to a number
    changes no attribute.
    """

    def __init__(self) -> None:
        """Remembers nothing, so that any optimizer is a change."""
        self._noted: dict[_Key, Any] = {}
        self._ignored: set[_Key] = set()

    def note(self, optimizer: Any, *, traced: bool = False) -> None:
        """Remembers an optimizer as it is now.

        What differs at the end of a trace, such as a cache, is not a setting from then on.
        """
        if traced:
            self._ignored.update(self._differing(_attributes(optimizer)))
        self._noted = _attributes(optimizer)

    def changed(self, optimizer: Any) -> bool:
        """Returns whether this is another optimizer, or it has other settings; asked each step."""
        return bool(self._differing(_attributes(optimizer)))

    def _differing(self, now: dict[_Key, Any]) -> set[_Key]:
        def alike(key: _Key) -> bool:
            value, noted = now[key], self._noted[key]
            plain = type(value) is type(noted) and isinstance(value, _PLAIN)
            return value is noted or (plain and bool(value == noted))

        different = {key for key in now.keys() & self._noted.keys() if not alike(key)}
        return (different | (now.keys() ^ self._noted.keys())) - self._ignored


def _attributes(optimizer: Any) -> dict[_Key, Any]:
    """Returns the attributes of all optimizers that there are in one, and of their schedules."""
    import keras

    inner = unwrap_optimizer(optimizer)
    holders = {id(each): each for each in (optimizer, inner, *parts_of(inner))}
    for each in list(holders.values()):
        for value in vars(each).values():
            if isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
                holders[id(value)] = value
    return {
        (key, name): value
        for key, each in holders.items()
        for name, value in vars(each).items()
        if not name.startswith("_self_")  # What TensorFlow keeps for checkpoints.
    }
