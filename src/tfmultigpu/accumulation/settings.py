"""Settings of an optimizer, which a trace takes in as they are: whether they have changed since."""

from __future__ import annotations

import operator

from tfmultigpu import _compat
from tfmultigpu.accumulation.loss_scale import parts_of, unwrap_optimizer
from tfmultigpu.lists import by_id
from tfmultigpu.types import KerasOptimizer

_PLAIN = (bool, int, float, complex, str, bytes, set, frozenset, tuple)


# The attributes of an object as they are, and as they were.
_Noted = tuple[dict[str, object], dict[str, object]]


class Settings:
    """Remembers the attributes of an optimizer, of those inside it, and of their schedules."""

    def __init__(self) -> None:
        """Remembers nothing, so that any optimizer is a change."""
        self._optimizer: KerasOptimizer = None
        self._noted: list[_Noted] = []
        self._ignored: set[str] = set()

    def note(self, optimizer: KerasOptimizer, *, traced: bool = False) -> None:
        """Remembers an optimizer as it is now; a cache that a trace changes is not a setting."""
        if traced:
            self._ignored |= self._differing()
        self._optimizer = optimizer
        self._noted = [(vars(each), dict(vars(each))) for each in _holders(optimizer)]

    def changed(self, optimizer: KerasOptimizer) -> bool:
        """Returns whether this is another optimizer, or it has other settings; asked each step."""
        if optimizer is not self._optimizer:
            return True
        # Nearly always nothing was set, which is quick to see.
        if all(map(_same_objects, self._noted)):
            return False
        if self._differing():
            return True
        self.note(optimizer)  # Equal numbers, in other objects.
        return False

    def values(self) -> dict[str, object]:
        """Returns the settings by name; of what is neither number nor text, which object it is."""
        values: dict[str, object] = {}
        for now, _ in self._noted:
            for name, value in now.items():
                if name in self._ignored or _compat.is_for_checkpoints(name):
                    continue
                if value is not None and not isinstance(value, _PLAIN):
                    value = f"{type(value).__name__} {id(value)}"
                values[name] = value
        return values

    def _differing(self) -> set[str]:
        different = set()
        for now, then in self._noted:
            for name in now.keys() | then.keys():
                a, b = now.get(name, self), then.get(name, self)
                plain = type(a) is type(b) and isinstance(a, _PLAIN)
                is_same = a is b or (plain and a == b)
                if not is_same and not _compat.is_for_checkpoints(name):
                    different.add(name)
        return different - self._ignored


def _same_objects(noted: _Noted) -> bool:
    now, then = noted
    return len(now) == len(then) and all(map(operator.is_, now.values(), then.values()))


def _holders(optimizer: KerasOptimizer) -> list[object]:
    """Returns all optimizers that there are in one, and their schedules."""
    import keras

    inner = unwrap_optimizer(optimizer)
    holders = list(by_id([optimizer, inner, *parts_of(inner)]).values())
    for each in list(holders):
        for value in vars(each).values():
            if isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
                holders.append(value)
    return holders
