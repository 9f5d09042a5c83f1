"""Steps and pipelines kept with their model: a second call traces nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfmultigpu._patch import lock_of
from tfmultigpu.errors import ScopeError
from tfmultigpu.steps.build_model import is_built, prepare_model
from tfmultigpu.strategies.scopes import refuse_one_device
from tfmultigpu.strategies.topology import devices_of, is_default, strategy_of
from tfmultigpu.types import KerasModel, Nested

_Purposes: TypeAlias = dict[str, tuple[object, Nested]]
# For each model and purpose: the key and the last step. A step refers to its model by a proxy; a
# real reference would keep the model alive forever.
_kept: weakref.WeakKeyDictionary[KerasModel, dict[str, tuple[object, Nested]]] = (
    weakref.WeakKeyDictionary()
)


def get_or_make(model: KerasModel, purpose: str, key: object, make: Callable[[], Nested]) -> Nested:
    """Returns what was made last for a model and a purpose, or makes it anew for another key.

    If a key contains the ``id`` of an object, what is made must keep that object alive.
    """
    with lock_of(model, purpose):  # Threads may predict by one model at one time.
        known = _kept.setdefault(model, {})
        if purpose not in known or known[purpose][0] != key:
            known[purpose] = key, make()
        return known[purpose][1]


def build_if_needed(model: KerasModel, strategy: tf.distribute.Strategy, spec: Any) -> None:
    """Builds a model that is not built from the type specs of a batch, on one thread."""
    with lock_of(model, "build"):
        if not is_built(model):
            prepare_model(model, strategy, spec)


def checked_strategy(model: KerasModel, function: str) -> tf.distribute.Strategy:
    """Returns the strategy whose scope a model was created in."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"{function} needs a keras.Model. Received: {type(model).__name__}. Wrap a layer: "
            "keras.Sequential([layer])."
        )
    own = strategy_of(model)
    if tf.distribute.has_strategy() and tf.distribute.get_strategy() is not own:
        raise ScopeError(
            f"{function} was called inside the scope of another strategy than the model's.",
            f"model {model.name!r} of {type(own).__name__} with {own.num_replicas_in_sync} "
            "replica(s)",
            f"Call {function} outside the scope, or create the model inside it.",
        )
    if is_default(own) and len(devices_of(model)) <= 1:  # Else layers are placed by hand.
        refuse_one_device(function)
    return own
