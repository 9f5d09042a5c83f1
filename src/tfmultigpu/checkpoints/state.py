"""State of a training run as named arrays: read from its variables and written back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.errors import CheckpointError
from tfmultigpu.optimizers.loss_scaling import kept_loss_scale, make_loss_scale
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.strategies.worker_exchange import WorkerExchange, digest_of

__all__ = [
    "StateVariable",
    "check_fits",
    "fits",
    "make_loss_scale_of",
    "read_state",
    "split_entries",
    "state_variables",
    "step_variables",
    "write_state",
]

_GLOBAL_SEEDS = "seeds"
_LOSS_SCALE = ("loss_scale/scale", "loss_scale/good_steps")


@dataclasses.dataclass(frozen=True)
class StateVariable:
    """One variable of the state.

    Attributes:
        name: Its name among the arrays: group, number in the group, path.
        variable: A Keras variable or a ``tf.Variable``.
        may_differ: Whether replicas may hold different values of it.
    """

    name: str
    variable: Any
    may_differ: bool = False


def state_variables(
    model: Any, optimizer: Any, extra: Mapping[str, Any]
) -> dict[str, StateVariable]:
    """Returns all variables of a run, by name.

    Args:
        model: A built model.
        optimizer: A built optimizer, or None.
        extra: More objects with variables, such as metrics, or lists of variables, by name.
    """
    trained = {id(variable) for variable in model.trainable_variables}
    found = [
        StateVariable(_name("model", i, one), one, id(one) not in trained)
        for i, one in enumerate(model.variables)
    ]
    if optimizer is not None:
        found += [
            StateVariable(_name("optimizer", i, v), v) for i, v in enumerate(optimizer.variables)
        ]
        scale = kept_loss_scale(optimizer)
        if scale is not None:
            found += [
                StateVariable(name, getattr(scale, name.split("/")[1])) for name in _LOSS_SCALE
            ]
    seeds = _compat.global_seeds()
    known = {id(_tf_variable(one.variable)) for one in found}
    found += [
        StateVariable(f"attributes/{i:04d}/{path}", variable, True)
        for i, (path, variable) in enumerate(_plain_variables(model))
        if id(variable) not in known
    ]
    if seeds is not None:
        found.append(StateVariable(_GLOBAL_SEEDS, seeds.state))
    for name, owner in extra.items():
        variables = getattr(owner, "variables", owner)
        variables = list(variables) if isinstance(variables, (list, tuple)) else [variables]
        found += [
            StateVariable(_name(f"extra/{name}", i, v), v, True) for i, v in enumerate(variables)
        ]
    return {one.name: one for one in found}


def step_variables(name: str, step: Any) -> dict[str, StateVariable]:
    """Returns the variables of an extra train step, by name."""
    found = state_variables(step.model, step.optimizer, {})
    found.pop(_GLOBAL_SEEDS, None)
    prefix = _prefix_of(name)
    return {prefix + key: dataclasses.replace(one, name=prefix + key) for key, one in found.items()}


def split_entries(
    entries: Sequence[Mapping[str, Any]],
    arrays: Mapping[str, np.ndarray[Any, Any]],
    name: str,
    path: Any,
) -> tuple[list[Any], list[Any], dict[str, np.ndarray[Any, Any]]]:
    """Splits what is stored of an extra train step off.

    Returns:
        The other descriptions; those of the step with the names of ``state_variables``; its arrays.

    Raises:
        CheckpointError: Nothing is stored under that name.
    """
    prefix = _prefix_of(name)
    own = [one for one in entries if one["name"].startswith(prefix)]
    if not own:
        stored = {one["name"].split("/")[1] for one in entries if one["name"].startswith("extra/")}
        raise CheckpointError(
            f"The checkpoint holds no train step of this name. Received: {name!r}, and {path} "
            f"with {sorted(stored)}. Give the steps the names that they had when it was saved, in "
            "chain_steps(..., names=) or extra=, or give another directory to start over."
        )
    others = [one for one in entries if not one["name"].startswith(prefix)]
    renamed = [{**one, "name": one["name"].removeprefix(prefix)} for one in own]
    values = {
        key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)
    }
    return others, renamed, values


def _prefix_of(name: str) -> str:
    return f"extra/{name}/"


def make_loss_scale_of(
    entries: Sequence[Mapping[str, Any]], optimizer: Any, strategy: tf.distribute.Strategy
) -> None:
    """Creates the dynamic loss scale of an optimizer if one is stored and none exists."""
    if optimizer is not None and any(entry["name"] in _LOSS_SCALE for entry in entries):
        make_loss_scale("dynamic", optimizer, strategy)


def read_state(
    variables: Mapping[str, StateVariable], exchange: WorkerExchange
) -> tuple[dict[str, np.ndarray[Any, Any]], list[dict[str, Any]]]:
    """Reads all variables; all workers must call it.

    Returns:
        The arrays by name, and a description of each in JSON types. If replicas hold different
        values of a variable, its array has a leading axis of replicas.
    """
    differing = _differing([one for one in variables.values() if one.may_differ], exchange)
    arrays, entries = {}, []
    for one in variables.values():
        variable = _tf_variable(one.variable)
        entry: dict[str, Any] = {"name": one.name, "dtype": tf.as_dtype(one.variable.dtype).name}
        if one.name in differing:
            value = _read_replicas(variable, exchange)
            entry |= {"replicas": len(value), "together": _reduction(variable)}
        else:
            value = _to_numpy(one.variable)
        arrays[one.name] = value
        entries.append(
            entry | {"shape": list(value.shape[1:] if "replicas" in entry else value.shape)}
        )
    return arrays, entries


def check_fits(
    variables: Mapping[str, StateVariable], entries: Sequence[Mapping[str, Any]], path: Any
) -> None:
    """Checks that stored arrays belong to these variables.

    Raises:
        CheckpointError: A variable is missing on either side, has another shape or dtype, or has
            changed places with another one.
    """
    stored = {_structural_name(entry["name"]): entry for entry in entries}
    present = {_structural_name(one.name): one for one in variables.values()}
    stored.pop(_GLOBAL_SEEDS, None)
    present.pop(_GLOBAL_SEEDS, None)
    only_stored = [stored[name]["name"] for name in stored if name not in present]
    only_here = [present[name].name for name in present if name not in stored]
    if only_stored or only_here:
        raise CheckpointError(
            "The checkpoint is of another model, optimizer or loss scale. Received: "
            f"{path}, which has {_some(only_stored)} that are not here, and lacks "
            f"{_some(only_here)}. Build the same ones as when it was saved, or give another "
            "directory to start over."
        )
    swapped = _find_swap((entry["name"], present[name].name) for name, entry in stored.items())
    if swapped is not None:
        raise CheckpointError(
            "Layers have changed places since the checkpoint, so the weights cannot be matched to "
            f"them. Received: {path}, in which {swapped[0]!r} is where {swapped[1]!r} is now. "
            "Create the layers in the same order as when it was saved, or give another directory "
            "to start over."
        )
    for name, entry in stored.items():
        variable = present[name].variable
        here = tuple(variable.shape), tf.as_dtype(variable.dtype).name
        there = tuple(entry["shape"]), entry["dtype"]
        if here != there:
            raise CheckpointError(
                f"A variable differs from the saved one. Received: {path}, in which "
                f"{entry['name']} is {there[1]} of shape {there[0]}; here it is {here[1]} of shape "
                f"{here[0]}. Build the same model as when it was saved."
            )


def fits(variables: Mapping[str, StateVariable], entries: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether names, shapes and dtypes of stored arrays equal those of the variables."""
    stored = {entry["name"]: (tuple(entry["shape"]), entry["dtype"]) for entry in entries}
    return stored == {
        one.name: (tuple(one.variable.shape), tf.as_dtype(one.variable.dtype).name)
        for one in variables.values()
    }


def write_state(
    variables: Mapping[str, StateVariable],
    arrays: Mapping[str, np.ndarray[Any, Any]],
    entries: Sequence[Mapping[str, Any]],
    exchange: WorkerExchange,
) -> None:
    """Assigns stored arrays to the variables; call ``check_fits`` first."""
    present = {_structural_name(one.name): one for one in variables.values()}
    for entry in entries:
        value = arrays[entry["name"]]
        one = present.get(_structural_name(entry["name"]))
        if one is None:
            _make_global_seeds(value, exchange.strategy)
        elif "replicas" in entry:
            _assign_replicas(_tf_variable(one.variable), value, entry["together"], exchange)
        elif one.may_differ:
            for copy in exchange.strategy.experimental_local_results(_tf_variable(one.variable)):
                copy.assign(_to_tensor(value, copy.dtype))
        else:
            one.variable.assign(_to_tensor(value, one.variable.dtype))


def _plain_variables(model: Any) -> list[tuple[str, Any]]:
    """Returns each ``tf.Variable`` of numbers in an attribute of a layer, and its path.

    Keras tracks only its own variables.
    """
    found: dict[int, tuple[str, Any]] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, tf.Variable):
            if value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool:
                found.setdefault(id(value), (path, value))
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
    return list(found.values())


def _name(group: str, number: int, variable: Any) -> str:
    path = getattr(variable, "path", None) or variable.name
    return f"{group}/{number:04d}/{path}"


def _find_swap(pairs: Iterable[tuple[str, str]]) -> tuple[str, str] | None:
    """Returns a name and the name now in its place, if names were swapped or rotated.

    Keras numbers names per process: ``dense`` may be ``dense_1`` now, and ``dense_1`` be
    ``dense_2``. Such a chain never leads back to an earlier name.
    """
    now: dict[str, str] = {}
    for before, after in pairs:
        for old, new in zip(before.split("/"), after.split("/"), strict=True):
            now.setdefault(old, new)
    for first, name in now.items():
        seen = {first}
        while name not in seen and name in now:
            seen.add(name)
            name = now[name]
        if name == first and len(seen) > 1:
            return first, now[first]
    return None


def _structural_name(name: str) -> str:
    """Removes the numbers that Keras counts per process from a name.

    The number in the group, which comes first, stays.
    """
    group, *rest = re.split(r"(?<=/\d{4})/", name, maxsplit=1)
    return "/".join([group, *(re.sub(r"_\d+(?=[_/:]|$)", "", part) for part in rest)])


def check_holds(variables: Mapping[str, StateVariable], changed: Sequence[Any]) -> None:
    """Checks that what a training changes is saved.

    Args:
        variables: The variables that are saved.
        changed: The variables that the training changes.

    Raises:
        CheckpointError: One of them is not saved.
    """
    known = {id(one.variable) for one in variables.values()}
    missing = {id(one): getattr(one, "path", one.name) for one in changed if id(one) not in known}
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


def _some(names: Sequence[str]) -> str:
    return f"{len(names)} variables {list(names[:3])}" if names else "none"


def _tf_variable(variable: Any) -> Any:
    return variable if isinstance(variable, tf.Variable) else variable.value


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
        variable = _tf_variable(one.variable)
        local = strategy.experimental_local_results(variable)
        copies = [_to_numpy(copy).tobytes() for copy in local]
        on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
        differ.append(on_read or any(copy != copies[0] for copy in copies))
        digests.append(digest_of(copies[0]))
    flags, by_worker = np.split(exchange([*differ, *digests]), 2, axis=1)
    differing = flags.any(0) | (by_worker != by_worker[0]).any(0)
    return {one.name for one, differs in zip(variables, differing, strict=True) if differs}


def _read_replicas(variable: Any, exchange: WorkerExchange) -> np.ndarray[Any, Any]:
    copies = iter(exchange.strategy.experimental_local_results(variable))
    return exchange.rows(lambda: _to_numpy(next(copies))[None])


def _assign_replicas(
    variable: Any, values: np.ndarray[Any, Any], reduction: str, exchange: WorkerExchange
) -> None:
    strategy = exchange.strategy
    replicas = strategy.num_replicas_in_sync
    if len(values) != replicas:
        values = _spread(values, reduction, replicas)
    copies = strategy.experimental_local_results(variable)
    first = exchange.worker * len(copies)
    for i, copy in enumerate(copies):
        copy.assign(_to_tensor(values[first + i], copy.dtype))


def _spread(values: np.ndarray[Any, Any], reduction: str, replicas: int) -> np.ndarray[Any, Any]:
    """Returns values for another number of replicas that reduce to the same value."""
    if reduction == "sum":
        total = values.sum(0, dtype=values.dtype)
        return np.stack([total] + [np.zeros_like(total)] * (replicas - 1))
    one = values[0]
    if reduction == "mean":
        one = values.mean(0, dtype=np.result_type(values, "float64")).astype(values.dtype)
    return np.stack([one] * replicas)


def _make_global_seeds(value: np.ndarray[Any, Any], strategy: tf.distribute.Strategy) -> None:
    """Creates Keras' global seed generator, which does not exist before the first draw."""
    import keras

    with strategy.scope():
        generator = keras.random.SeedGenerator(0)
    generator.state.assign(value)
    _compat.set_global_seeds(generator)
