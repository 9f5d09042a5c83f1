"""The variables of a run as named arrays: read, compared, and written back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.accumulation.loss_scale import kept_loss_scale, make_loss_scale
from tfmultigpu.accumulation.update import choose_update, update_of
from tfmultigpu.addons.checkpoints.files import Arrays, Stored
from tfmultigpu.errors import CheckpointError
from tfmultigpu.steps.agreement import check_values_alike
from tfmultigpu.steps.build_model import is_built, prepare_model
from tfmultigpu.steps.chain import ChainedStep
from tfmultigpu.steps.step import Trained, TrainStep
from tfmultigpu.strategies.scopes import all_layers, check_kinds
from tfmultigpu.strategies.topology import is_mirrored, strategy_of
from tfmultigpu.strategies.worker_exchange import WorkerExchange, digest_of

_SCALE = "loss_scale/scale"
_SEEDS = "seeds"
_COUNTED = re.compile(r"_\d+(?=[_/:]|$)")

# The end of the name of an array that has the values of all replicas.
_EACH = " of each replica"


class StateVariable(NamedTuple):
    """A variable of TensorFlow, named by group, number in the group and path."""

    name: str
    variable: Any
    may_differ: bool = False  # Between replicas.


class RunVariables:
    """The variables of models, optimizers, seeds and extra objects; all workers call alike."""

    def __init__(self, model: Any, optimizer: Any, train_step: Any, extra: Any) -> None:
        """Checks the arguments of ``Checkpoints``."""
        self._steps: list[TrainStep] = []
        if train_step is not None:
            chained = isinstance(train_step, ChainedStep)
            self._steps = [*train_step.steps.values()] if chained else [train_step]
            if (model, optimizer) != (None, None) or not isinstance(self._steps[0], TrainStep):
                raise TypeError(
                    "train_step must come from tmg.make_train_step or tmg.chain_steps, in place of "
                    f"model and optimizer. Received: train_step={train_step!r} and model={model!r}."
                    " Write tmg.Checkpoints(directory, train_step=step)."
                )
            model, optimizer = self._steps[0].model, self._steps[0].optimizer
        strategy = strategy_of(model) if hasattr(model, "variables") else None
        optimizers = () if optimizer is None else (optimizer,)
        check_kinds(model, strategy or tf.distribute.get_strategy(), *optimizers)
        self._model, self._optimizer, self._extra = model, optimizer, dict(extra or {})
        self.exchange = WorkerExchange(strategy)
        self._states_beside_models: list[Any] | None = None
        _extra_variables(self._extra)

    def count_updates(self) -> int:
        """Returns the steps that the optimizer of the first model has counted."""
        return 0 if self._optimizer is None else int(self._optimizer.iterations.numpy())

    @property
    def _trained(self) -> dict[str, Trained]:
        """Each trained model with its optimizer, by the begin of the names of variables."""
        trained = [part for step in self._steps for part in step.trained]
        trained = trained or [
            Trained(self._model, self._optimizer, self._model.trainable_variables)
        ]
        return {f"{i}/" if i else "": part for i, part in enumerate(trained)}

    def all(self) -> list[StateVariable]:
        """Returns all variables that exist."""
        seeds = _compat.global_seeds()
        variables = [] if seeds is None else [StateVariable(_SEEDS, seeds.state.value)]
        variables += _extra_variables(self._extra)
        for prefix, (model, optimizer, _) in self._trained.items():
            trained = _trained_variables(model, optimizer)
            variables += [variable._replace(name=prefix + variable.name) for variable in trained]
        return variables

    def read(self) -> Arrays:
        """Returns the arrays of all variables by name."""
        return read_state(self.all(), self.exchange)

    def prepare_to_save(self, data: Any) -> None:
        """Builds what is not built; checks that all is saved, and the same on all workers."""
        self._build(data)
        if self._states_beside_models is None:  # Tracing takes a moment.
            self._states_beside_models = [s for o in self._steps for s in o.states_beside_model()]
        self.check_holds(self._states_beside_models)
        for model, optimizer, _ in self._trained.values():
            check_values_alike(self.exchange.strategy, model, optimizer)

    def restore(self, stored: Stored, data: Any) -> None:
        """Restores a checkpoint; optimizers that are not built yet are built as a step would."""
        strategy = self.exchange.strategy
        arrays = {n: array for n, array in stored.arrays.items() if not n.startswith("fit/")}
        for prefix, (_, optimizer, _) in self._trained.items():
            if optimizer is not None and prefix + _SCALE in arrays:
                make_loss_scale("dynamic", optimizer, strategy)
        self._build(data, stored.run["owned"])
        write_state(self.all(), arrays, self.exchange, stored.path)
        if _SEEDS in arrays and _compat.global_seeds() is None:  # Keras makes it when it draws.
            with strategy.scope():
                seeds = keras.random.SeedGenerator(0)
            seeds.state.assign(arrays[_SEEDS])
            _compat.set_global_seeds(seeds)

    def owned(self) -> list[bool]:
        """Returns whether the variables of each optimizer have owners, for a resumed run."""
        optimizers = [part.optimizer for part in self._trained.values()]
        return [bool((update := o and update_of(o)) and update.owned) for o in optimizers]

    def _build(self, data: Any, owned: Sequence[bool] = ()) -> None:
        strategy = self.exchange.strategy
        if not is_built(self._model):
            if data is None:
                raise CheckpointError(
                    "The model has no variables yet, so it can be neither saved nor restored. "
                    f"Received: model {self._model.name!r}. Build it inside the scope: with "
                    "strategy.scope(): model.build(input_shape)."
                )
            prepare_model(self._model, strategy, data.element_spec)
        for i, (_, optimizer, variables) in enumerate(self._trained.values()):
            if optimizer is not None and not optimizer.built:
                asked = self._steps[i].asked_shard_update if self._steps else "auto"
                again = asked == "auto" and any(owned[i : i + 1]) and is_mirrored(strategy)
                choose_update(optimizer, variables, strategy, True if again else asked)

    def check_holds(self, changed: Iterable[Any]) -> None:
        """Checks that all variables that a training changes are among those saved."""
        saved = {id(variable.variable) for variable in self.all()}
        missing = [v for v in changed if id(_of_tensorflow(v)) not in saved]
        if missing:
            names = sorted(_path(variable) for variable in missing)
            raise CheckpointError(
                "The training changes variables that the checkpoint would not hold. Received: "
                f"{len(names)} variables {names[:3]}. Write tmg.Checkpoints(directory, model, "
                "model.optimizer), or for several models train_step=step; of a SeedGenerator or a "
                'metric outside of the models, extra={"seeds": [seeds.state]}.'
            )


def _of_tensorflow(variable: Any) -> Any:
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)


def _path(variable: Any) -> str:
    # A variable of TensorFlow would add its values over the replicas, to find such an attribute.
    return str(variable.name if isinstance(variable, tf.Variable) else variable.path)


def numbered(group: str, variables: Iterable[Any], may_differ: bool = False) -> list[StateVariable]:
    """Returns the variables of a group, named by number and path.

    Paths are without the numbers that Keras counts per process.
    """
    paths = [(_path(variable), _of_tensorflow(variable)) for variable in variables]
    return [
        StateVariable(f"{group}/{i:04d}/{_COUNTED.sub('', path)}", v, may_differ)
        for i, (path, v) in enumerate(paths)
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
    # In attributes of layers, and in lists and dicts there; Keras does not track them.
    leaves = [leaf for layer in all_layers(model) for leaf in _leaves(vars(layer))]
    plain = {id(v): v for v in leaves if _is_number(v) and id(v) not in tracked}
    return state + numbered("attributes", plain.values(), may_differ=True)


def _leaves(value: Any) -> list[Any]:
    """Returns the items of lists and dicts, whose keys cannot be sorted."""
    items = list(value.values()) if isinstance(value, Mapping) else value
    nested = isinstance(items, (list, tuple))
    return [leaf for item in items for leaf in _leaves(item)] if nested else [items]


def _extra_variables(owners: Mapping[str, Any]) -> list[StateVariable]:
    """Returns the variables of objects, such as metrics, or of lists of variables, by name."""
    state: list[StateVariable] = []
    for name, owner in owners.items():
        variables = getattr(owner, "variables", owner)
        variables = variables if isinstance(variables, (list, tuple)) else [variables]
        if not all(_is_number(_of_tensorflow(variable)) for variable in variables):
            raise TypeError(
                f"Checkpoints save only variables of numbers. Received: extra={{{name!r}: "
                f'{owner!r}}}. Write extra={{"accuracy": metric}}, or give a list of variables; '
                "for several steps, train_step=tmg.chain_steps(first, second)."
            )
        state += numbered(f"extra/{name}", variables, may_differ=True)
    return state


def _is_number(value: Any) -> bool:
    others = (tf.string, tf.resource, tf.variant)
    return isinstance(value, tf.Variable) and value.dtype not in others


def read_state(variables: Sequence[StateVariable], exchange: WorkerExchange) -> Arrays:
    """Returns the arrays of variables by name; all workers must call it."""
    differing = _differing([variable for variable in variables if variable.may_differ], exchange)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, variable, _ in variables:
        if name in differing:
            copies = exchange.strategy.experimental_local_results(variable)
            rows = (_to_numpy(copy)[None] for copy in copies)
            arrays[name + _EACH] = exchange.rows(rows.__next__)
        else:
            arrays[name] = _to_numpy(variable)
    return arrays


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
    variables: Sequence[StateVariable], arrays: Arrays, exchange: WorkerExchange, where: Any = None
) -> None:
    """Assigns stored arrays to their variables; with ``where`` they are, all must fit."""
    if where is not None:
        _check_fits(variables, arrays, where)
    replicas = exchange.strategy.num_replicas_in_sync
    for name, variable, may_differ in variables:
        if name in arrays and not may_differ:
            variable.assign(_to_tensor(arrays[name], variable.dtype))
        elif name in arrays or name + _EACH in arrays:
            copies = arrays[name][None] if name in arrays else arrays[name + _EACH]
            copies = _for_replicas(variable, copies, replicas)
            local = exchange.strategy.experimental_local_results(variable)
            for copy, value in zip(local, copies[exchange.worker * len(local) :], strict=False):
                copy.assign(_to_tensor(value, copy.dtype))


def _for_replicas(variable: Any, copies: Any, replicas: int) -> Any:
    """Returns values of the replicas; for another number of them, of the same sum or mean."""
    copies = copies.view(variable.dtype.as_numpy_dtype)
    if len(copies) == replicas:
        return copies
    if len(copies) > 1 and variable.aggregation == tf.VariableAggregation.SUM:
        total = copies.sum(0, dtype=copies.dtype)
        return [total] + [np.zeros_like(total)] * (replicas - 1)
    if len(copies) > 1 and (variable.dtype.is_floating or variable.dtype.is_complex):
        mean = copies.mean(0, dtype=np.result_type(copies, "float64"))
        return [mean.astype(copies.dtype)] * replicas
    return [copies[0]] * replicas


def _check_fits(variables: Sequence[StateVariable], arrays: Arrays, where: Any) -> None:
    """Checks that stored arrays belong to these variables: names, shapes and dtypes are equal."""
    stored = {
        name.removesuffix(_EACH): f"{a.dtype} of shape {a.shape[name.endswith(_EACH) :]}"
        for name, a in arrays.items()
    }
    here = {name: f"{_stored_dtype(v.dtype)} of shape {tuple(v.shape)}" for name, v, _ in variables}
    # Keras makes its seeds when it first draws: either run may have drawn before.
    names = sorted({*stored, *here} - {_SEEDS})
    differing = [name for name in names if stored.get(name) != here.get(name)]
    if differing:
        told = [f"{n} is {stored.get(n)}, and here {here.get(n)}" for n in differing[:3]]
        raise CheckpointError(
            "The checkpoint is of another model, optimizer or loss scale. Received: "
            f"{where}; {len(differing)} variables differ: {'; '.join(told)}. Build the same ones "
            "as when it was saved, or give another directory to start over."
        )


def _stored_dtype(dtype: Any) -> Any:
    """Returns the dtype of arrays: NumPy files do not know bfloat16 and similar types."""
    own = np.dtype(dtype.as_numpy_dtype)
    return own if own.kind in "fiubc" else np.dtype(f"uint{8 * own.itemsize}")


def _to_numpy(variable: Any) -> np.ndarray[Any, Any]:
    return np.asarray(variable.numpy()).view(_stored_dtype(variable.dtype))


def _to_tensor(value: np.ndarray[Any, Any], dtype: Any) -> Any:
    return tf.constant(value.view(dtype.as_numpy_dtype))
