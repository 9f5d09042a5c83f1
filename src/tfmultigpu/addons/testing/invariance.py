"""``assert_replica_invariant``: compares training on replicas with training on one device."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.addons.testing.comparison import (
    Differences,
    InvarianceReport,
    ReplicaInvarianceError,
)
from tfmultigpu.addons.testing.reference import OneDevice, Training
from tfmultigpu.addons.testing.workers import run_workers, to_pickle
from tfmultigpu.arguments import check_count
from tfmultigpu.data.sharded_dataset import distribute_dataset
from tfmultigpu.data.sources import to_dataset
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.steps.make import make_eval_step, make_predict_step, make_train_step
from tfmultigpu.steps.objective import Objective
from tfmultigpu.strategies.factory import create_strategy

__all__ = ["assert_replica_invariant"]


def assert_replica_invariant(
    build: Callable[[], Training],
    dataset: Any,
    *,
    replicas: int | Sequence[int] = 2,
    strategy: tf.distribute.Strategy | None = None,
    workers: int = 0,
    steps: int | None = None,
    shares: Sequence[float] | None = None,
    steps_per_call: int = 1,
    tolerance: float = 1e-6,
    tolerances: Mapping[str, float] | None = None,
    seed: int = 0,
    predict: bool = True,
    **options: Any,
) -> InvarianceReport:
    """Asserts that training on several replicas equals training on one device.

    Trains twice on the same global batches: on one device with a plain loop of Keras and
    TensorFlow, and on replicas with ``make_train_step``. Compares the loss, the gradient norm and
    every variable of model, optimizer and metrics after every step. At the end it also compares
    metric results, the loss of ``make_eval_step`` and predictions.

    Args:
        build: Makes a ``Training``. Called once for each side, inside the scope of the strategy and
            after ``keras.utils.set_random_seed(seed)``.
        dataset: Global batches: a ``tf.data.Dataset``, or a list of batches ``(x, y)`` or
            ``(x, y, sample_weight)``. Read once for both sides.
        replicas: Number of replicas, on the GPUs or logical CPUs of this process (see
            ``virtual_devices``); or several numbers, each compared with one device.
        strategy: The strategy, in place of ``replicas``.
        workers: Number of worker processes on this machine, in place of ``replicas``. They import
            ``build``, a function of a module, and ``dataset``, another one or a list of arrays.
        steps: Number of batches; None takes all.
        shares: Relative share of each global batch per replica.
        steps_per_call: Above 1, uses ``step.run``, and compares variables after each call.
        tolerance: Largest difference: absolute for values below one, relative above.
        tolerances: Larger tolerances for quantities whose name contains a text, such as
            ``{"Adam": 1e-5}``. Write the reason beside it.
        seed: The seed for ``keras.utils.set_random_seed``.
        predict: Compare evaluation and predictions, too.
        options: For ``make_train_step``: ``micro_batches``, ``jit_compile``, ``loss_scale``.

    Returns:
        A report of the largest difference of each quantity.

    Raises:
        ReplicaInvarianceError: A difference is above its tolerance. This ``AssertionError`` names
            the variable, the step and the difference.
        TfMultiGpuError: ``build`` does not return a ``Training``, or there is no data.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> def build():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     return tmg.testing.Training(model, keras.optimizers.SGD(0.1), "mse")
        >>> rows = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")
        >>> batches = [(rows[:4, :3], rows[:4, 3:]), (rows[4:, :3], rows[4:, 3:])]
        >>> tmg.testing.virtual_devices(2)
        ('CPU:0', 'CPU:1')
        >>> report = tmg.testing.assert_replica_invariant(build, batches, replicas=2)
        >>> report.largest.amount < 1e-6
        True
    """
    counts: list[int] = [int(count) for count in np.atleast_1d(replicas)]
    _check_arguments(build, strategy, counts, steps, steps_per_call, tolerance, options)
    settings: dict[str, Any] = {
        "steps": steps,
        "shares": shares,
        "steps_per_call": steps_per_call,
        "tolerance": tolerance,
        "tolerances": dict(tolerances or {}),
        "seed": seed,
        "predict": predict,
        **options,
    }
    if workers:
        results = run_workers(
            _compare_in_worker, workers, args=(to_pickle((build, dataset)), settings)
        )
        report: InvarianceReport = results[0].value
        return report
    strategies = [strategy] if strategy is not None else [_strategy(count) for count in counts]
    batches = _read_batches(dataset() if callable(dataset) else dataset, steps)
    expected = _train_on_one_device(build, batches, seed, predict)
    differences = Differences(tolerance, dict(tolerances or {}))
    names = []
    for one in strategies:
        names.append(f"{type(one).__name__} with {one.num_replicas_in_sync} replica(s)")
        _compare_on_replicas(build, batches, one, expected, differences, settings, options)
        if differences.first:
            report = _report(names[-1:], batches, differences)
            raise ReplicaInvarianceError(f"Training on replicas differs from one device.\n{report}")
    return _report(names, batches, differences)


def _report(names: list[str], batches: list[Any], differences: Differences) -> InvarianceReport:
    return InvarianceReport(
        ", ".join(names),
        len(batches),
        differences.tolerance,
        differences.largest,
        tuple(differences.first),
        tuple(differences.not_finite),
    )


def _compare_in_worker(stored: bytes, settings: dict[str, Any]) -> InvarianceReport:
    # Before importing the user's module, which may start TensorFlow's devices.
    strategy = create_strategy(prefer="multi_worker", fallback=False)
    build, dataset = pickle.loads(stored)
    return assert_replica_invariant(build, dataset, strategy=strategy, **settings)


@functools.cache
def _strategy(replicas: int) -> tf.distribute.Strategy:
    """Creates a strategy once for each number of replicas."""
    return create_strategy("mirrored", devices=replicas, fallback=False)


def _check_arguments(
    build: Any,
    strategy: Any,
    counts: Sequence[int],
    steps: int | None,
    steps_per_call: int,
    tolerance: float,
    options: Mapping[str, Any],
) -> None:
    if not callable(build):
        raise TypeError(
            "build must be a function that makes a Training, once for each side. Received: "
            f"{type(build).__name__}."
        )
    if strategy is not None and not isinstance(strategy, tf.distribute.Strategy):
        raise TypeError(
            f"strategy must be a tf.distribute.Strategy. Received: strategy={strategy!r}."
        )
    if not counts or min(counts) < 1:
        raise ValueError(f"replicas must be at least 1. Received: replicas={counts}.")
    check_count("steps_per_call", steps_per_call)
    if steps is not None:
        check_count("steps", steps, other="None")
    if not isinstance(tolerance, Real) or not tolerance >= 0:
        raise ValueError(
            f"tolerance must be a number, at least 0. Received: tolerance={tolerance!r}."
        )
    known = {field.name for field in dataclasses.fields(Training)} & set(options)
    if known:
        raise ValueError(
            "assert_replica_invariant got options of the Training. One device needs them, too. "
            f"Received: options {sorted(known)}. Write Training(..., {sorted(known)[0]}=...)."
        )


def _read_batches(dataset: Any, steps: int | None) -> list[Any]:
    if isinstance(dataset, tuple):
        raise TfMultiGpuError(
            "dataset must yield global batches. Received: a tuple. Give a list of batches "
            "[(x, y), (x, y)], or tf.data.Dataset.from_tensor_slices((x, y)).batch(n)."
        )
    source = dataset if isinstance(dataset, (list, Iterator)) else to_dataset(dataset)
    batches: list[Any] = []
    for batch in source:
        if steps is not None and len(batches) == steps:
            break
        batch = tuple(batch) if isinstance(batch, list) else batch
        batches.append(tf.nest.map_structure(_as_tensor, batch))
    if not batches:
        raise TfMultiGpuError(
            "The dataset has no batches, so there is nothing to train on. Received: "
            f"{type(dataset).__name__}, steps={steps}."
        )
    return batches


def _as_tensor(leaf: Any) -> Any:
    return leaf if leaf is None or tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)


def _build(build: Callable[[], Any], seed: int) -> Training:
    import keras

    keras.utils.set_random_seed(seed)
    training = build()
    if not isinstance(training, Training):
        raise TfMultiGpuError(
            f"build must return a Training. Received: {type(training).__name__}. Write return "
            "tmg.testing.Training(model, optimizer, loss)."
        )
    return training


def _train_on_one_device(
    build: Callable[[], Any], batches: list[Any], seed: int, predict: bool
) -> dict[str, Any]:
    """Returns the values of one device before training, after each step and at the end."""
    training = _build(build, seed)
    loop = OneDevice(training)
    loop.build(batches[0])
    before = _values(training)
    logs, after = [], []
    for batch in batches:
        logs.append({name: value.numpy() for name, value in loop.step(batch).items()})
        after.append(_values(training))
    ends = _results(training)
    if predict:
        ends |= _outputs(batches, loop.evaluate, loop.predict, training.forward is None)
    return {"before": before, "logs": logs, "after": after, "ends": ends}


def _objective(training: Any, metrics: Any) -> Objective | None:
    by_loss = training.forward is None
    return Objective(training.loss, training.loss_weights, metrics) if by_loss else None


def _compare_on_replicas(
    build: Callable[[], Any],
    batches: list[Any],
    strategy: tf.distribute.Strategy,
    expected: Mapping[str, Any],
    differences: Differences,
    settings: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Trains on replicas and adds the differences from one device."""
    with strategy.scope():
        training = _build(build, settings["seed"])
    step = make_train_step(
        training.model,
        training.optimizer,
        _objective(training, training.weighted_metrics),
        strategy,
        metrics=training.metrics,
        forward=training.forward,
        clip_norm=training.clip_norm,
        **options,
    )
    if training.model.built:
        _compare_values(differences, 0, expected["before"], _values(training), common=True)
    dataset = to_dataset(lambda: iter(batches))
    iterator = iter(distribute_dataset(dataset, strategy, shares=settings["shares"]))
    done = 0
    while done < len(batches):
        if settings["steps_per_call"] > 1:
            done += int(step.run(iterator, settings["steps_per_call"])["steps"])
        else:
            logs = step(next(iterator))
            for name, value in expected["logs"][done].items():
                differences.add(name, done + 1, value, logs[name])
            done += 1
        _compare_values(differences, done, expected["after"][done - 1], _values(training))
        _compare_copies(differences, done, training, strategy)
    ends = _results(training)
    if settings["predict"]:
        evaluate = make_eval_step(
            training.model, _objective(training, ()), strategy, forward=training.forward,
            verify=False,  # The code below compares.
        )  # fmt: skip
        predict = make_predict_step(training.model, strategy, verify=False)
        ends |= _outputs(
            batches, lambda batch: evaluate(batch)["loss"], predict, training.forward is None
        )
    # Paired by order, because Keras numbers the names of metrics across the process.
    for (name, value), other in zip(expected["ends"].items(), ends.values(), strict=True):
        differences.add(name, done, value, other)


def _values(training: Training) -> dict[str, Any]:
    return {name: variable.numpy() for name, variable in training.variables().items()}


def _results(training: Training) -> dict[str, Any]:
    metrics = tf.nest.flatten([training.metrics, training.weighted_metrics])
    return {
        f"{metric.name}.result() [{i}]": tf.convert_to_tensor(metric.result()).numpy()
        for i, metric in enumerate(metrics)
        if metric is not None
    }


def _outputs(
    batches: list[Any], evaluate: Callable[[Any], Any], predict: Callable[[Any], Any], plain: bool
) -> dict[str, Any]:
    """Returns losses and, if the model itself takes the batches, predictions."""
    found = {}
    for i, batch in enumerate(batches):
        found[f"evaluated loss of batch {i}"] = evaluate(batch).numpy()
        for j, part in enumerate(tf.nest.flatten(predict(batch)) if plain else ()):
            found[f"prediction {j} of batch {i}"] = _array(part)
    return found


def _array(tensor: Any) -> Any:
    if isinstance(tensor, tf.RaggedTensor):
        tensor = tensor.to_tensor()
    elif isinstance(tensor, tf.SparseTensor):
        tensor = tf.sparse.to_dense(tensor)
    return tensor.numpy()


def _compare_values(
    differences: Differences,
    step: int,
    expected: Mapping[str, Any],
    actual: Mapping[str, Any],
    *,
    common: bool = False,
) -> None:
    names, others = list(expected), list(actual)
    if len(names) != len(others) and not common:
        raise TfMultiGpuError(
            "build made other variables the second time, and the two cannot be compared. Received: "
            f"{len(names)} on one device and {len(others)} on replicas: "
            f"{sorted(set(names) ^ set(others))[:5]}."
        )
    # Paired by order, because Keras numbers the names of layers across the process.
    for name, other in zip(names, others, strict=not common):
        differences.add(name, step, expected[name], actual[other])


def _compare_copies(
    differences: Differences, step: int, training: Training, strategy: tf.distribute.Strategy
) -> None:
    """Adds differences between the copies of a variable on the replicas of this process."""
    for variable in [*training.model.trainable_variables, *training.optimizer.variables]:
        inner = getattr(variable, "value", variable)
        first, *others = (copy.numpy() for copy in strategy.experimental_local_results(inner))
        for other in others:
            if not np.array_equal(first, other, equal_nan=True):
                differences.add(f"copies of {variable.path} on replicas", step, first, other)
