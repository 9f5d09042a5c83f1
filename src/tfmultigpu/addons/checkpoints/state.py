"""The variables of a run as named arrays: read, compared, and written back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.addons.checkpoints.files import Arrays
from tfmultigpu.errors import CheckpointError
from tfmultigpu.optimizers.loss_scaling import kept_loss_scale
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.strategies.worker_exchange import WorkerExchange, digest_of

__all__ = [
    "LOSS_SCALE",
    "Entries",
    "StateVariable",
    "check_fits",
    "check_holds",
    "extra_variables",
    "read_state",
    "seed_variables",
    "trained_variables",
    "write_state",
]

LOSS_SCALE = ("loss_scale/scale", "loss_scale/good_steps")
_GLOBAL_SEEDS = "seeds"

# The description of each stored variable by name, in JSON types: its dtype, and how the values of
# the replicas make one value; None if it is stored once, else its array has an axis of replicas.
Entries = Mapping[str, Sequence[Any]]


class StateVariable(NamedTuple):
    """One variable of the state.

    Attributes:
        name: Its name among the arrays: group, number in the group, path.
        variable: A Keras variable or a ``tf.Variable``.
        may_differ: Whether replicas may hold different values of it.
    """

    name: str
    variable: Any
    may_differ: bool = False

    @property
    def tf_variable(self) -> Any:
        """The variable of TensorFlow."""
        return self.variable if isinstance(self.variable, tf.Variable) else self.variable.value


def trained_variables(model: Any, optimizer: Any, prefix: str = "") -> list[StateVariable]:
    """Returns the variables of a model, its optimizer or None, and its loss scale."""
    trained = {id(variable) for variable in model.trainable_variables}
    state = [
        StateVariable(_name("model", i, variable), variable, id(variable) not in trained)
        for i, variable in enumerate(model.variables)
    ]
    tracked = {id(variable.tf_variable) for variable in state}
    if optimizer is not None:
        state += _numbered("optimizer", optimizer.variables, may_differ=False)
        scale = kept_loss_scale(optimizer)
        if scale is not None:
            values = (scale.scale, scale.good_steps)
            state += map(StateVariable, LOSS_SCALE, values)
    state += [
        StateVariable(f"attributes/{i:04d}/{path}", variable, True)
        for i, (path, variable) in enumerate(_plain_variables(model))
        if id(variable) not in tracked
    ]
    return [variable._replace(name=prefix + variable.name) for variable in state]


def extra_variables(owners: Mapping[str, Any]) -> list[StateVariable]:
    """Returns the variables of objects, such as metrics, or of lists of variables, by name."""
    state: list[StateVariable] = []
    for name, owner in owners.items():
        variables = getattr(owner, "variables", owner)
        variables = variables if isinstance(variables, (list, tuple)) else [variables]
        state += _numbered(f"extra/{name}", variables, may_differ=True)
    return state


def seed_variables() -> list[StateVariable]:
    """Returns the state of Keras' generator for draws without a seed, if there is one."""
    seeds = _compat.global_seeds()
    return [] if seeds is None else [StateVariable(_GLOBAL_SEEDS, seeds.state)]


def read_state(
    variables: Iterable[StateVariable], exchange: WorkerExchange
) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, list[Any]]]:
    """Returns the arrays of variables by name, and their entries; all workers must call it."""
    variables = list(variables)
    differing = _differing([one for one in variables if one.may_differ], exchange)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    entries: dict[str, list[Any]] = {}
    for one in variables:
        entries[one.name] = [tf.as_dtype(one.variable.dtype).name, None]
        if one.name in differing:
            entries[one.name][1] = _reduction(one.tf_variable)
            arrays[one.name] = _read_copies(one.tf_variable, exchange)
        else:
            arrays[one.name] = _to_numpy(one.variable)
    return arrays, entries


def check_fits(
    variables: Iterable[StateVariable], entries: Entries, arrays: Arrays, path: Any
) -> None:
    """Checks that stored arrays belong to these variables: names, shapes and dtypes are equal."""
    stored = {_structural_name(name): name for name in entries if name != _GLOBAL_SEEDS}
    present = {_structural_name(one.name): one for one in variables if one.name != _GLOBAL_SEEDS}
    only_stored = [stored[name] for name in stored.keys() - present.keys()]
    only_here = [present[name].name for name in present.keys() - stored.keys()]
    if only_stored or only_here:
        raise CheckpointError(
            "The checkpoint is of another model, optimizer or loss scale. Received: "
            f"{path}, which has {_some(only_stored)} that are not here, and lacks "
            f"{_some(only_here)}. Build the same ones as when it was saved, or give another "
            "directory to start over."
        )
    for structural, name in stored.items():
        variable, (dtype, reduction) = present[structural].variable, entries[name]
        shape = arrays[name].shape[0 if reduction is None else 1 :]
        here = tuple(variable.shape), tf.as_dtype(variable.dtype).name
        if here != (shape, dtype):
            raise CheckpointError(
                f"A variable differs from the saved one. Received: {path}, in which {name} is "
                f"{dtype} of shape {shape}; here it is {here[1]} of shape {here[0]}. Build the "
                "same model as when it was saved."
            )


def write_state(
    variables: Iterable[StateVariable], entries: Entries, arrays: Arrays, exchange: WorkerExchange
) -> None:
    """Assigns stored arrays to the variables that have them; call ``check_fits`` first."""
    present = {_structural_name(one.name): one for one in variables}
    for name, (_, reduction) in entries.items():
        one = present.get(_structural_name(name))
        if name == _GLOBAL_SEEDS and one is None:
            _make_global_seeds(arrays[name], exchange.strategy)
        elif one is not None and not one.may_differ:
            one.variable.assign(_to_tensor(arrays[name], one.variable.dtype))
        elif one is not None:
            _assign_copies(one.tf_variable, arrays[name], reduction, exchange)


def check_holds(variables: Iterable[StateVariable], changed: Sequence[Any]) -> None:
    """Checks that all variables that a training changes are among those saved."""
    saved = {id(one.variable) for one in variables}
    missing = {id(one): getattr(one, "path", one.name) for one in changed if id(one) not in saved}
    if missing:
        raise CheckpointError(
            "The training changes variables that the checkpoint would not hold, so a resumed "
            f"run would go another way. Received: {_some(list(missing.values()))}. Write "
            "tmg.Checkpoints(directory, model, model.optimizer); for several models or optimizers, "
            "tmg.Checkpoints(directory, train_step=step) with the step given to fit. Make a "
            "SeedGenerator or a metric that forward uses an attribute of a model that a step "
            "trains: model.seeds = "
            'keras.random.SeedGenerator(1); or give extra={"seeds": [seeds.state]}.'
        )


def _plain_variables(model: Any) -> list[tuple[str, Any]]:
    """Returns each ``tf.Variable`` of numbers in an attribute of a layer, and its path.

    Keras tracks only its own variables.
    """
    paths: dict[int, tuple[str, Any]] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, tf.Variable):
            if value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool:
                paths.setdefault(id(value), (path, value))
        elif isinstance(value, Mapping):
            for key, item in value.items():
                visit(f"{path}.{key}", item)
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                visit(f"{path}.{i}", item)

    for layer in all_layers(model):
        # The user's names come before the private records in which TensorFlow repeats them.
        for attribute in sorted(vars(layer), key=lambda name: name.startswith("_")):
            visit(f"{layer.name}/{attribute}", vars(layer)[attribute])
    return list(paths.values())


def _numbered(group: str, variables: Iterable[Any], may_differ: bool) -> list[StateVariable]:
    return [StateVariable(_name(group, i, one), one, may_differ) for i, one in enumerate(variables)]


def _name(group: str, number: int, variable: Any) -> str:
    return f"{group}/{number:04d}/{getattr(variable, 'path', None) or variable.name}"


def _structural_name(name: str) -> str:
    """Removes the numbers that Keras counts per process from a name.

    The number in the group, which comes first, stays.
    """
    group, *rest = re.split(r"(?<=/\d{4})/", name, maxsplit=1)
    return "/".join([group, *(re.sub(r"_\d+(?=[_/:]|$)", "", part) for part in rest)])


def _some(names: Sequence[str]) -> str:
    return f"{len(names)} variables {sorted(names)[:3]}" if names else "none"


def _to_numpy(variable: Any) -> np.ndarray[Any, Any]:
    value = np.asarray(variable.numpy())
    # NumPy does not know bfloat16 and similar types; float32 holds their values exactly.
    return value if value.dtype.kind in "fiubc" else value.astype("float32")


def _to_tensor(value: np.ndarray[Any, Any], dtype: Any) -> Any:
    return tf.cast(tf.constant(value), tf.as_dtype(dtype))


def _reduction(variable: Any) -> str:
    """Returns how the values of the replicas make one value."""
    if variable.aggregation == tf.VariableAggregation.SUM:
        return "sum"
    return "mean" if variable.dtype.is_floating or variable.dtype.is_complex else "first"


def _differing(variables: Sequence[StateVariable], exchange: WorkerExchange) -> set[str]:
    """Returns the names of variables that differ, or may differ, between replicas."""
    strategy = exchange.strategy
    if strategy.num_replicas_in_sync == 1 or not variables:
        return set()
    differ, digests = [], []
    for one in variables:
        local = strategy.experimental_local_results(one.tf_variable)
        copies = [_to_numpy(copy).tobytes() for copy in local]
        on_read = one.tf_variable.synchronization == tf.VariableSynchronization.ON_READ
        differ.append(on_read or any(copy != copies[0] for copy in copies))
        digests.append(digest_of(copies[0]))
    flags, by_worker = np.split(exchange([*differ, *digests]), 2, axis=1)
    differing = flags.any(0) | (by_worker != by_worker[0]).any(0)
    return {one.name for one, differs in zip(variables, differing, strict=True) if differs}


def _read_copies(variable: Any, exchange: WorkerExchange) -> np.ndarray[Any, Any]:
    copies = iter(exchange.strategy.experimental_local_results(variable))
    return exchange.rows(lambda: _to_numpy(next(copies))[None])


def _assign_copies(
    variable: Any, value: np.ndarray[Any, Any], reduction: str | None, exchange: WorkerExchange
) -> None:
    """Assigns the values of the replicas, or one value for all of them."""
    replicas = exchange.strategy.num_replicas_in_sync
    values: Sequence[Any] = [value] * replicas if reduction is None else list(value)
    if len(values) != replicas:
        values = _spread(value, reduction, replicas)
    copies = exchange.strategy.experimental_local_results(variable)
    first = exchange.worker * len(copies)
    for i, copy in enumerate(copies):
        copy.assign(_to_tensor(values[first + i], copy.dtype))


def _spread(values: np.ndarray[Any, Any], reduction: str | None, replicas: int) -> list[Any]:
    """Returns values for another number of replicas that reduce to the same value."""
    if reduction == "sum":
        total = values.sum(0, dtype=values.dtype)
        return [total] + [np.zeros_like(total)] * (replicas - 1)
    value = values[0]
    if reduction == "mean":
        value = values.mean(0, dtype=np.result_type(values, "float64")).astype(values.dtype)
    return [value] * replicas


def _make_global_seeds(value: np.ndarray[Any, Any], strategy: tf.distribute.Strategy) -> None:
    """Creates Keras' global seed generator, which does not exist before the first draw."""
    import keras

    with strategy.scope():
        generator = keras.random.SeedGenerator(0)
    generator.state.assign(value)
    _compat.set_global_seeds(generator)
