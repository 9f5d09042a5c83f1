"""Settings of an optimizer: what a learning rate reads from around it, at any depth."""

from __future__ import annotations

import argparse
import functools
import sys
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


cfg, factor, namespace = Config(), 1.0, argparse.Namespace(lr=0.1)
simple = types.SimpleNamespace(lr=0.1, rows=np.zeros(10_001))
parts = {"lr": 0.1, "variable": keras.Variable(1.0)}
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
    "class of a schedule": (OfClass, lambda: setattr(OfClass, "base", 0.2)),
    "global of a schedule": (OfClass, lambda: setattr(here, "factor", 2.0)),
}


# Fails if a step goes on with a number that its learning rate has read from around it; or if it is
# traced again although nothing has changed.
@pytest.mark.parametrize("name", RATES)
def test_what_a_learning_rate_reads_is_a_setting(name: str) -> None:
    cfg.lr = namespace.lr = simple.lr = parts["lr"] = OfClass.base = Config.rate = 0.1
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
