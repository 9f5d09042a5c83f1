"""Trials that tell whether the state of a metric is a sum over rows, which replicas can add."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu._compat import is_part_of_keras
from tfmultigpu.errors import LossError, ReplicaDependenceWarning

__all__ = ["check_adds", "check_starts_at_zero", "is_from_keras", "warn_unknown"]

_RELATIVE = 1e-3  # Sums differ only by rounding, other states by far more.
_ELEMENTS = 2**18  # Larger predictions are tried on fewer positions, in milliseconds.
_KEEP_SUMS = (
    "Keep sums and counts over the rows: self.total.assign_add(tf.reduce_sum(values)), "
    "self.count.assign_add(number of values), and divide in result()."
)


def is_from_keras(metric: Any) -> bool:
    """Returns whether a metric is part of Keras and known to keep sums over rows.

    All metrics of Keras do, except those that wrap a function and those along an axis: along the
    first axis they compare rows with each other. ``CosineSimilarity`` does not tell its axis.
    """
    import keras

    if not is_part_of_keras(type(metric)):
        return False
    wraps = type(metric) is getattr(keras.metrics, "MeanMetricWrapper", None)
    along = metric.get_config().get("axis", -1) != -1
    return not wraps and not along and not isinstance(metric, keras.metrics.CosineSimilarity)


def check_adds(metric: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
    """Checks that an update adds the same number to any state, and adds up over rows.

    The trial uses synthetic labels, predictions and states; the state of the metric is neither
    read nor changed. If the trial fails, a ``ReplicaDependenceWarning`` gives the reason.

    Args:
        metric: A Keras metric that has its variables.
        y_true: Specs of the labels, ``[rows, ...]``: anything with a shape and a dtype, or a nested
            structure of such.
        y_pred: Specs of the predictions.
        sample_weight: Specs of the sample weights, or None.

    Raises:
        LossError: A variable of the metric is not a sum over rows.
    """
    for variable in metric.variables:
        dtype = tf.as_dtype(variable.dtype)
        if not (dtype.is_floating or dtype.is_integer or dtype.is_complex):
            raise _not_a_sum(metric, variable, f"is of type {dtype.name}, which cannot be added")
    if any(isinstance(value, tf.Variable) for value in vars(metric).values()):
        warn_unknown(metric, "it keeps a tf.Variable; create it with self.add_variable")
        return
    takes_weights = "sample_weight" in inspect.signature(metric.update_state).parameters
    ways = [None] if sample_weight is None or not takes_weights else [None, sample_weight]
    failures = [_check(metric, y_true, y_pred, weight) for weight in ways]
    if all(failure is not None for failure in failures):
        reason = str(failures[0]).strip().split("\n")[0]
        warn_unknown(metric, f"{type(failures[0]).__name__}: {reason}")


def _check(metric: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Exception | None:
    """Tries a metric with or without weights; returns the error of the trial, or None."""
    failure = None
    for labels, predictions in ((_row_numbers, _ramp), (_zeros, _halves)):
        try:
            with tf.init_scope(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Warnings about synthetic data help nobody.
                shrink = _axes_to_cut(y_pred)
                given = _made_up(y_true, labels, shrink), _made_up(y_pred, predictions, shrink)
                weight = _made_up(sample_weight, _weights, shrink)
                found = _find_non_sum(metric, given, weight)
        except Exception as error:  # User code may raise anything.
            failure = error
            continue
        if found is not None:
            raise _not_a_sum(metric, *found)
        return None
    return failure


def check_starts_at_zero(metric: Any, strategy: tf.distribute.Strategy) -> None:
    """Checks that the state of a metric starts at zero, because replicas add what it starts at.

    The state of a metric in use is not zero either. So it is compared with a second metric that is
    created in the same way.

    Args:
        metric: A Keras metric that has its variables.
        strategy: The strategy in whose scope it was created.

    Raises:
        LossError: A variable of the metric was created with another value than zero.
    """
    with tf.init_scope():
        states = [
            [np.asarray(copy) for copy in strategy.experimental_local_results(variable.value)]
            for variable in metric.variables
        ]
    if not any(np.any(copy) for copies in states for copy in copies):
        return
    # A new thread is under no strategy, so no other worker has to take part.
    with ThreadPoolExecutor(1) as outside:
        fresh = outside.submit(_fresh_state, metric).result()
    if isinstance(fresh, Exception):
        warn_unknown(
            metric,
            f"its state is not zero, and creating a second one to compare failed: {fresh}. If it "
            "starts so, call metric.reset_state() first",
        )
        return
    if len(fresh) != len(states):
        return
    pairs = zip(states, fresh, strict=True)
    if not all(np.array_equal(copy, start) for copies, start in pairs for copy in copies):
        return
    for variable, start in zip(metric.variables, fresh, strict=True):
        if np.any(start):
            value = np.ravel(start)[np.flatnonzero(start)[0]]
            raise LossError(
                "The state of a metric is added over replicas, so it must start at zero. Received: "
                f"variable {variable.path!r} of {metric.name!r}, which starts at {value:g} on each "
                f"of {strategy.num_replicas_in_sync} replicas. Create it with initializer='zeros', "
                "and add its start value in result()."
            )


def _fresh_state(metric: Any) -> Any:
    """Returns the state of a second metric created in the same way, or the error."""
    try:
        try:
            other = type(metric).from_config(metric.get_config())
        except TypeError:  # Its __init__ takes no name or dtype.
            other = type(metric)()
        return [np.asarray(tf.convert_to_tensor(variable.value)) for variable in other.variables]
    except Exception as error:  # User code may raise anything.
        return error


def _find_non_sum(metric: Any, given: tuple[Any, Any], weight: Any) -> tuple[Any, str] | None:
    """Returns the first variable that is not a sum, with a reason; None if all are sums."""

    def added(start: int, rows: slice) -> list[np.ndarray]:
        before = [_filled(variable, start) for variable in metric.variables]
        weighted = {} if weight is None else {"sample_weight": _cut(weight, rows)}
        after = metric.stateless_update_state(before, *_cut(given, rows), **weighted)
        return [_to_float64(a) - _to_float64(b) for a, b in zip(after, before, strict=True)]

    # An update with the same rows must add the same to any state.
    both = slice(0, 2)
    from_zero = added(0, both)
    unsigned = any(tf.as_dtype(variable.dtype).is_unsigned for variable in metric.variables)
    for start in (8, 16 if unsigned else -8):
        for variable, first, other in zip(
            metric.variables, from_zero, added(start, both), strict=True
        ):
            apart = _largest_difference(variable, first, other)
            if apart is not None:
                return variable, (
                    f"is not a sum: the same update adds {apart[0]:g} to it if it is 0, and "
                    f"{apart[1]:g} if it is {start}. So does a maximum, a last value, a mean or a "
                    "product, and replicas cannot add those"
                )
    one_by_one = [a + b for a, b in zip(added(0, slice(0, 1)), added(0, slice(1, 2)), strict=True)]
    for variable, together, alone in zip(metric.variables, from_zero, one_by_one, strict=True):
        apart = _largest_difference(variable, together, alone)
        if apart is not None:
            return variable, (
                f"is not a sum over rows: two rows in one batch add {apart[0]:g} to it, and one "
                f"after the other {apart[1]:g}. It counts batches or divides by their size, and "
                "every replica has another batch"
            )
    return None


def _largest_difference(
    variable: Any, one: np.ndarray, other: np.ndarray
) -> tuple[float, float] | None:
    """Returns the two numbers that differ most; None if all agree except for rounding."""
    one, other = np.atleast_1d(one), np.atleast_1d(other)
    dtype = tf.as_dtype(variable.dtype)
    with np.errstate(invalid="ignore"):
        apart = np.abs(one - other)
    apart[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
    apart[np.isnan(apart)] = np.inf
    if not dtype.is_integer:
        numbers: Any = dtype.as_numpy_dtype
        epsilon = 2.0**-7 if dtype == tf.bfloat16 else float(np.finfo(numbers).eps)
        apart -= 16.0 * epsilon + _RELATIVE * np.nan_to_num(np.abs(one))
    if not np.any(apart > 0):
        return None
    index = np.unravel_index(np.argmax(apart), apart.shape)
    return one[index].item(), other[index].item()


def _filled(variable: Any, value: int) -> Any:
    return tf.cast(tf.fill(variable.shape, value), variable.dtype)


def _to_float64(tensor: Any) -> np.ndarray:
    tensor = tf.convert_to_tensor(tensor)
    return np.asarray(tf.cast(tensor, tf.complex128 if tensor.dtype.is_complex else tf.float64))


def _zeros(shape: list[int]) -> np.ndarray:
    return np.zeros(shape)


def _halves(shape: list[int]) -> np.ndarray:
    return np.full(shape, 0.5)


def _row_numbers(shape: list[int]) -> np.ndarray:
    return np.zeros(shape) + np.arange(shape[0]).reshape([-1] + [1] * (len(shape) - 1))


def _weights(shape: list[int]) -> np.ndarray:
    return 1.0 + _row_numbers(shape)


def _ramp(shape: list[int]) -> np.ndarray:
    return np.linspace(0.1, 0.8, math.prod(shape)).reshape(shape)


def _axes_to_cut(y_pred: Any) -> dict[int, int]:
    """Returns the axes of large predictions, except the last, to cut to two positions."""
    shapes = [tuple(spec.shape) for spec in tf.nest.flatten(y_pred)]
    if max((math.prod(size or 1 for size in shape[1:]) for shape in shapes), default=0) < _ELEMENTS:
        return {}
    return {
        axis: size
        for shape in shapes
        for axis, size in enumerate(shape[:-1])
        if axis > 0 and size is not None and size > 2
    }


def _made_up(specs: Any, values: Callable[[list[int]], np.ndarray], shrink: dict[int, int]) -> Any:
    ragged: Any = tf.RaggedTensor

    def make(spec: Any) -> Any:
        if spec is None:
            return None
        sizes = list(spec.shape)
        shape = [
            2 if axis == 0 or shrink.get(axis) == size else 1 if size is None else size
            for axis, size in enumerate(sizes)
        ]
        dtype = tf.as_dtype(spec.dtype)
        if dtype == tf.string:
            tensor = tf.fill(shape, "")
        else:
            tensor = tf.cast(values(shape) if shape else 0.5, dtype)
        if isinstance(spec, tf.RaggedTensorSpec):
            return ragged.from_tensor(tensor, ragged_rank=getattr(spec, "ragged_rank", 1))
        return tf.sparse.from_dense(tensor) if isinstance(spec, tf.SparseTensorSpec) else tensor

    return tf.nest.map_structure(make, specs)


def _cut(structure: Any, rows: slice) -> Any:
    def cut(tensor: Any) -> Any:
        if isinstance(tensor, tf.SparseTensor):
            size = rows.stop - rows.start
            start = [rows.start] + [0] * (tensor.shape.rank - 1)
            return tf.sparse.slice(tensor, start, [size, *tensor.shape[1:]])
        return tensor[rows] if tensor is not None and tensor.shape.rank else tensor

    return tf.nest.map_structure(cut, structure)


def _not_a_sum(metric: Any, variable: Any, problem: str) -> LossError:
    return LossError(
        "The state of a metric is added over replicas, so it must be made of sums over rows. "
        f"Received: {metric.name!r}, whose variable {variable.path!r} {problem}. {_KEEP_SUMS}"
    )


def warn_unknown(metric: Any, reason: str) -> None:
    """Warns that the state of a metric could not be checked."""
    warnings.warn(
        f"The metric {metric.name!r} could not be checked: {reason}. If it keeps anything but sums "
        f"over rows, its value depends on the number of replicas. {_KEEP_SUMS}",
        ReplicaDependenceWarning,
        stacklevel=3,
    )
