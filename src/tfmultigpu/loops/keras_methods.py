"""Training, evaluation and prediction by methods that a model replaces, on one replica.

Nothing is cut there, so ``train_step``, ``test_step`` and ``predict_step`` run as in Keras: each
gets a whole batch, and the logs are those that it returns for the last batch.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmultigpu.data.other_packages import read_tables
from tfmultigpu.errors import LossError
from tfmultigpu.loops.compiled import compile_arguments
from tfmultigpu.loops.epoch import Trainer
from tfmultigpu.loops.evaluator import Evaluator
from tfmultigpu.loops.inputs import is_arrays
from tfmultigpu.loops.own_methods import METHODS, own_methods, own_optimizers
from tfmultigpu.loops.step_cache import get_or_make
from tfmultigpu.loops.steps_per_call import StepsPerCallTuner
from tfmultigpu.losses.build_model import has_call, prepare_model
from tfmultigpu.losses.recording import changing_assignments
from tfmultigpu.steps.batch_function import BatchFunction, Shards
from tfmultigpu.steps.multi_step import TERMS, LastKey, MultiStep
from tfmultigpu.strategies.scopes import check_scope
from tfmultigpu.strategies.topology import local_replicas

__all__ = [
    "LastLogs",
    "MethodEvaluator",
    "MethodPredictor",
    "MethodStep",
    "MethodTrainer",
    "arrays_as_in_keras",
    "make_method_evaluator",
    "make_method_predictor",
    "make_method_trainer",
]

_LOG = "log "  # Before the names of the logs of the last step, and before their shapes.
_NO_SHAPE = "-"
_READS = frozenset(
    {
        "ReadVariableOp",
        "ResourceGather",
        "ResourceGatherNd",
        "VariableShape",
        "VarIsInitializedOp",
        "DisableCopyOnRead",
        "LookupTableFindV2",
        "LookupTableSizeV2",
        "LookupTableExportV2",
    }
)


class LastLogs(NamedTuple):
    """Logs of the last batch of an evaluation.

    Attributes:
        steps: Batches so far.
        logs: What ``MethodStep.totals`` returns, without ``"steps"``.
    """

    steps: int
    logs: Mapping[str, float]

    def plus(self, other: LastLogs) -> LastLogs:
        """Returns the logs after both; those of the other are later."""
        return LastLogs(self.steps + other.steps, other.logs)


class MethodStep:
    """A ``train_step`` or ``test_step`` of a model as a step of ``fit`` or ``evaluate``.

    Attributes:
        model: The model.
        strategy: Its strategy, of one replica.
    """

    def __init__(self, model: Any, method: str, strategy: tf.distribute.Strategy) -> None:
        """Takes the model, the name of the method and the strategy.

        Args:
            model: The model; a proxy of it does not keep it alive.
            method: ``"train_step"`` or ``"test_step"``.
            strategy: Its strategy, of one replica.
        """
        self.model = model
        self.strategy = strategy
        self._method = method
        self._arguments = compile_arguments(model)  # Kept alive: the step is cached by its id.
        run = functools.partial(_run_method, model, method, strategy)
        self._eager = bool(model.run_eagerly)
        if model.jit_compile and not self._eager:
            run = tf.function(run, jit_compile=True, autograph=False)
        self._run: Callable[[Any], Any] = run
        self._function = BatchFunction(self._compute, strategy, local_replicas(strategy))
        self._steps = MultiStep(self._function, wide=True)
        self._traced: Any = None
        self._noted: list[Any] = []

    def prepare(self, batch_spec: Any) -> None:
        """Traces the method, which builds the model, its metrics and its optimizers."""
        if not self.model.built and has_call(self.model):
            prepare_model(self.model, self.strategy, batch_spec)
        if not self._eager and self._traced is None:
            function: Any = tf.function(
                lambda batch: _named_logs(self._run(batch), self._name), autograph=False
            )
            with changing_assignments(self._note):
                self._traced = function.get_concrete_function(batch_spec)
        check_scope(self.model.variables, self.strategy, "model")

    def totals(self, iterator: Any, steps: int) -> dict[str, Any]:
        """Runs up to ``steps`` batches.

        Returns:
            ``"steps"``, how many ran; ``"rows"`` in them; and the logs of the last one, under
            a ``LastKey`` each.
        """
        if self._eager:
            return self._one_by_one(iterator, steps)
        logs, _, _ = self._steps(iterator, steps)
        last: dict[str, Any] = {n: value for n, value in logs.items() if isinstance(n, LastKey)}
        return {"steps": logs["steps"], "rows": logs["weight"], **last}

    def changed_variables(self) -> list[Any]:
        """Returns what the method assigns that is not part of model, metrics or ``optimizer``.

        That is a second optimizer, for example. In eager mode only optimizers are known.
        """
        optimizers = [
            variable
            for one in own_optimizers(self.model).values()
            if one is not self.model.optimizer
            for variable in one.variables
        ]
        if self._traced is None:
            return optimizers
        optimizer = self.model.optimizer
        own = [*self.model.variables, *self.model.metrics_variables]
        own += [] if optimizer is None else list(optimizer.variables)
        known = {id(handle) for one in own for handle in self._handles(one)}
        names: dict[int, Any] = {id(one.handle): one for one in self._traced.graph.variables}
        names |= {id(h): one for one in (*optimizers, *self._noted) for h in self._handles(one)}
        assigned = [id(handle) for handle in _assigned_handles(self._traced.graph)]
        found = [names.get(key, _Unsaved()) for key in assigned if key not in known]
        return list({id(one): one for one in found}.values())

    def _note(self, variable: Any, value: Any) -> Any:
        """Notes a Keras variable that is assigned: a graph knows only what is inside it."""
        if all(variable is not one for one in self._noted):
            self._noted.append(variable)
        return value

    def _handles(self, variable: Any) -> list[Any]:
        value = getattr(variable, "value", variable)
        return [one.handle for one in self.strategy.experimental_local_results(value)]

    @property
    def _name(self) -> str:
        return f"{self.model.__class__.__name__}.{self._method}"

    def _compute(self, shards: Shards) -> dict[str, Any]:
        logs: dict[str, Any] = _named_logs(self._run(shards.local[0]), self._name)
        rows = tf.cast(shards.global_rows, tf.float32)
        return {"loss": tf.zeros([]), "weight": rows, **logs, TERMS: tf.zeros([0])}

    def _one_by_one(self, iterator: Any, steps: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        rows, ran = 0, 0
        while ran < steps and (batch := next(iterator, None)) is not None:
            shards = self._function.shards(batch)
            found = _named_logs(self._run(shards.local[0]), self._name)
            rows, ran = rows + int(shards.global_rows), ran + 1
        return {"steps": ran, "rows": rows, **found}


class _Unsaved(NamedTuple):
    """A variable that a checkpoint would not hold, and of which nothing is known.

    Attributes:
        path: Words instead of its name.
        name: The same.
    """

    path: str = "a variable without a name"
    name: str = path


def _run_method(model: Any, method: str, strategy: tf.distribute.Strategy, batch: Any) -> Any:
    """Runs a method of a model on the one replica; also keeps Keras' place of the strategy."""
    result = strategy.run(getattr(model, method), args=(batch,))
    return tf.nest.map_structure(
        lambda one: one if one is None else strategy.experimental_local_results(one)[0], result
    )


def _named_logs(logs: Any, name: str) -> dict[str, Any]:
    """Returns the logs of a method as scalars under a ``LastKey`` each.

    Raises:
        LossError: They are not a dict of numbers.
    """
    if not isinstance(logs, Mapping):
        raise LossError(
            f"{name} must return a dict of values for the logs, as in Keras. Received: "
            f'{type(logs).__name__}. Write return {{"loss": loss}}.'
        )
    found: dict[str, Any] = {}  # In the order of the names.
    for key, value in _flat(logs):
        tensor = tf.convert_to_tensor(value)
        if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool):
            raise LossError(
                f"A value for the logs must be a number. Received: {tensor.dtype.name} for {key!r} "
                f"from {name}. Leave it out of the dict that {name} returns."
            )
        if tensor.shape.num_elements() is None:
            raise LossError(
                "A value for the logs must have a known shape. Received: shape "
                f"{tuple(tensor.shape) if tensor.shape.rank is not None else None} for {key!r} "
                f"from {name}. Return its mean: tf.reduce_mean(value)."
            )
        shape = "x".join(map(str, tensor.shape)) or _NO_SHAPE
        parts = tf.unstack(tf.reshape(tensor, [-1]))
        found |= {LastKey(f"{_LOG}{shape} {i} {key}"): part for i, part in enumerate(parts)}
    return found


def _flat(logs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the values of nested dicts in the order in which Keras puts them into one."""
    for key in sorted(logs):
        value = logs[key]
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield key, value


def _values(sums: Mapping[str, float]) -> dict[str, Any]:
    """Returns logs by the names that the method gave them."""
    parts: dict[str, tuple[str, dict[int, float]]] = {}
    for key, value in sums.items():
        if key.startswith(_LOG):
            shape, place, name = key[len(_LOG) :].split(" ", 2)
            parts.setdefault(name, (shape, {}))[1][int(place)] = float(value)
    return {name: _shaped(*parts[name]) for name in sorted(parts)}


def _shaped(shape: str, values: Mapping[int, float]) -> Any:
    if shape == _NO_SHAPE:
        return values[0]
    flat = np.asarray([values[place] for place in sorted(values)], "float32")
    array = np.reshape(flat, [int(one) for one in shape.split("x")])
    return array.item() if array.size == 1 else array


def _or_of_metrics(model: Any, logs: dict[str, Any]) -> dict[str, Any]:
    """Returns the results of the metrics if the logs have their names, as Keras does."""
    try:
        results = model.get_metrics_result()
    except ValueError:  # Compiled metrics that the method has never updated: Keras fails here.
        return logs
    if set(results) != set(logs):
        return logs
    return {name: _number(value) for name, value in _flat(results)}


def _number(value: Any) -> Any:
    array = np.asarray(value)
    return float(array.item()) if array.size == 1 else array


def _assigned_handles(graph: Any) -> list[Any]:
    """Returns the resources around a graph that its operations change."""
    found = []
    for outer, inner in graph.captures:
        if inner.dtype == tf.resource and any(_changes(one, inner) for one in inner.consumers()):
            found.append(outer)
    return found


def _changes(operation: Any, resource: Any) -> bool:
    if operation.type in _READS:
        return False
    if operation.type in ("Identity", "IdentityN"):
        return any(_changes(one, out) for out in operation.outputs for one in out.consumers())
    try:
        read_only = operation.get_attr("_read_only_resource_inputs")
    except ValueError:
        return True
    places = [i for i, one in enumerate(operation.inputs) if one is resource]
    return any(place not in read_only for place in places)


@dataclasses.dataclass(frozen=True)
class _ModelMetrics:
    """The metrics of a model, reset and read as Keras does.

    Attributes:
        model: The model, as a proxy.
    """

    model: Any

    def reset(self) -> None:
        """Resets all metrics."""
        self.model.reset_metrics()

    @property
    def variables(self) -> list[Any]:
        """The variables of all metrics."""
        found = {id(v): v for one in self.model.metrics for v in one.variables}
        return list(found.values())

    def results(self) -> dict[str, Any]:
        """Returns the result of each metric by its name."""
        return dict(self.model.get_metrics_result())


@dataclasses.dataclass(frozen=True)
class MethodTrainer(Trainer):
    """Training by the ``train_step`` of a model."""

    step: MethodStep  # type: ignore[assignment]

    def logs(self, sums: Mapping[str, float]) -> dict[str, Any]:
        """Returns what ``train_step`` returned for the last batch."""
        return _values(sums)

    def epoch_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Returns the results of the model's metrics if these have the names of the logs."""
        return _or_of_metrics(self.step.model, logs)


@dataclasses.dataclass(frozen=True)
class MethodEvaluator(Evaluator):
    """Evaluation by the ``test_step`` of a model."""

    step: MethodStep  # type: ignore[assignment]

    def _run(self, iterator: Any, steps: int) -> LastLogs:
        found = dict(self.step.totals(iterator, steps))
        return LastLogs(int(found.pop("steps")), {n: float(v) for n, v in found.items()})

    def _logs(self, totals: Any) -> dict[str, Any]:
        return _values(totals.logs)

    def _end_logs(self, totals: Any) -> dict[str, Any]:
        return _or_of_metrics(self.step.model, self._logs(totals))


@dataclasses.dataclass(frozen=True)
class MethodPredictor:
    """Prediction by the ``predict_step`` of a model.

    Attributes:
        function: The compiled function of a batch.
    """

    function: BatchFunction

    def __call__(self, batch: Any) -> Any:
        """Predicts one batch."""
        return self.function(batch)


def make_method_trainer(model: Any, strategy: tf.distribute.Strategy, spec: Any) -> MethodTrainer:
    """Returns the cached trainer by the ``train_step`` of a model.

    Args:
        model: A compiled model.
        strategy: Its strategy, of one replica.
        spec: The type specs of a batch.
    """

    def make(metrics: _ModelMetrics, step: MethodStep) -> MethodTrainer:
        return MethodTrainer(metrics, step, StepsPerCallTuner())

    trainer: MethodTrainer = _prepared(model, "train_step", strategy, spec, make)
    return trainer


def make_method_evaluator(
    model: Any, strategy: tf.distribute.Strategy, spec: Any
) -> MethodEvaluator:
    """Returns the cached evaluator by the ``test_step`` of a model; see ``make_method_trainer``."""
    evaluator: MethodEvaluator = _prepared(model, "test_step", strategy, spec, MethodEvaluator)
    return evaluator


def make_method_predictor(
    model: Any, strategy: tf.distribute.Strategy, spec: Any
) -> MethodPredictor:
    """Returns the cached predictor by the ``predict_step`` of a model."""

    def make() -> MethodPredictor:
        run = functools.partial(_run_method, weakref.proxy(model), "predict_step", strategy)
        function = BatchFunction(
            lambda shards: run(shards.local[0]), strategy, local_replicas(strategy)
        )
        return MethodPredictor(function)

    if not model.built and has_call(model):
        prepare_model(model, strategy, spec)
    predictor: MethodPredictor = get_or_make(
        model, "predict_step", _key(model, strategy, "predict_step"), make
    )
    return predictor


def _key(model: Any, strategy: tf.distribute.Strategy, method: str) -> Any:
    arguments = id(compile_arguments(model)) if getattr(model, "compiled", False) else None
    variables = tuple((id(one), one.trainable) for one in model.variables)
    how = model.run_eagerly, model.jit_compile, vars(model).get(method)
    return strategy, arguments, variables, how


def _prepared(
    model: Any,
    method: str,
    strategy: tf.distribute.Strategy,
    spec: Any,
    make: Callable[[_ModelMetrics, MethodStep], Any],
) -> Any:
    """Returns the cached result of a function, whose ``step`` is ready for batches."""
    proxy = weakref.proxy(model)
    made = get_or_make(
        model,
        method,
        _key(model, strategy, method),
        lambda: make(_ModelMetrics(proxy), MethodStep(proxy, method, strategy)),
    )
    made.step.prepare(spec)
    # Under the key that the model has now: the first trace has built it.
    return get_or_make(model, method, _key(model, strategy, method), lambda: made)


def arrays_as_in_keras(model: Any, data: Any) -> Any:
    """Returns arrays with floats in ``keras.config.floatx()``, as Keras gives them to its methods.

    Data of any other kind is returned as it is, and so is data for a model without methods of its
    own: our steps cast.
    """
    import keras

    if data is None or not own_methods(model, *METHODS) or not is_arrays(data):
        return data
    floatx = keras.config.floatx()

    def cast(one: Any) -> Any:
        if one is None or isinstance(one, (bool, int, float, str)):
            return one
        if tf.is_tensor(one):
            other = one.dtype.is_floating and one.dtype.name != floatx
            return tf.cast(one, floatx) if other else one
        if isinstance(one, types.GeneratorType):
            return one
        array = np.asarray(one)
        other = np.issubdtype(array.dtype, np.floating) and array.dtype.name != floatx
        return array.astype(floatx) if other else one

    return tf.nest.map_structure(cast, read_tables(data))
