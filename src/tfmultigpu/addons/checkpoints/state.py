"""The variables of a run as named arrays: read, compared, and written back."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.accumulation.loss_scale import kept_loss_scale, make_loss_scale
from tfmultigpu.accumulation.update import choose_update, update_of
from tfmultigpu.addons.checkpoints.files import Arrays, Stored
from tfmultigpu.errors import CheckpointError
from tfmultigpu.steps.agreement import check_values_alike
from tfmultigpu.steps.build_model import prepare_model
from tfmultigpu.steps.chain import ChainedStep
from tfmultigpu.steps.step import Trained, TrainStep
from tfmultigpu.strategies.scopes import all_layers, check_kinds
from tfmultigpu.strategies.topology import is_mirrored, strategy_of
from tfmultigpu.strategies.worker_exchange import WorkerExchange, digest_of

_SCALE = "loss_scale/scale"
_SEEDS = "seeds"

# The description of each stored variable by name, in JSON types: its dtype, and how the values of
# the replicas make one value; None if it is stored once, else its array has an axis of replicas.
Entries = Mapping[str, Sequence[Any]]


class StateVariable(NamedTuple):
    """A variable of TensorFlow, named by group, number in the group and path."""

    name: str
    variable: Any
    may_differ: bool = False  # Between replicas.


class RunVariables:
    """The variables of models, optimizers, seeds and extra objects; all workers call alike."""

    def __init__(self, model: Any, optimizer: Any, train_step: Any, extra: Any) -> None:
        """Checks the arguments of ``Checkpoints``."""
        objects, self._updates_per_step = dict(extra or {}), 1
        self._steps: dict[str, TrainStep] = {}
        if isinstance(train_step, ChainedStep):
            self._updates_per_step = train_step.times[0]
            (_, train_step), *others = train_step.steps.items()
            objects = dict(others) | objects
        if train_step is not None:
            if (model, optimizer) != (None, None) or not isinstance(train_step, TrainStep):
                raise TypeError(
                    "train_step must come from tmg.make_train_step or tmg.chain_steps, in place of "
                    f"model and optimizer. Received: model={model!r}, optimizer={optimizer!r} and "
                    f"train_step={train_step!r}. Write tmg.Checkpoints(directory, train_step=step)."
                )
            self._steps[""], model, optimizer = train_step, train_step.model, train_step.optimizer
        strategy = strategy_of(model) if hasattr(model, "variables") else None
        optimizers = () if optimizer is None else (optimizer,)
        check_kinds(model, strategy or tf.distribute.get_strategy(), *optimizers)
        steps = {name: step for name, step in objects.items() if isinstance(step, TrainStep)}
        self._steps |= {f"extra/{name}/": step for name, step in steps.items()}
        self._extra = {name: owner for name, owner in objects.items() if name not in steps}
        self._model, self._optimizer = model, optimizer
        self.exchange = WorkerExchange(strategy)
        _extra_variables(self._extra)

    def count_updates(self) -> int:
        """Returns the steps that the optimizer of the first model has counted."""
        if self._optimizer is None:
            return 0
        return int(self._optimizer.iterations.numpy()) // self._updates_per_step

    @property
    def _trained(self) -> dict[str, Trained]:
        """Each trained model with its optimizer, by the begin of the names of variables."""
        first = Trained(self._model, self._optimizer, self._model.trainable_variables)
        return {"": first, **{prefix: step.trained[0] for prefix, step in self._steps.items()}}

    def all(self) -> list[StateVariable]:
        """Returns all variables that exist."""
        seeds = _compat.global_seeds()
        variables = [] if seeds is None else [StateVariable(_SEEDS, seeds.state.value)]
        variables += _extra_variables(self._extra)
        for prefix, (model, optimizer, _) in self._trained.items():
            trained = _trained_variables(model, optimizer)
            variables += [variable._replace(name=prefix + variable.name) for variable in trained]
        return variables

    def read(self) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        """Returns the entries and arrays of all variables."""
        return read_state(self.all(), self.exchange)

    def prepare_to_save(self, data: Any) -> None:
        """Builds what is not built; checks that all is saved, and the same on all workers."""
        self._build_model(data)
        self._build_optimizers()
        self.check_holds(self._states_beside_models)
        for model, optimizer, _ in self._trained.values():
            check_values_alike(self.exchange.strategy, model, optimizer)

    @functools.cached_property
    def _states_beside_models(self) -> list[Any]:
        """States that the steps change and no model of them has; tracing takes a moment."""
        return [state for step in self._steps.values() for state in step.states_beside_model()]

    def restore(self, stored: Stored, data: Any) -> None:
        """Restores a checkpoint; optimizers that are not built yet are built as a step would."""
        import keras

        self._build_model(data)
        entries, strategy = dict(stored.run["variables"]), self.exchange.strategy
        for prefix, (_, optimizer, _) in self._trained.items():
            if optimizer is not None and prefix + _SCALE in entries:
                make_loss_scale("dynamic", optimizer, strategy)
        self._build_optimizers(stored.run["owned"])
        write_state(self.all(), entries, stored.arrays, self.exchange, stored.path)
        if _SEEDS in entries and _compat.global_seeds() is None:  # Keras makes it when it draws.
            with strategy.scope():
                seeds = keras.random.SeedGenerator(0)
            seeds.state.assign(stored.arrays[_SEEDS])
            _compat.set_global_seeds(seeds)

    def owned(self) -> list[str]:
        """Returns the begins of names whose optimizer has owners, for a run that goes on."""
        optimizers = {prefix: part.optimizer for prefix, part in self._trained.items()}
        updates = {prefix: o and update_of(o) for prefix, o in optimizers.items()}
        return [prefix for prefix, update in updates.items() if update and update.owned]

    def _build_optimizers(self, owned: Sequence[str] = ()) -> None:
        strategy = self.exchange.strategy
        for prefix, (_, optimizer, variables) in self._trained.items():
            if optimizer is not None and not optimizer.built:
                asked = getattr(self._steps.get(prefix), "asked_shard_update", "auto")
                again = asked == "auto" and prefix in owned and is_mirrored(strategy)
                choose_update(optimizer, variables, strategy, True if again else asked)

    def check_holds(self, changed: Iterable[Any]) -> None:
        """Checks that all variables that a training changes are among those saved."""
        saved = {id(variable.variable) for variable in self.all()}
        missing = [v for v in changed if id(_of_tensorflow(v)) not in saved]
        if missing:
            raise CheckpointError(
                "The training changes variables that the checkpoint would not hold, so a resumed "
                "run would go another way. Received: "
                f"{_some([getattr(v, 'path', v.name) for v in missing])}. Write "
                "tmg.Checkpoints(directory, model, model.optimizer); for several models or "
                "optimizers, tmg.Checkpoints(directory, train_step=step) with the step given to "
                "fit. Make a SeedGenerator or a metric that forward uses an attribute of a model "
                "that a step trains: model.seeds = keras.random.SeedGenerator(1); or give "
                'extra={"seeds": [seeds.state]}.'
            )

    def _build_model(self, data: Any) -> None:
        if self._model.built:
            return
        if data is None:
            raise CheckpointError(
                "The model has no variables yet, so it can be neither saved nor restored. "
                f"Received: model {self._model.name!r}. Build it inside the scope: with "
                "strategy.scope(): model.build(input_shape)."
            )
        prepare_model(self._model, self.exchange.strategy, data.element_spec)


def _of_tensorflow(variable: Any) -> Any:
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)


def numbered(group: str, variables: Iterable[Any], may_differ: bool = False) -> list[StateVariable]:
    """Returns the variables of a group, named by number and path."""
    return [
        StateVariable(
            f"{group}/{i:04d}/{getattr(v, 'path', None) or v.name}", _of_tensorflow(v), may_differ
        )
        for i, v in enumerate(variables)
    ]


def _trained_variables(model: Any, optimizer: Any) -> list[StateVariable]:
    """Returns the variables of a model, its optimizer or None, and its loss scale."""
    trained = {id(_of_tensorflow(variable)) for variable in model.trainable_variables}
    state = [
        variable._replace(may_differ=id(variable.variable) not in trained)
        for variable in numbered("model", model.variables)
    ]
    tracked = {id(variable.variable) for variable in state}
    if optimizer is not None:
        state += numbered("optimizer", optimizer.variables)
        if (scale := kept_loss_scale(optimizer)) is not None:
            state.append(StateVariable(_SCALE, scale.scale))
            state.append(StateVariable("loss_scale/good_steps", scale.good_steps))
    return state + [
        StateVariable(f"attributes/{i:04d}/{path}", variable, True)
        for i, (path, variable) in enumerate(_plain_variables(model).items())
        if id(variable) not in tracked
    ]


def _plain_variables(model: Any) -> dict[str, tf.Variable]:
    """Returns the variables in attributes of layers, which Keras does not track, by path."""
    variables: dict[int, tuple[str, tf.Variable]] = {}

    def visit(path: str, value: Any) -> None:
        if _is_number(value):
            variables.setdefault(id(value), (path, value))
        elif isinstance(value, (Mapping, list, tuple)):
            for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
                visit(f"{path}.{key}", item)

    for layer in all_layers(model):
        # The user's names come before the private records in which TensorFlow repeats them.
        for attribute in sorted(vars(layer), key=lambda name: name.startswith("_")):
            visit(f"{layer.name}/{attribute}", vars(layer)[attribute])
    return dict(variables.values())


def _extra_variables(owners: Mapping[str, Any]) -> list[StateVariable]:
    """Returns the variables of objects, such as metrics, or of lists of variables, by name."""
    state: list[StateVariable] = []
    for name, owner in owners.items():
        variables = getattr(owner, "variables", owner)
        variables = variables if isinstance(variables, (list, tuple)) else [variables]
        if not all(_is_number(_of_tensorflow(variable)) for variable in variables):
            raise TypeError(
                f"Checkpoints save only variables of numbers. Received: extra={{{name!r}: "
                f'{owner!r}}}. Write extra={{"accuracy": metric}}, or give a list of variables.'
            )
        state += numbered(f"extra/{name}", variables, may_differ=True)
    return state


def _is_number(value: Any) -> bool:
    others = (tf.string, tf.resource, tf.variant)
    return isinstance(value, tf.Variable) and value.dtype not in others


def read_state(
    variables: Sequence[StateVariable], exchange: WorkerExchange
) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Returns the entries of variables by name, and their arrays; all workers must call it."""
    differing = _differing([variable for variable in variables if variable.may_differ], exchange)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    entries: dict[str, Any] = {}
    for name, variable, _ in variables:
        reduction = None
        if name in differing:
            is_float = variable.dtype.is_floating or variable.dtype.is_complex
            is_sum = variable.aggregation == tf.VariableAggregation.SUM
            reduction = "sum" if is_sum else "mean" if is_float else "first"
            copies = exchange.strategy.experimental_local_results(variable)
            rows = (_to_numpy(copy)[None] for copy in copies)
            arrays[name] = exchange.rows(rows.__next__)
        else:
            arrays[name] = _to_numpy(variable)
        entries[name] = [variable.dtype.name, reduction]
    return entries, arrays


def _differing(variables: Sequence[StateVariable], exchange: WorkerExchange) -> set[str]:
    """Returns the names of variables that differ, or may differ, between replicas."""
    if exchange.strategy.num_replicas_in_sync == 1 or not variables:
        return set()
    differ, digests = [], []
    for _, variable, _ in variables:
        local = exchange.strategy.experimental_local_results(variable)
        copies = [_to_numpy(copy).tobytes() for copy in local]
        on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
        differ.append(on_read or any(copy != copies[0] for copy in copies))
        digests.append(digest_of(copies[0]))
    flags, by_worker = np.split(exchange("the state to save", [*differ, *digests]), 2, axis=1)
    differing = flags.any(0) | (by_worker != by_worker[0]).any(0)
    return {variables[i].name for i in np.flatnonzero(differing).tolist()}


def write_state(
    variables: Iterable[StateVariable],
    entries: Entries,
    arrays: Arrays,
    exchange: WorkerExchange,
    where: Any = None,
) -> None:
    """Assigns stored arrays to their variables; with ``where`` they are, all must fit."""
    present = {_structural_name(variable.name): variable for variable in variables}
    if where is not None:
        _check_fits(present, entries, arrays, where)
    for name, (_, reduction) in entries.items():
        if (target := present.get(_structural_name(name))) is not None:
            if target.may_differ:
                _assign_copies(target.variable, arrays[name], reduction, exchange)
            else:
                target.variable.assign(_to_tensor(arrays[name], target.variable.dtype))


def _assign_copies(variable: Any, values: Any, reduction: Any, exchange: WorkerExchange) -> None:
    """Assigns the values of the replicas, or for another number what reduces to the same value."""
    replicas = exchange.strategy.num_replicas_in_sync
    if reduction is None:
        values = [values] * replicas
    elif len(values) != replicas and reduction == "sum":
        total = values.sum(0, dtype=values.dtype)
        values = [total] + [np.zeros_like(total)] * (replicas - 1)
    elif len(values) != replicas:
        mean = values.mean(0, dtype=np.result_type(values, "float64")).astype(values.dtype)
        values = [mean if reduction == "mean" else values[0]] * replicas
    copies = exchange.strategy.experimental_local_results(variable)
    for copy, own in zip(copies, values[exchange.worker * len(copies) :], strict=False):
        copy.assign(_to_tensor(own, copy.dtype))


def _check_fits(
    present: Mapping[str, StateVariable], entries: Entries, arrays: Arrays, where: Any
) -> None:
    """Checks that stored arrays belong to these variables: names, shapes and dtypes are equal."""
    stored = {_structural_name(name): name for name in entries}
    # Keras makes its seeds when it first draws: either run may have drawn before.
    only_stored = [stored[name] for name in stored.keys() - present.keys() - {_SEEDS}]
    only_here = [present[name].name for name in present.keys() - stored.keys() - {_SEEDS}]
    if only_stored or only_here:
        raise CheckpointError(
            "The checkpoint is of another model, optimizer or loss scale. Received: "
            f"{where}, which has {_some(only_stored)} that are not here, and lacks "
            f"{_some(only_here)}. Build the same ones as when it was saved, or give another "
            "directory to start over."
        )
    for structural, name in stored.items():
        if structural not in present:
            continue
        variable, (dtype, reduction) = present[structural].variable, entries[name]
        shape = arrays[name].shape[0 if reduction is None else 1 :]
        if (tuple(variable.shape), variable.dtype.name) != (shape, dtype):
            raise CheckpointError(
                f"A variable differs from the saved one. Received: {where}, in which {name} is "
                f"{dtype} of shape {shape}; here it is {variable.dtype.name} of shape "
                f"{tuple(variable.shape)}. Build the same model as when it was saved."
            )


def _structural_name(name: str) -> str:
    """Removes the numbers that Keras counts per process from a name, but not that of its group."""
    group, *rest = re.split(r"(?<=/\d{4})/", name, maxsplit=1)
    return "/".join([group, *(re.sub(r"_\d+(?=[_/:]|$)", "", part) for part in rest)])


def _some(names: Sequence[str]) -> str:
    return f"{len(names)} variables {sorted(names)[:3]}" if names else "none"


def _to_numpy(variable: Any) -> np.ndarray[Any, Any]:
    value = np.asarray(variable.numpy())
    # NumPy does not know bfloat16 and similar types; float32 holds their values exactly.
    return value if value.dtype.kind in "fiubc" else value.astype("float32")


def _to_tensor(value: np.ndarray[Any, Any], dtype: Any) -> Any:
    return tf.cast(tf.constant(value), dtype)
