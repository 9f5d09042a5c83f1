"""Steps that are kept for as long as their model lives, so that a second call traces nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmultigpu.clusters.process_state import process_state
from tfmultigpu.errors import ScopeError
from tfmultigpu.loops.compiled import check_keeps_to
from tfmultigpu.losses.build_model import prepare_model
from tfmultigpu.strategies.scopes import check_kinds
from tfmultigpu.strategies.topology import describe, is_default, strategy_of

__all__ = ["build", "checked_strategy", "kept"]

# By model, the step made last for each purpose and what it was made for. A step knows its model by
# a proxy alone: a value that held its key would keep it for ever.
_steps: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def kept(model: Any, purpose: str, key: Any, make: Callable[[], Any]) -> Any:
    """Returns the step made before for the same key, so that it is not traced again.

    What a key has the ``id`` of must be kept alive by the step itself.
    """
    known = _steps.setdefault(model, {})
    if purpose not in known or known[purpose][0] != key:
        known[purpose] = key, make()
    return known[purpose][1]


def build(model: Any, strategy: tf.distribute.Strategy, batch_spec: Any) -> None:
    """Makes the variables of a model that has none yet."""
    if not model.built:
        prepare_model(model, strategy, batch_spec)


def checked_strategy(model: Any, what: str, *methods: str) -> tf.distribute.Strategy:
    """Returns the strategy in whose scope a model was created.

    Args:
        model: What the user gave.
        what: The function it was given to.
        methods: Methods of Keras that the model must not replace.

    Raises:
        CompileError: It replaces one of them.
        ScopeError: This is the scope of another strategy; or the model is on none, and one of
            several replicas was created.
        TypeError: It is no model.
    """
    import keras

    if isinstance(model, keras.Model):
        check_keeps_to(model, *methods)
        own = strategy_of(model)
        if tf.distribute.has_strategy() and tf.distribute.get_strategy() is not own:
            raise ScopeError(
                f"{what} runs on the strategy in whose scope the model was created, and was called "
                f"inside the scope of another one. Received: model {model.name!r} of "
                f"{type(own).__name__} with {own.num_replicas_in_sync} replica(s). Call it outside "
                "of the scope, or create the model inside."
            )
        _check_not_left_out(model, own, what)
        return own
    strategy = tf.distribute.get_strategy()
    check_kinds(model, strategy)
    _check_not_left_out(model, strategy, what)
    if what != "predict":
        raise TypeError(
            f"{what} takes a compiled keras.Model. Received: {type(model).__name__}, a layer."
        )
    return strategy


def _check_not_left_out(model: Any, own: tf.distribute.Strategy, what: str) -> None:
    """Checks that a model is on a strategy if one of several replicas was created."""
    if not is_default(own):
        return
    held = process_state.living_strategies()
    if held:
        raise ScopeError(
            f"The model was created outside the scope of every strategy, so {what} would run on "
            f"one device alone. Received: model {model.name!r}, and {describe(held[0])} from "
            "tmg.create_strategy. Create the model inside its scope:\n"
            "    with strategy.scope():\n"
            "        model = ...\n"
            "If one device is what you want, create the model in a scope that says so:\n"
            '    with tmg.create_strategy(prefer="one_device").scope():\n'
            "        model = ..."
        )
