"""Settings of an optimizer, which a trace takes in as they are: whether they have changed since."""

from __future__ import annotations

import operator
from typing import Any

from tfmultigpu.accumulation.loss_scale import unwrap_optimizer
from tfmultigpu.accumulation.owners import parts_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), set, frozenset, tuple)


class Settings:
    """Remembers the attributes of an optimizer, of those inside it, and of their schedules.

    Variables are not settings, for each step reads them: a learning rate that is set to a number
    changes no attribute.
    """

    def __init__(self) -> None:
        """Remembers nothing, so that any optimizer is a change."""
        self._optimizer: Any = None
        self._noted: list[tuple[dict[str, Any], dict[str, Any]]] = []  # As they are, and were.
        self._ignored: set[tuple[int, str]] = set()

    def note(self, optimizer: Any, *, traced: bool = False) -> None:
        """Remembers an optimizer as it is now.

        What differs at the end of a trace, such as a cache, is not a setting from then on.
        """
        if traced:
            self._ignored.update(self._differing())
        self._optimizer = optimizer
        self._noted = [(vars(each), dict(vars(each))) for each in _holders(optimizer)]

    def changed(self, optimizer: Any) -> bool:
        """Returns whether this is another optimizer, or it has other settings; asked each step."""
        if optimizer is not self._optimizer:
            return True
        # Nearly always nothing was set, which is quick to see.
        if all(
            len(now) == len(then) and all(map(operator.is_, now.values(), then.values()))
            for now, then in self._noted
        ):
            return False
        different = bool(self._differing())
        if not different:  # Equal numbers, in other objects.
            self.note(optimizer)
        return different

    def _differing(self) -> set[tuple[int, str]]:
        different = set()
        for place, (now, then) in enumerate(self._noted):
            for name in now.keys() | then.keys():
                value, noted = now.get(name, self), then.get(name, self)
                plain = type(value) is type(noted) and isinstance(value, _PLAIN)
                if value is not noted and not (plain and value == noted):
                    different.add((place, name))
        # What TensorFlow keeps for checkpoints begins like this.
        return {key for key in different if not key[1].startswith("_self_")} - self._ignored


def _holders(optimizer: Any) -> list[Any]:
    """Returns all optimizers that there are in one, and their schedules."""
    import keras

    inner = unwrap_optimizer(optimizer)
    optimizers = list({id(each): each for each in (optimizer, inner, *parts_of(inner))}.values())
    kind = keras.optimizers.schedules.LearningRateSchedule
    values = [value for each in optimizers for value in vars(each).values()]
    return [*optimizers, *(value for value in values if isinstance(value, kind))]
