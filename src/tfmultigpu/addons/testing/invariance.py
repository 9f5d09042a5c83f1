"""``assert_replica_invariant``: compares training on replicas with training on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, overload

import keras
import numpy as np
import tensorflow as tf

from tfmultigpu.addons.testing import functions
from tfmultigpu.addons.testing.differences import Difference, difference, differs, tell
from tfmultigpu.addons.testing.reference import OneDevice, Training
from tfmultigpu.arguments import brief, check_callable, check_count
from tfmultigpu.data import distribute_dataset
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.steps import Objective, make_eval_step, make_predict_step, make_train_step
from tfmultigpu.strategies import create_strategy
from tfmultigpu.strategies.scopes import check_backend
from tfmultigpu.types import Array, Function, Options, Scalar, Shard

_TRAINING = "return tmg.testing.Training(model, optimizer, loss)"
_PREDICTION, _TOLERANCE = "prediction", 1e-6
Quantities: TypeAlias = list[tuple[str, Array | Scalar]]  # Names and values after a step.


@overload
def assert_replica_invariant(
    build: Callable[[tf.distribute.Strategy], object],
    *,
    replicas: int | Sequence[int] = 2,
    strategy: tf.distribute.Strategy | None = None,
    tolerance: float | None = None,
    tolerances: Mapping[str, float] | None = None,
) -> Difference: ...


@overload
def assert_replica_invariant(
    build: Callable[[], Training],
    dataset: Any,
    *,
    replicas: int | Sequence[int] = 2,
    strategy: tf.distribute.Strategy | None = None,
    shares: Sequence[float] | None = None,
    tolerance: float | None = None,
    tolerances: Mapping[str, float] | None = None,
    predict: bool = True,
    **options: Any,
) -> Difference: ...


def assert_replica_invariant(
    build: Function,
    dataset: Any = None,
    *,
    replicas: int | Sequence[int] = 2,
    strategy: tf.distribute.Strategy | None = None,
    shares: Sequence[float] | None = None,
    tolerance: float | None = None,
    tolerances: Mapping[str, float] | None = None,
    predict: bool = True,
    **options: Any,
) -> Difference:
    """Asserts that training on several replicas equals training on one device.

    With a dataset it trains twice on the same global batches: on one device with a plain loop of
    Keras and TensorFlow, and on replicas with ``make_train_step``. Compares the loss, the gradient
    norm and all variables after every step, and at the end metrics, evaluation and predictions.

    Without a dataset it tests a loop of your own, or of another library: it calls
    ``train(strategy)`` for one device and for the replicas, and compares what that returns.

    Args:
        build: Makes a ``Training``. Called once for each side, inside the scope of the strategy and
            after ``keras.utils.set_random_seed(0)``. Without a dataset: ``train(strategy)``, which
            makes model and data, trains, and returns arrays or variables, alone or in dicts and
            lists. Called outside the scope, after ``keras.utils.set_random_seed(0)``.
        dataset: Global batches: a ``tf.data.Dataset``, or a list of ``(x, y)`` or ``(x, y,
            sample_weight)``. None for a function that takes the strategy.
        replicas: Number of replicas, on the GPUs or logical CPUs of this process (see
            ``virtual_devices``); or several numbers.
        strategy: The strategy, in place of ``replicas``; also one of several workers.
        shares: Relative share of each global batch per replica.
        tolerance: Largest difference: absolute for values below one, relative above. None is 1e-6,
            or 0 with ``logical_replicas``.
        tolerances: Larger ones for quantities whose name contains a text: ``{"Adam": 1e-5}``.
        predict: Whether to compare evaluation and predictions too.
        options: For ``make_train_step``: ``micro_batches``, ``jit_compile``, ``loss_scale``. With
            ``logical_replicas`` one device computes these too, and all bits must be equal, but
            for predictions.

    Returns:
        The largest difference of all.

    Raises:
        ReplicaInvarianceError: A difference is above its tolerance. This ``AssertionError`` names
            the variable, the step and the difference.
        TfMultiGpuError: ``build`` does not return a ``Training``, or there is no data; or ``train``
            returns what cannot be compared.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> def build():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     return tmg.testing.Training(model, keras.optimizers.SGD(0.1), "mse")
        >>> rows = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")
        >>> batches = [(rows[:4, :3], rows[:4, 3:]), (rows[4:, :3], rows[4:, 3:])]
        >>> tmg.testing.virtual_devices(2)
        ('CPU:0', 'CPU:1')
        >>> tmg.testing.assert_replica_invariant(build, batches, replicas=2).amount < 1e-6
        True
        >>> def train(strategy):
        ...     with strategy.scope():
        ...         model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...         step = tmg.make_train_step(model, keras.optimizers.SGD(0.1), "mse")
        ...     return [step(batch)["loss"] for batch in batches], model.get_weights()
        >>> tmg.testing.assert_replica_invariant(train, replicas=2).amount < 1e-6
        True
    """
    counts = [check_count("replicas", count) for count in np.atleast_1d(replicas)]
    is_exact = options.get("logical_replicas") is not None
    if tolerance is None:
        tolerance = 0.0 if is_exact else _TOLERANCE
    if not counts or not tolerance >= 0:
        raise ValueError(f"Received: replicas={brief(replicas)}, tolerance={brief(tolerance)}.")

    def allowed(quantity: str) -> float:
        limits = [limit for text, limit in (tolerances or {}).items() if text in quantity]
        if is_exact and quantity.startswith(_PREDICTION):  # Of a batch of another size.
            limits.append(_TOLERANCE)
        return max(limits, default=tolerance)

    def strategies() -> Iterator[tf.distribute.Strategy]:
        if strategy is not None:
            yield strategy
            return
        for count in counts:
            yield create_strategy(devices=count, fallback=False)

    if dataset is None:
        _refuse_options({"shares": shares, "predict": None if predict else False, **options})
        return functions.hold(build, strategies(), allowed)
    check_callable("build", build, write=f"def build(): {_TRAINING}.")
    batches = _batches_of(dataset)
    predicted = batches if predict else []
    if is_exact:
        alone = create_strategy(devices=1, fallback=False)
        with alone.scope():
            training = _build(build)
        ours = _train_on_replicas(training, batches, predicted, alone, None, options)
        expected = list(ours)
    else:
        expected = list(_train_on_one_device(_build(build), batches, predicted))
    largest = Difference("nothing", 0, 0.0)
    for each in strategies():
        with each.scope():
            training = _build(build)
        actual = _train_on_replicas(training, batches, predicted, each, shares, options)
        for number, (here, there) in enumerate(zip(expected, actual, strict=True)):
            step = min(number, len(batches))
            found = []
            # By order, because Keras numbers the names of layers across the process.
            for (name, value), (_, other) in zip(here, there, strict=True):
                found.append(difference(value, other, name, step))
            wrong = functions.above(allowed, found)
            if wrong:
                raise tell(f"{differs(each)}\nFirst differences, after step {step}:", wrong)
            largest = max([largest, *found], key=lambda this: this.amount)
    return largest


def _refuse_options(alone: Mapping[str, object]) -> None:
    """Raises if a function that trains by itself is given what a step takes."""
    for name, value in alone.items():
        if value is not None:
            raise TypeError(
                "A function that takes the strategy trains and predicts by itself. Received: "
                f"{name}={brief(value)}. Leave {name} out, and write it inside the function."
            )


def _batches_of(dataset: Any) -> list[Shard]:
    """Returns the global batches as tensors."""
    batches = [] if isinstance(dataset, tuple) else list(dataset)
    if not batches:
        raise TfMultiGpuError(
            "dataset must yield global batches.",
            f"{type(dataset).__name__} of {len(batches)} batches",
            "Give a list of batches [(x, y), (x, y)], or tf.data.Dataset.from_tensor_slices((x, "
            "y)).batch(n).",
        )

    def as_tensor(leaf: Shard) -> Shard:
        return leaf if leaf is None or tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)

    return tf.nest.map_structure(as_tensor, batches)  # type: ignore[no-any-return]


def _build(build: Callable[[], object]) -> Training:
    keras.utils.set_random_seed(0)
    training = build if isinstance(build, keras.Model) else build()  # Which it would call.
    if not isinstance(training, Training):
        raise TfMultiGpuError(
            "build must return a Training.",
            type(training).__name__,
            f"Write def build(): {_TRAINING}.",
        )
    check_backend(training.model, training.optimizer, training.loss)
    return training


def _values_before(training: Training) -> Quantities:
    """Returns the values before training, of a model that has them."""
    return training.values() if training.model.built else []


def _train_on_one_device(
    training: Training, batches: list[Shard], predicted: list[Shard]
) -> Iterator[Quantities]:
    """Yields the values before training, after each step, and at the end."""
    loop = OneDevice(training)
    yield _values_before(training)
    loop.build(batches[0])
    for batch in batches:
        logs = loop.step(batch)
        shown = [(name, value.numpy()) for name, value in logs.items()]
        yield [*shown, *training.values()]
    yield _ends(training, predicted, loop.evaluate, loop.predict)


def _train_on_replicas(
    training: Training,
    batches: list[Shard],
    predicted: list[Shard],
    strategy: tf.distribute.Strategy,
    shares: Sequence[float] | None,
    options: Options,
) -> Iterator[Quantities]:
    """Yields the same on replicas."""
    model, forward = training.model, training.forward
    objective = None
    yield _values_before(training)
    if forward is None:
        objective = Objective(training.loss, training.loss_weights, training.weighted_metrics)
    step = make_train_step(
        model,
        training.optimizer,
        objective,
        strategy,
        metrics=training.metrics,
        forward=forward,
        clip_norm=training.clip_norm,
        **options,
    )
    for batch in distribute_dataset(lambda: iter(batches), strategy, shares=shares):
        logs = step(batch)
        shown = [(name, logs[name].numpy()) for name in ("loss", "gradient_norm")]
        yield [*shown, *training.values()]
    # Without verification, because the caller compares.
    dealt = options.get("logical_replicas")
    evaluate = make_eval_step(
        model, objective, strategy, forward=forward, verify=False, logical_replicas=dealt
    )
    predictor = make_predict_step(model, strategy, verify=False)
    yield _ends(training, predicted, lambda batch: evaluate(batch)["loss"], predictor)


def _ends(
    training: Training,
    batches: list[Shard],
    evaluate: Callable[[Shard], Scalar],
    predict: Callable[[Shard], Shard],
) -> Quantities:
    """Returns results of metrics, losses and, if the model itself takes batches, predictions."""
    metrics = tf.nest.flatten([training.metrics, training.weighted_metrics])
    ends = []
    for metric in metrics:
        if metric is not None:
            result = np.asarray(tf.convert_to_tensor(metric.result()))
            ends.append((f"{metric.name}.result()", result))
    for i, batch in enumerate(batches):
        ends.append((f"evaluated loss of batch {i}", evaluate(batch).numpy()))
        outputs = () if training.forward else predict(batch)
        for part in tf.nest.flatten(outputs, expand_composites=True):
            ends.append((f"{_PREDICTION} of batch {i}", part.numpy()))
    return ends
