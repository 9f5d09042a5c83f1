"""Checks that models, optimizers and metrics were created in the scope of the strategy."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.errors import ScopeError, TfMultiGpuError
from tfmultigpu.strategies.process_state import process_state
from tfmultigpu.strategies.tensorflow_log import leave_out_progress
from tfmultigpu.strategies.topology import (
    describe,
    devices_of,
    is_default,
    strategy_of,
    tf_variable,
)


def check_backend() -> None:
    """Checks that Keras runs on TensorFlow, before anything that trains."""
    leave_out_progress()
    asked = os.environ.get("KERAS_BACKEND", "tensorflow")
    backend = asked
    if "keras" in sys.modules or asked == "tensorflow":  # Importing another backend may fail.
        import keras

        backend = keras.config.backend()
    if backend != "tensorflow":
        raise TfMultiGpuError(
            "tf.distribute trains Keras models on the TensorFlow backend only. Received: the "
            f"{backend!r} backend. Before the first import of keras, set "
            'os.environ["KERAS_BACKEND"] = "tensorflow".'
        )


_NO_OPTIMIZER = object()


def check_kinds(model: Any, strategy: Any, optimizer: Any = _NO_OPTIMIZER) -> None:
    """Checks that the model, the strategy and the optimizer of a step have the right types."""
    import keras

    if not isinstance(model, keras.layers.Layer):
        raise TypeError(
            f"model must be a Keras model. Received: {model!r}. Give a keras.Model, such as "
            "keras.Sequential([...]), created in strategy.scope()."
        )
    check_strategy(strategy)
    if optimizer is not _NO_OPTIMIZER and not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"optimizer must be a Keras optimizer. Received: {optimizer!r}. Create it in the scope:"
            " with strategy.scope(): optimizer = keras.optimizers.Adam(1e-3)."
        )


def check_strategy(strategy: Any) -> None:
    """Checks that something is a strategy."""
    if not isinstance(strategy, tf.distribute.Strategy):
        raise TypeError(
            f"strategy must be a tf.distribute.Strategy. Received: {strategy!r}. Make one with "
            "tmg.create_strategy()."
        )


def current_strategy(
    strategy: tf.distribute.Strategy | None, function: str, model: Any = None
) -> tf.distribute.Strategy:
    """Returns the strategy given to a function; where None, ``tf.distribute.get_strategy()``."""
    if strategy is not None:
        return strategy
    strategy = tf.distribute.get_strategy()
    placed = strategy_of(model) is not strategy or len(devices_of(model)) > 1
    if is_default(strategy) and not placed:
        refuse_one_device(
            f"{function} was called without a strategy outside every scope",
            function,
            "Pass it, strategy=strategy, and create the model in its scope",
            "pass strategy=",
        )
    return strategy


def refuse_one_device(what: str, function: str, cure: str, alone: str) -> None:
    """Refuses to run on one device while a strategy of several replicas lives."""
    if living := process_state.living_strategies():  # Which takes a while.
        raise ScopeError(
            f"{what}, so {function} would run on one device. Received: {describe(living[0])} from "
            f"tmg.create_strategy. {cure}:\n"
            "    with strategy.scope():\n"
            "        model = ...\n"
            f"To run on one device, {alone} "
            'tmg.create_strategy(prefer="one_device"), with the model created in its scope.'
        )


def all_layers(model: Any) -> list[Any]:
    """Returns the model and every layer inside it, each once."""
    import keras

    found: dict[int, Any] = {}
    pending = [model]
    while pending:
        layer = pending.pop()
        if id(layer) not in found:
            found[id(layer)] = layer
            pending.extend(_compat.layers_of(layer))
    return [one for one in found.values() if isinstance(one, keras.layers.Layer)]


def check_scope(variables: Sequence[Any], strategy: tf.distribute.Strategy, what: str) -> None:
    """Checks that variables were created in the scope of a strategy."""
    for variable in variables:
        inner = tf_variable(variable)
        if not strategy.extended.variable_created_in_scope(inner):
            name = getattr(variable, "path", variable.name)
            own = getattr(inner, "distribute_strategy", None)
            if own is not None:
                raise _of_another(what, name, own, strategy)
            raise ScopeError(
                f"The {what} was created outside the scope of the strategy, so it lives on one "
                f"device and would be trained there alone. Received: variable {name!r} of the "
                f"{what}, and {type(strategy).__name__} with {strategy.num_replicas_in_sync} "
                f"replica(s). Create the {what} inside the scope:\n"
                "    with strategy.scope():\n"
                f"        {what} = ..."
            )


def _of_another(
    what: str, name: str, own: tf.distribute.Strategy, strategy: tf.distribute.Strategy
) -> ScopeError:
    """Returns the error for a variable of another strategy than the one given."""
    received = f"Received: variable {name!r} of the {what}, on {describe(own)}"
    if is_default(strategy):
        return ScopeError(
            f"The {what} lives on a strategy, and this is for one device because no strategy was "
            f"given. {received}. Pass the one in whose scope the {what} was created: "
            "strategy=strategy."
        )
    same = type(own) is type(strategy) and own.num_replicas_in_sync == strategy.num_replicas_in_sync
    other = "another object of the same kind" if same else describe(strategy)
    return ScopeError(
        f"The {what} was created in the scope of another strategy than the one given. {received}; "
        f"given: {other}. A program or a notebook cell that makes the strategy anew leaves the "
        f"{what} on the old one. Run the lines that create the {what} again, in the scope of the "
        "new strategy; or keep the old strategy and pass that."
    )
