"""Settings of an optimizer: what a learning rate reads from around it, at any depth."""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import functools
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from tfmultigpu.accumulation.settings import Settings


class Config:
    """Holds a rate, as an object of the user may."""

    rate = 0.1

    def __init__(self) -> None:
        self.lr, self.itself = 0.1, self

    def current(self) -> float:
        return self.lr

    @property
    def fails(self) -> float:
        raise ValueError


class OfClass(keras.optimizers.schedules.LearningRateSchedule):
    """Reads a number of its class and a global number."""

    base = 0.1

    def __call__(self, step: Any) -> Any:
        return self.base * factor

    def get_config(self) -> dict[str, Any]:
        return {}


@dataclasses.dataclass(slots=True)
class Slots:
    """Has no ``__dict__``."""

    lr: float = 0.1


class OfProperty:
    """Reads a rate of another object."""

    @property
    def lr(self) -> float:
        return slots.lr


cfg, factor, namespace = Config(), 1.0, argparse.Namespace(lr=0.1)
slots, PROPERTY = Slots(), OfProperty()
simple = types.SimpleNamespace(lr=0.1, rows=np.zeros(10_001), slots=slots)
parts = {"lr": 0.1, "variable": keras.Variable(1.0)}
queue, user_dict = collections.deque([0.1], maxlen=1), collections.UserDict(lr=0.1)
view, numbers, of_thread = types.MappingProxyType(parts), array.array("d", [0.1]), threading.local()
module = types.ModuleType("module_of_the_user")
module.lr = 0.1  # type: ignore[attr-defined]
here = sys.modules[__name__]


def of_default(values: dict[str, float] = {"lr": 0.1}) -> float:  # noqa: B006
    return values["lr"]


def rate_of_helper() -> float:
    return cfg.lr


RATES: dict[str, tuple[Callable[[], Any], Callable[[], None]]] = {
    "global object": (lambda: lambda: cfg.lr, lambda: setattr(cfg, "lr", 0.2)),
    "in a helper": (lambda: lambda: rate_of_helper(), lambda: setattr(cfg, "lr", 0.2)),
    "class": (lambda: lambda: Config.rate, lambda: setattr(Config, "rate", 0.2)),
    "bound method": (lambda: cfg.current, lambda: setattr(cfg, "lr", 0.2)),
    "namespace": (lambda: lambda: namespace.lr, lambda: setattr(namespace, "lr", 0.2)),
    "simple namespace": (lambda: lambda: simple.lr, lambda: setattr(simple, "lr", 0.2)),
    "partial": (
        lambda: functools.partial(lambda values: values["lr"], parts),
        lambda: parts.update(lr=0.2),
    ),
    "dict with a variable": (lambda: lambda: parts["lr"], lambda: parts.update(lr=0.2)),
    "module": (lambda: lambda: module.lr, lambda: setattr(module, "lr", 0.2)),
    "default": (lambda: of_default, lambda: of_default.__defaults__[0].update(lr=0.2)),
    "slots": (lambda: lambda: slots.lr, lambda: setattr(slots, "lr", 0.2)),
    "slots in an object": (lambda: lambda: simple.slots.lr, lambda: setattr(slots, "lr", 0.2)),
    "property": (lambda: lambda: PROPERTY.lr, lambda: setattr(slots, "lr", 0.2)),
    "function inside": (lambda: lambda: (lambda: factor)(), lambda: setattr(here, "factor", 2.0)),
    "generator": (
        lambda: lambda: max(factor for _ in range(1)),
        lambda: setattr(here, "factor", 2.0),
    ),
    "deque": (lambda: lambda: queue[0], lambda: queue.append(0.2)),
    "UserDict": (lambda: lambda: user_dict["lr"], lambda: user_dict.update(lr=0.2)),
    "view of a dict": (lambda: lambda: view["lr"], lambda: parts.update(lr=0.2)),
    "array": (lambda: lambda: numbers[0], lambda: numbers.insert(0, 0.2)),
    "of a thread": (lambda: lambda: of_thread.lr, lambda: setattr(of_thread, "lr", 0.2)),
    "environment": (lambda: lambda: float(os.environ["LR"]), lambda: os.environ.update(LR="0.2")),
    "class of a schedule": (OfClass, lambda: setattr(OfClass, "base", 0.2)),
    "global of a schedule": (OfClass, lambda: setattr(here, "factor", 2.0)),
}


# Fails if a step goes on with a number that its learning rate has read from around it; or if it is
# traced again although nothing has changed.
@pytest.mark.parametrize("name", RATES)
def test_what_a_learning_rate_reads_is_a_setting(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg.lr = namespace.lr = simple.lr = parts["lr"] = OfClass.base = Config.rate = 0.1
    slots.lr = of_thread.lr = queue[0] = numbers[0] = user_dict["lr"] = 0.1
    monkeypatch.setenv("LR", "0.1")
    monkeypatch.setattr(here, "factor", 1.0)
    make, change = RATES[name]
    optimizer, settings = keras.optimizers.SGD(make()), Settings()
    settings.note(optimizer)
    before = settings.values()
    assert not settings.changed(optimizer)
    change()
    assert settings.changed(optimizer)
    assert settings.values() != before
    settings.note(optimizer)
    assert not settings.changed(optimizer)


# Fails if each step reads all of an object, however large, that a learning rate takes a number of.
def test_no_more_than_some_items_are_read() -> None:
    simple.many = [types.SimpleNamespace(lr=0.1, items=[0] * 900) for _ in range(300)]
    optimizer, settings = keras.optimizers.SGD(lambda: simple.lr), Settings()
    settings.note(optimizer)
    assert len(settings.values()) < 20_000
    simple.lr = 0.3
    assert settings.changed(optimizer)
    del simple.many
