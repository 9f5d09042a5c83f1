"""What a row of the table is, how one device and replicas train it, and what must be equal.

One device trains by ``law.plain``: a loop of plain Keras and TensorFlow, which is the truth.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from law import model
from law.model import Training
from law.pair import assert_replicas_agree, step_of
from law.plain import PlainLoop, as_tensors
from one_device import SEED, strategy_of

import tfmultigpu as tmg
from tfmultigpu.strategies.topology import is_sharded

EXACT = 1e-6
EACH_ALONE = {"at_least": 0}  # For ``sharded``: each trained variable is on one device.
# Seven rows, one (fewer than any number of replicas), two, and sizes that nothing divides.
SIZES = (7, 1, 9, 2, 5)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A row of the table: one training, on one device and on replicas.

    Attributes:
        name: What it shows, in a few words.
        build: Makes what is trained; called for one device, and in the scope of each strategy.
            Cases with the same ``build`` and ``batches`` share what one device gives.
        batches: Global batches.
        options: For ``make_train_step``.
        replicas: The numbers of replicas.
        bound: The largest difference: absolute for values below one, relative above.
        reason: Why it is larger than ``EXACT``; without one it may not be.
        loss_bound: A smaller one for losses.
        told: A text in the ReplicaDependenceWarning of a program whose result replicas change.
        sharded: For ``sharded_variables``, if the model has some.
        within: A context that replicas train in.
    """

    name: str
    build: Callable[[], Training]
    batches: Sequence[Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    _: dataclasses.KW_ONLY
    replicas: tuple[int, ...] = (2,)
    bound: float = EXACT
    reason: str = ""
    loss_bound: float | None = None
    told: str | None = None
    sharded: Mapping[str, Any] | None = None
    within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def __post_init__(self) -> None:
        assert self.bound <= EXACT or self.reason, f"{self.name}: say why {self.bound:.0e}"

    def __str__(self) -> str:
        return self.name

    def allowed(self, name: str) -> float:
        """Returns the largest difference of a log or a variable. Logs are float32."""
        if " of step " not in name:
            return self.bound
        is_loss = name.startswith("loss") and self.loss_bound is not None
        return self.loss_bound if is_loss else max(self.bound, EXACT)

    def replace(self, **changes: Any) -> Case:
        """Returns this case with other values."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Result:
    """What training left behind.

    Attributes:
        start: Every variable that training may change, by name, before the first step; those of a
            model that its first batch builds are not there.
        logs: The logs of each step; of one device the loss and the norm of the gradient.
        end: Every variable after the last step.
    """

    start: dict[str, np.ndarray]
    logs: list[dict[str, float]]
    end: dict[str, np.ndarray]


def cut(*arrays: Any) -> list[Any]:
    """Batches ``(x, y, ...)`` of ``SIZES``; each array, or dict or tuple of arrays, is cut."""
    return model.cut(arrays, SIZES)


# With the batches, whose number must not become that of others.
_OF_ONE_DEVICE: dict[Any, tuple[Any, Result]] = {}


def on_one_device(case: Case) -> Result:
    """Trains by ``law.plain``: nothing in it is ours."""
    key = case.build, id(case.batches)
    if key not in _OF_ONE_DEVICE:
        keras.utils.set_random_seed(SEED)
        training = case.build()
        start = _values_of(training)
        if not training.model.built:
            first = case.batches[0]
            training.model(first[0] if isinstance(first, tuple) else first)
        logs = PlainLoop(training, case.batches[0]).train(case.batches)
        _OF_ONE_DEVICE[key] = case.batches, Result(start, logs, _values_of(training))
    return _OF_ONE_DEVICE[key][1]


def on_replicas(case: Case, strategy: tf.distribute.Strategy) -> Result:
    """Trains by our step."""
    with case.within():
        keras.utils.set_random_seed(SEED)
        with contextlib.ExitStack() as scopes:
            scopes.enter_context(strategy.scope())
            if case.sharded is not None:
                scopes.enter_context(tmg.sharded_variables(**case.sharded))
            training = case.build()
        if case.sharded == EACH_ALONE:
            assert all(map(is_sharded, training.model.trainable_variables)), case.name
        start = _values_of(training)
        step = step_of(training, strategy, **case.options)
        batches = [as_tensors(batch) for batch in case.batches]
        logs = []
        for shards in tmg.distribute_dataset(lambda: iter(batches), strategy):
            shown = step(shards)
            logs.append({name: float(value) for name, value in shown.items()})
        if case.options.get("shard_update") is True:
            assert step.update.owned or strategy.num_replicas_in_sync == 1, case.name
    if case.told is None:
        trained = [*training.model.trainable_variables, *training.optimizer.variables]
        assert_replicas_agree(strategy, trained)
    return Result(start, logs, _values_of(training))


def _values_of(training: Training) -> dict[str, np.ndarray]:
    return dict(zip(training.variables(), training.values(), strict=True))


def differences(result: Result, truth: Result) -> dict[str, float]:
    """Returns how far each log and variable is from that of one device, by name.

    Absolute for values below one, relative above. NaN is never equal.
    """
    apart = {}
    for number, (logs, expected) in enumerate(zip(result.logs, truth.logs, strict=True)):
        for name, value in expected.items():
            apart[f"{name} of step {number}"] = _apart(logs[name], value)
    # In order: Keras numbers the names of layers.
    for (name, value), other in zip(truth.end.items(), result.end.values(), strict=True):
        apart[name] = _apart(other, value)
    return apart


def _apart(value: Any, expected: Any) -> float:
    here, there = np.asarray(value, "float64"), np.asarray(expected, "float64")
    assert here.shape == there.shape, f"{here.shape} in place of {there.shape}"
    off = np.abs(here - there) / np.maximum(np.abs(there), 1.0)
    return float(np.max(off, initial=0.0))


def hold(case: Case) -> None:
    """Holds that each number of replicas gives what one device gives, or warns that it does not."""
    for replicas in case.replicas:
        if case.told is not None:
            _hold_told(case, strategy_of(replicas))
            continue
        apart = differences(on_replicas(case, strategy_of(replicas)), on_one_device(case))
        wrong = {name: off for name, off in apart.items() if not off <= case.allowed(name)}
        assert not wrong, f"{case.name}: {replicas} replicas differ from one device: {wrong}"


def _hold_told(case: Case, strategy: tf.distribute.Strategy) -> None:
    """Holds that a program is warned of, and that the difference is no rounding."""
    truth = on_one_device(case)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apart = differences(on_replicas(case, strategy), truth)
    said = [str(w.message) for w in caught if w.category is tmg.ReplicaDependenceWarning]
    assert said, f"{case.name}: no warning"
    assert case.told in "; ".join(said), f"{case.name}: {said}"
    moved = max(_apart(truth.start[name], value) for name, value in truth.end.items())
    assert max(apart.values()) > 1e-4 * moved, f"{case.name}: a false alarm: {said}"
