"""Checks of what a user hands over: that it is of Keras 3, and in the scope of the strategy."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.arguments import brief
from tfmultigpu.errors import ScopeError, StrategyUnavailableError, TfMultiGpuError
from tfmultigpu.strategies.attached import attached
from tfmultigpu.strategies.process_state import process_state
from tfmultigpu.strategies.topology import (
    describe,
    devices_of,
    is_default,
    kind_of,
    strategy_of,
    tf_variable,
)
from tfmultigpu.types import KerasLayer, KerasModel, KerasOptimizer, KerasVariable

_LEGACY = "tf_keras"


def check_backend(*given: object) -> None:
    """Checks that Keras runs on TensorFlow, and that what is given is of this Keras.

    ``given`` are the objects of the user: models, optimizers, losses, metrics, callbacks, and
    structures of them.
    """
    import keras

    if (backend := keras.config.backend()) != "tensorflow":
        raise TfMultiGpuError(
            "tf.distribute trains Keras models on the TensorFlow backend only.",
            f"the {backend!r} backend",
            'Before the first import of keras, set os.environ["KERAS_BACKEND"] = "tensorflow".',
        )
    refuse_legacy_keras(*given)


def refuse_legacy_keras(*given: object) -> None:
    """Refuses objects of tf_keras, which is Keras 2, also as attributes of a model.

    They look like objects of Keras 3 and fail late, each for another reason.
    """
    if _LEGACY not in sys.modules:
        return
    import keras

    for value in keras.tree.flatten(given):
        inside = list(vars(value).values()) if isinstance(value, keras.layers.Layer) else []
        for part in (value, *inside):
            if _is_legacy(part):
                raise TfMultiGpuError(
                    "This library trains models of Keras 3, and tf_keras is Keras 2: the two do "
                    "not mix.",
                    f"an object of tf_keras, {getattr(part, '__name__', type(part).__name__)!r}",
                    "Write import keras, and keras in place of tf_keras; tf.keras is Keras 3 too, "
                    "unless TF_USE_LEGACY_KERAS is set before TensorFlow is imported.",
                )


def _is_legacy(value: object) -> bool:
    """Returns whether a value, or the class of it, comes from tf_keras or inherits from there."""
    kind = value if isinstance(value, type) else getattr(value, "__class__", type(value))
    homes = [getattr(value, "__module__", None), *(base.__module__ for base in kind.__mro__)]
    return any(str(home).partition(".")[0] == _LEGACY for home in homes)


def check_kinds(model: KerasModel, strategy: object, *optimizers: KerasOptimizer) -> None:
    """Checks that the model, the strategy and the optimizers of a step have the right types."""
    import keras

    refuse_legacy_keras(model, *optimizers)
    if isinstance(model, tf.distribute.Strategy):
        raise TypeError(
            f"The model comes first, and the strategy later. Received: model={brief(model)}. Write "
            "their names: model=model, strategy=strategy."
        )
    _check("model", model, keras.layers.Layer, "Keras model", "keras.Sequential([...])")
    _check_strategy(strategy)
    for optimizer in optimizers:
        check_optimizer(optimizer)


def check_optimizer(optimizer: KerasOptimizer) -> None:
    """Checks that an optimizer is one of Keras, not its name."""
    import keras

    refuse_legacy_keras(optimizer)
    kind, line = keras.optimizers.Optimizer, "keras.optimizers.Adam(1e-3)"
    _check("optimizer", optimizer, kind, "Keras optimizer", line)


def _check_strategy(strategy: object) -> None:
    if strategy is None:  # The current one.
        strategy = tf.distribute.get_strategy()
    kind = tf.distribute.Strategy
    _check("strategy", strategy, kind, "tf.distribute.Strategy", "tmg.create_strategy()")
    if kind_of(strategy).shares_copies:
        raise StrategyUnavailableError(
            "Replicas of this strategy share one copy of each variable, and each would update it.",
            type(strategy).__name__,
            "Write strategy = tmg.create_strategy(), which mirrors variables; for models larger "
            "than a device add tmg.sharded_variables().",
        )


def _check(name: str, value: object, kind: type, what: str, line: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(
            f"{name} must be a {what}. Received: {brief(value)}. Write {name} = {line}."
        )


def current_strategy(
    strategy: tf.distribute.Strategy | None, function: str, model: KerasModel = None
) -> tf.distribute.Strategy:
    """Returns the strategy given to a function; where None, ``tf.distribute.get_strategy()``."""
    if strategy is not None:
        _check_strategy(strategy)
        return strategy
    strategy = tf.distribute.get_strategy()
    _check_strategy(strategy)
    placed = strategy_of(model) is not strategy or len(devices_of(model)) > 1
    if is_default(strategy) and not placed:
        refuse_one_device(function)
    return strategy


def refuse_one_device(function: str) -> None:
    """Refuses to run on one device while a strategy of several replicas lives."""
    living = process_state.living_strategies()  # Which takes a while.
    if not living:
        return
    kinds = ", ".join(sorted(describe(strategy) for strategy in living))
    if len(living) == 1:
        received, scope = f"{kinds}, unused", "its scope"
    else:
        received, scope = f"{len(living)} strategies, none entered: {kinds}", "the scope of one"
    alone = 'To run on one device, use tmg.create_strategy(prefer="one_device") in the same way.'
    if function in ("fit", "evaluate", "predict"):  # They run where their model was created.
        raise ScopeError(
            f"{function} would run on one device: the model was created outside the scope.",
            received,
            f"Create the model in {scope}, and compile it there:\n"
            "    with strategy.scope():\n"
            "        model = ...\n"
            f"        model.compile(...)\n{alone}",
        )
    raise ScopeError(
        f"{function} would run on one device: it got no strategy, and no model created in the "
        "scope of one.",
        received,
        f"{_line_for(function, scope)}\n{alone}",
    )


def _line_for(function: str, scope: str) -> str:
    """Returns the line that puts what a function works on into a scope."""
    if function == "GradientAccumulator":
        return (
            f"Create the model and the window in {scope}:\n"
            "    with strategy.scope():\n"
            "        window = tmg.GradientAccumulator(model.trainable_variables)"
        )
    return (
        f"Create the model in {scope}, and give steps and distribute_dataset the strategy, "
        "strategy=strategy:\n"
        "    with strategy.scope():\n"
        "        model = ..."
    )


def all_layers(model: KerasModel) -> list[KerasLayer]:
    """Returns the model, which may be a weak reference to it, and every layer inside it."""
    return [model, *_compat.layers_inside(model)]


def check_scope(
    variables: Sequence[KerasVariable], strategy: tf.distribute.Strategy, what: str
) -> None:
    """Checks that variables were created in the scope of a strategy."""
    is_inside = strategy.extended.variable_created_in_scope
    for variable in variables:
        inner = tf_variable(variable)
        if isinstance(inner, tf.Tensor) and (refused := attached(strategy).refused) is not None:
            raise refused  # The variable is empty: Keras has hidden why.
        if not is_inside(inner):
            origin = getattr(inner, "distribute_strategy", None)
            name = getattr(variable, "path", variable.name)
            if origin is None:
                where, placed, fix = "outside the scope of the strategy", "on one device", "Create"
            else:
                where = "in the scope of another strategy than the one given"
                placed = f"on {describe(origin)}"
                fix = "Pass that strategy, strategy=strategy; or create"
            of, layer = what, name.rpartition("/")[0]
            inside = [each for each in variables if is_inside(tf_variable(each))]
            if what == "model" and inside:
                what, of = "layer", f"layer {layer!r}"
                if any(each.path.rpartition("/")[0] == layer for each in inside):
                    raise ScopeError(
                        f"A variable was added to the {of} {where}.",
                        f"{name!r}, {placed}, and {describe(strategy)}",
                        "Call what added it in the scope, after the model is created anew:\n"
                        "    with strategy.scope():\n"
                        "        layer.enable_lora(4)  # or layer.quantize(...), add_weight(...)",
                    )
            raise ScopeError(
                f"The {of} was created {where}.",
                f"variable {name!r} of the {what}, {placed}, and {describe(strategy)}",
                f"{fix} the {what} in the scope, again if a notebook cell has made the strategy "
                "anew:\n"
                "    with strategy.scope():\n"
                f"        {what} = ...{'  # or model.compile(...)' if what == 'optimizer' else ''}",
            )
