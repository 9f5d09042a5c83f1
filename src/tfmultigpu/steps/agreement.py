"""Workers run one program with the same values: else the sum of their gradients is of neither.

TensorFlow adds whatever gradients the workers bring, and copies what the first worker made a
variable with, but never compares again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.errors import ClusterError
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.strategies.worker_exchange import WorkerExchange, digest_of

# Names count up with what was made before; seeds and values of the first worker are sent to all.
_NOT_COMPARED = {"name", "module", "registered_name", "seed", "build_config"}
# What calling, fitting or building an object leaves on it: one worker may have, and another not.
_STATE = {"built", "stop_training", "stop_predicting", "stop_evaluating"}
_COUNTER = re.compile(r"_\d+(?=[/\]']|$)")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class ProgramAgreement:
    """Compares once what a step of several workers is made of, before the first step."""

    def __init__(self, strategy: tf.distribute.Strategy, settings: Mapping[str, Any]) -> None:
        """Takes what beside the model and the optimizer must be alike, by name."""
        self._exchange, self._settings = WorkerExchange(strategy), dict(settings)
        self._due = self._exchange.workers > 1

    def check(self, model: Any, optimizer: Any) -> None:
        """Compares with the other workers if that is due; all must call it."""
        if not self._due or tf.inside_function():
            return
        self._due = False
        code = [one.__class__.call for one in all_layers(model)]
        # The first that differs is told, and a compiled model knows its loss.
        parts = {**self._settings, "optimizer": optimizer, "code of layers": code, "model": model}
        described = {name: describe(value) for name, value in parts.items()}
        described["weights"] = str(
            [
                (_COUNTER.sub("", str(v.path)), tuple(v.shape), str(v.dtype), v.trainable)
                for v in model.weights
            ]
        )
        if (found := self._exchange.find_difference("a step", described)) is not None:
            name, other = found
            raise ClusterError(
                f"The workers train with a different {name}: worker {self._exchange.worker} has "
                f"{described[name][:300]}, and worker {other} has another. The sum of their "
                "gradients would be that of neither. Every worker must run the same program with "
                "the same settings."
            )


def describe(value: Any) -> str:
    """Returns a text that is equal if two processes of one program made the same.

    A function is described by its code and the numbers that it was made with, an object by its
    class and its configuration.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Mapping):
        kept = {key: v for key, v in value.items() if str(key) not in _NOT_COMPARED}
        return "{" + ", ".join(sorted(f"{key}: {describe(v)}" for key, v in kept.items())) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(describe, value))) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(describe, value)) + "]"
    if isinstance(value, (np.ndarray, np.generic)):
        return f"array {np.shape(value)} {digest_of(np.asarray(value).tobytes())}"
    function = getattr(value, "python_function", value)  # Of a tf.function.
    function = getattr(function, "__func__", function)  # Of a method.
    if isinstance(function, types.FunctionType):
        read = inspect.getclosurevars(function)
        made_with = [*read.nonlocals.values(), *read.globals.values()]
        numbers: list[Any] = [v for v in made_with if isinstance(v, (float, np.ndarray))]
        numbers += [function.__defaults__, function.__kwdefaults__]
        return f"{function.__qualname__} {digest_of(_code(function.__code__))} {describe(numbers)}"
    if isinstance(value, functools.partial):
        return describe([value.func, value.args, value.keywords])
    if isinstance(value, type):
        return value.__qualname__
    kind: type = value.__class__  # Of what a proxy stands for.
    if dataclasses.is_dataclass(value):  # A loss and its weights.
        return kind.__qualname__ + describe(vars(value))
    return f"{kind.__qualname__} {digest_of(describe(vars(kind).get('call')))} {_config(value)}"


def _config(value: Any) -> Any:
    """The configuration of an object; None if it has none that can be had."""
    import keras

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras warns of functions that it would store.
            # The configuration leaves out what some losses were made with, as the delta of Huber.
            keeps_state = isinstance(value, (keras.layers.Layer, keras.optimizers.Optimizer))
            plain = {
                name: one
                for name, one in vars(value).items()
                if isinstance(one, (*_PLAIN, dict))
                and not (keeps_state and (one is None or name[0] == "_" or name in _STATE))
            }
            return _COUNTER.sub("", describe([value.get_config(), plain]))
    except Exception:  # Code of a user, or of Keras for a lambda without a file.
        return None


def _code(code: types.CodeType) -> str:
    """Returns the code of a function without file and line."""
    inner = [_code(c) if isinstance(c, types.CodeType) else describe(c) for c in code.co_consts]
    return repr((code.co_code, inner, code.co_names, code.co_argcount))


def check_values_alike(strategy: tf.distribute.Strategy, model: Any, optimizer: Any = None) -> None:
    """Checks that a model and its optimizer have the same values on all workers; all must call it.

    What layers count by themselves, such as the statistics of a normalization, may differ between
    replicas once a model was trained. It is compared before the first step of the optimizer.
    """
    exchange = WorkerExchange(strategy)
    if exchange.workers == 1 or tf.inside_function():
        return
    begins = optimizer is not None and int(optimizer.iterations.numpy()) == 0
    variables = list(model.variables if begins else model.trainable_variables)
    variables += [] if optimizer is None else list(optimizer.variables)
    digests = {i: digest_of(np.asarray(v.numpy()).tobytes()) for i, v in enumerate(variables)}
    if (found := exchange.find_difference("the values of variables", digests)) is None:
        return
    (place, other), own = found, exchange.worker
    total = float(np.sum(np.asarray(variables[place].numpy(), "float64")))
    sums = exchange.floats("the sum of a variable", [total])
    raise ClusterError(
        f"The workers begin with different values of {variables[place].path}, and would go on with "
        f"two models. Received: elements that add up to {sums[own, 0]:.9g} on worker {own}, and to "
        f"{sums[other, 0]:.9g} on worker {other}. Load and set weights on every worker, not behind "
        "`if worker == 0:`; a callback that writes weights belongs on every worker too."
    )
