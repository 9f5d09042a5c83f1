"""Cache of steps per model: a second call traces nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmultigpu.clusters.process_state import process_state
from tfmultigpu.errors import ScopeError
from tfmultigpu.losses.build_model import prepare_model
from tfmultigpu.steps.op_placement import devices_of
from tfmultigpu.strategies.scopes import check_kinds
from tfmultigpu.strategies.topology import describe, is_default, strategy_of

__all__ = ["build", "checked_strategy", "get_or_make"]

# For each model and purpose: the key and the last step. A step refers to its model by a proxy; a
# real reference would keep the model alive forever.
_steps: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def get_or_make(model: Any, purpose: str, key: Any, make: Callable[[], Any]) -> Any:
    """Returns the last step of a model for a purpose, or makes one if the key has changed.

    If a key contains the ``id`` of an object, the step must keep that object alive.
    """
    known = _steps.setdefault(model, {})
    if purpose not in known or known[purpose][0] != key:
        known[purpose] = key, make()
    return known[purpose][1]


def build(model: Any, strategy: tf.distribute.Strategy, batch_spec: Any) -> None:
    """Builds a model that is not built yet."""
    if not model.built:
        prepare_model(model, strategy, batch_spec)


def checked_strategy(model: Any, function: str) -> tf.distribute.Strategy:
    """Returns the strategy whose scope a model was created in.

    Args:
        model: The user's model.
        function: The name of the called function.

    Raises:
        ScopeError: The caller is in the scope of another strategy; or the model is outside every
            scope, although a strategy with several replicas exists.
        TypeError: It is not a model.
    """
    import keras

    if isinstance(model, keras.Model):
        own = strategy_of(model)
        if tf.distribute.has_strategy() and tf.distribute.get_strategy() is not own:
            raise ScopeError(
                f"{function} was called inside the scope of another strategy than that of the "
                f"model. Received: model {model.name!r} of {type(own).__name__} with "
                f"{own.num_replicas_in_sync} replica(s). Call {function} outside the scope, or "
                "create the model inside it."
            )
        _check_not_outside(model, own, function)
        return own
    strategy = tf.distribute.get_strategy()
    check_kinds(model, strategy)
    _check_not_outside(model, strategy, function)
    if function != "predict":
        raise TypeError(
            f"{function} needs a compiled keras.Model. Received: {type(model).__name__}, a layer."
        )
    return strategy


def _check_not_outside(model: Any, own: tf.distribute.Strategy, function: str) -> None:
    """Checks that a model is on a strategy if one with several replicas exists."""
    if not is_default(own) or len(devices_of(model)) > 1:  # Layers placed by hand.
        return
    held = process_state.living_strategies()
    if held:
        raise ScopeError(
            f"The model was created outside the scope of every strategy, so {function} would run "
            f"on one device. Received: model {model.name!r}, and {describe(held[0])} from "
            "tmg.create_strategy. Create the model inside its scope:\n"
            "    with strategy.scope():\n"
            "        model = ...\n"
            "To run on one device, create the model in a scope for one device:\n"
            '    with tmg.create_strategy(prefer="one_device").scope():\n'
            "        model = ..."
        )
