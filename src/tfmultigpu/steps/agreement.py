"""Workers run one program with the same values: else the sum of their gradients is of neither.

TensorFlow adds whatever gradients the workers bring, and copies what the first worker made a
variable with, but never compares again.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmultigpu._patch import ignoring_warnings
from tfmultigpu.errors import ClusterError, ReplicaDependenceWarning
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.strategies.topology import is_one_process, kernels_of
from tfmultigpu.strategies.worker_exchange import WorkerExchange, digest_of
from tfmultigpu.types import KerasModel, KerasOptimizer
from tfmultigpu.user_code import warn

# Names count up with what was made before; seeds and values of the first worker are sent to all.
_NOT_COMPARED = {
    "name", "module", "registered_name", "seed", "build_config", "build_input_shape",
}  # fmt: skip
COUNTER = re.compile(r"_\d+(?=[_/:\]']|$)")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def check_programs_alike(
    strategy: tf.distribute.Strategy,
    model: KerasModel,
    optimizer: KerasOptimizer,
    settings: Mapping[str, object],
) -> None:
    """Checks that workers made a step of the same; all must call it, before the first step."""
    exchange = WorkerExchange(strategy)
    if exchange.workers == 1:
        return
    code = [layer.__class__.call for layer in all_layers(model)]
    weights: list[object] = []
    for v in model.weights:
        weights.append([COUNTER.sub("", v.path), tuple(v.shape), v.dtype, v.trainable])
    # The first that differs is told, and a compiled model knows its loss.
    parts = {**settings, "optimizer": optimizer, "code of layers": code, "model": model}
    parts["weights"] = weights
    described = {name: describe(value) for name, value in parts.items()}
    if (difference := exchange.find_difference("a step", described)) is not None:
        name, other = difference
        raise ClusterError(
            f"The workers train with a different {name}, so the sum of their gradients would "
            "fit none of them.",
            f"{described[name][:300]} on worker {exchange.worker}, and another on worker {other}",
            "Run the same program with the same settings on every worker.",
        )


def warn_of_other_kernels(strategy: tf.distribute.Strategy) -> None:
    """Warns of logical replicas on workers that are not alike; all must call it."""
    if is_one_process(strategy):
        return
    exchange, kernels = WorkerExchange(strategy), kernels_of(strategy)
    difference = exchange.find_difference("the kernels of workers", {"kernels": kernels})
    if difference is not None:
        warn(
            "The bits of a logical replica depend on the worker that computes it, as the workers "
            f"are not alike. Received: {kernels} on worker {exchange.worker}, and others on worker "
            f"{difference[1]}. Take machines of one type, and on CPUs set TF_NUM_INTRAOP_THREADS "
            "to one number on all of them.",
            ReplicaDependenceWarning,
        )


def describe(value: Any) -> str:
    """Returns a text that is equal if two processes of one program made the same.

    A function is described by its code and the numbers that it was made with, an object by its
    class and its configuration.
    """
    if isinstance(value, Mapping):
        kept = []
        for k, v in value.items():
            if str(k) not in _NOT_COMPARED:
                kept.append(f"{k}: {describe(v)}")
        return "{" + ", ".join(sorted(kept)) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        each = list(map(describe, value))
        if isinstance(value, (set, frozenset)):
            each.sort()
        return f"[{', '.join(each)}]"
    if isinstance(value, (np.ndarray, np.generic)):
        return f"array {np.shape(value)} {digest_of(np.asarray(value).tobytes())}"
    if isinstance(value, types.CodeType):  # Without file and line.
        return describe([value.co_code, value.co_consts, value.co_names, value.co_argcount])
    if isinstance(value, functools.partial):
        return describe([value.func, value.args, value.keywords])
    function = getattr(value, "python_function", value)  # Of a tf.function.
    function = getattr(function, "__func__", function)  # Of a method.
    if isinstance(function, types.FunctionType):
        numbers: list[object] = [function.__defaults__, function.__kwdefaults__]
        for v in _read_by(function):
            if isinstance(v, (float, np.ndarray)):
                numbers.append(v)
        code = digest_of(describe(function.__code__))
        return f"{function.__qualname__} {code} {describe(numbers)}"
    if isinstance(value, (*_PLAIN, type)):
        return getattr(value, "__qualname__", repr(value))
    kind: type = value.__class__  # Of what a proxy stands for.
    return f"{kind.__qualname__} {digest_of(describe(vars(kind).get('call')))} {_config(value)}"


def _read_by(function: types.FunctionType) -> list[object]:
    """Returns what a function reads from around it, but for what is defined later."""
    values: list[object] = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # It is empty yet.
            values.append(cell.cell_contents)
    for name in function.__code__.co_names:
        if name in function.__globals__:
            values.append(function.__globals__[name])
    return values


def _config(value: Any) -> str | None:
    """The configuration of an object; None if it has none that can be had."""
    if dataclasses.is_dataclass(value):  # A loss and its weights.
        return describe(vars(value))
    # The configuration leaves out what some losses were made with, as the delta of Huber.
    made_with = vars(value) if isinstance(value, keras.losses.Loss) else {}
    plain = {name: v for name, v in made_with.items() if isinstance(v, (*_PLAIN, dict))}
    try:
        with ignoring_warnings():  # Keras warns of functions that it would store.
            return COUNTER.sub("", describe([value.get_config(), plain]))
    except Exception:  # Code of a user, or of Keras for a lambda without a file.
        return None


def check_values_alike(
    strategy: tf.distribute.Strategy, model: KerasModel, optimizer: KerasOptimizer = None
) -> None:
    """Checks that a model and its optimizer have the same values on all workers; all must call it.

    What layers count by themselves, such as the statistics of a normalization, may differ between
    replicas once a model was trained. It is compared before the first step of the optimizer.
    """
    exchange = WorkerExchange(strategy)
    if exchange.workers == 1 or tf.inside_function():
        return
    begins = optimizer is not None and int(optimizer.iterations.numpy()) == 0
    variables = list(model.variables if begins else model.trainable_variables)
    if optimizer is not None:
        variables += optimizer.variables
    digests = {i: digest_of(np.asarray(v.numpy()).tobytes()) for i, v in enumerate(variables)}
    if (difference := exchange.find_difference("the values of variables", digests)) is None:
        return
    place, other = difference
    total = float(np.sum(np.asarray(variables[place].numpy(), "float64")))
    sums = exchange.floats("the sum of a variable", [total])[:, 0]
    raise ClusterError(
        f"The workers begin with different values of {variables[place].path}, and would "
        "train two models.",
        f"elements that add up to {sums[exchange.worker]:.9g} on worker {exchange.worker}, and to "
        f"{sums[other]:.9g} on worker {other}",
        "Load and set weights on every worker, also in a callback, not behind `if worker == 0:`.",
    )
