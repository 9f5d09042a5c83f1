"""What a training run is made of, as named arrays: read from its variables and put back."""

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
from tfmultigpu.strategies.worker_exchange import WorkerExchange, digest_of

__all__ = [
    "StateVariable",
    "check_fits",
    "fits",
    "make_loss_scale_of",
    "read_state",
    "slots_of",
    "write_state",
]

_GLOBAL_SEEDS = "seeds"
_LOSS_SCALE = ("loss_scale/scale", "loss_scale/good_steps")


@dataclasses.dataclass(frozen=True)
class StateVariable:
    """One variable that belongs to the state.

    Attributes:
        name: Its name among the arrays: group, number in the group, path.
        variable: A Keras variable or a ``tf.Variable``.
        may_differ: Whether replicas may hold different values of it.
    """

    name: str
    variable: Any
    may_differ: bool = False


def slots_of(model: Any, optimizer: Any, extra: Mapping[str, Any]) -> dict[str, StateVariable]:
    """Returns all variables of a run, by name.

    Args:
        model: A built model.
        optimizer: A built optimizer, or None.
        extra: Further objects with variables, such as metrics, or lists of variables, by name.
    """
    trained = {id(variable) for variable in model.trainable_variables}
    slots = [
        StateVariable(_name("model", i, one), one, id(one) not in trained)
        for i, one in enumerate(model.variables)
    ]
    if optimizer is not None:
        slots += [
            StateVariable(_name("optimizer", i, v), v) for i, v in enumerate(optimizer.variables)
        ]
        scale = kept_loss_scale(optimizer)
        if scale is not None:
            slots += [
                StateVariable(name, getattr(scale, name.split("/")[1])) for name in _LOSS_SCALE
            ]
    seeds = _compat.global_seeds()
    if seeds is not None:
        slots.append(StateVariable(_GLOBAL_SEEDS, seeds.state))
    for name, owner in extra.items():
        variables = getattr(owner, "variables", owner)
        variables = list(variables) if isinstance(variables, (list, tuple)) else [variables]
        slots += [
            StateVariable(_name(f"extra/{name}", i, v), v, True) for i, v in enumerate(variables)
        ]
    return {slot.name: slot for slot in slots}


def make_loss_scale_of(
    facts: Sequence[Mapping[str, Any]], optimizer: Any, strategy: tf.distribute.Strategy
) -> None:
    """Makes the dynamic loss scale that was stored, where no step has made one for an optimizer."""
    if optimizer is not None and any(fact["name"] in _LOSS_SCALE for fact in facts):
        make_loss_scale("dynamic", optimizer, strategy)


def read_state(
    slots: Mapping[str, StateVariable], exchange: WorkerExchange
) -> tuple[dict[str, np.ndarray[Any, Any]], list[dict[str, Any]]]:
    """Reads all variables; every worker must call it where there are several.

    Returns:
        The arrays by name, and what JSON can say about each. Where replicas hold different values
        of a variable, its array has one more axis in front, with the value of each.
    """
    differing = _differing([slot for slot in slots.values() if slot.may_differ], exchange)
    arrays, facts = {}, []
    for slot in slots.values():
        variable = _tf_variable(slot.variable)
        fact: dict[str, Any] = {"name": slot.name, "dtype": tf.as_dtype(slot.variable.dtype).name}
        if slot.name in differing:
            value = _all_copies(variable, exchange)
            fact |= {"replicas": len(value), "together": _together(variable)}
        else:
            value = _to_numpy(slot.variable)
        arrays[slot.name] = value
        facts.append(fact | {"shape": list(value.shape[1:] if "replicas" in fact else value.shape)})
    return arrays, facts


def check_fits(
    slots: Mapping[str, StateVariable], facts: Sequence[Mapping[str, Any]], where: Any
) -> None:
    """Checks that stored arrays are those of these variables.

    Raises:
        CheckpointError: A variable is missing on either side, has another shape or dtype, or has
            changed places with another one.
    """
    stored = {_structural(fact["name"]): fact for fact in facts}
    present = {_structural(slot.name): slot for slot in slots.values()}
    stored.pop(_GLOBAL_SEEDS, None)
    present.pop(_GLOBAL_SEEDS, None)
    only_stored = [stored[name]["name"] for name in stored if name not in present]
    only_here = [present[name].name for name in present if name not in stored]
    if only_stored or only_here:
        raise CheckpointError(
            "The checkpoint is that of another model, optimizer or loss scale. Received: "
            f"{where}, which has {_some(only_stored)} that are not here, and lacks "
            f"{_some(only_here)}. Build the same ones as when it was saved, or give another "
            "directory to begin anew."
        )
    swapped = _changed_places((fact["name"], present[name].name) for name, fact in stored.items())
    if swapped is not None:
        raise CheckpointError(
            "Layers have changed places since they were saved, so it cannot be told which weights "
            f"belong to which. Received: {where}, in which {swapped[0]!r} is where "
            f"{swapped[1]!r} is now. Make the layers in the same order as when it was saved, or "
            "give another directory to begin anew."
        )
    for name, fact in stored.items():
        variable = present[name].variable
        here = tuple(variable.shape), tf.as_dtype(variable.dtype).name
        there = tuple(fact["shape"]), fact["dtype"]
        if here != there:
            raise CheckpointError(
                f"A variable differs from the one that was saved. Received: {where}, in which "
                f"{fact['name']} is {there[1]} of shape {there[0]}; here it is {here[1]} of shape "
                f"{here[0]}. Build the same model as when it was saved."
            )


def fits(slots: Mapping[str, StateVariable], facts: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether stored arrays are those of these variables, to the name."""
    there = {fact["name"]: (tuple(fact["shape"]), fact["dtype"]) for fact in facts}
    return there == {
        slot.name: (tuple(slot.variable.shape), tf.as_dtype(slot.variable.dtype).name)
        for slot in slots.values()
    }


def write_state(
    slots: Mapping[str, StateVariable],
    arrays: Mapping[str, np.ndarray[Any, Any]],
    facts: Sequence[Mapping[str, Any]],
    exchange: WorkerExchange,
) -> None:
    """Puts stored arrays, which fit, back into the variables."""
    present = {_structural(slot.name): slot for slot in slots.values()}
    for fact in facts:
        value = arrays[fact["name"]]
        slot = present.get(_structural(fact["name"]))
        if slot is None:
            _make_global_seeds(value, exchange.strategy)
        elif "replicas" in fact:
            _assign_copies(_tf_variable(slot.variable), value, fact["together"], exchange)
        elif slot.may_differ:
            for copy in exchange.strategy.experimental_local_results(_tf_variable(slot.variable)):
                copy.assign(_as(value, copy.dtype))
        else:
            slot.variable.assign(_as(value, slot.variable.dtype))


def _name(group: str, number: int, variable: Any) -> str:
    path = getattr(variable, "path", None) or variable.name
    return f"{group}/{number:04d}/{path}"


def _changed_places(pairs: Iterable[tuple[str, str]]) -> tuple[str, str] | None:
    """Returns a name and the one in its place now, where names were swapped or went around.

    Keras counts in a process: ``dense`` may be ``dense_1`` now, and ``dense_1`` be ``dense_2``,
    which leads back to no earlier name.
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


def _structural(name: str) -> str:
    """A name without the numbers Keras counts in a process, which depend on what was made before.

    The number in the group, which comes first, stays.
    """
    group, *rest = re.split(r"(?<=/\d{4})/", name, maxsplit=1)
    return "/".join([group, *(re.sub(r"_\d+(?=[_/:]|$)", "", part) for part in rest)])


def _some(names: Sequence[str]) -> str:
    return f"{len(names)} variables {list(names[:3])}" if names else "none"


def _tf_variable(variable: Any) -> Any:
    return variable if isinstance(variable, tf.Variable) else variable.value


def _to_numpy(variable: Any) -> np.ndarray[Any, Any]:
    value = np.asarray(variable.numpy())
    # Types that NumPy does not know are written as one it does, without loss.
    return value if value.dtype.kind in "fiubc" else value.astype("float32")


def _as(value: np.ndarray[Any, Any], dtype: Any) -> Any:
    return tf.cast(tf.constant(value), tf.as_dtype(dtype))


def _together(variable: Any) -> str:
    """What the values on replicas make together."""
    if variable.aggregation == tf.VariableAggregation.SUM:
        return "sum"
    return "mean" if variable.dtype.is_floating or variable.dtype.is_complex else "first"


def _differing(slots: Sequence[StateVariable], exchange: WorkerExchange) -> set[str]:
    """The names of variables whose values on replicas differ or would, on any worker."""
    strategy = exchange.strategy
    if strategy.num_replicas_in_sync == 1 or not slots:
        return set()
    differ, marks = [], []
    for slot in slots:
        variable = _tf_variable(slot.variable)
        copies = [_to_numpy(one) for one in strategy.experimental_local_results(variable)]
        on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
        differ.append(on_read or any(one.tobytes() != copies[0].tobytes() for one in copies))
        marks.append(digest_of(copies[0].tobytes()))
    told = exchange([*differ, *marks])
    apart = told[:, : len(slots)].any(0) | (told[:, len(slots) :] != told[:1, len(slots) :]).any(0)
    return {slot.name for slot, one in zip(slots, apart, strict=True) if one}


def _all_copies(variable: Any, exchange: WorkerExchange) -> np.ndarray[Any, Any]:
    local = exchange.strategy.experimental_local_results(variable)
    copies = [_to_numpy(one)[None] for one in local]
    if exchange.workers == 1:
        return np.concatenate(copies)
    turn = iter(copies)
    return exchange.rows(lambda: next(turn))


def _assign_copies(
    variable: Any, values: np.ndarray[Any, Any], together: str, exchange: WorkerExchange
) -> None:
    strategy = exchange.strategy
    replicas = strategy.num_replicas_in_sync
    if len(values) != replicas:
        values = _for_replicas(values, together, replicas)
    copies = strategy.experimental_local_results(variable)
    first = exchange.worker * len(copies)
    for i, copy in enumerate(copies):
        copy.assign(_as(values[first + i], copy.dtype))


def _for_replicas(
    values: np.ndarray[Any, Any], together: str, replicas: int
) -> np.ndarray[Any, Any]:
    """Values for another number of replicas that make the same together."""
    if together == "sum":
        total = values.sum(0, dtype=values.dtype)
        return np.stack([total] + [np.zeros_like(total)] * (replicas - 1))
    one = (
        values.mean(0, dtype=np.result_type(values, "float64")) if together == "mean" else values[0]
    )
    return np.stack([one.astype(values.dtype)] * replicas)


def _make_global_seeds(value: np.ndarray[Any, Any], strategy: tf.distribute.Strategy) -> None:
    """Makes what draws without a seed draw from, where nothing has drawn so far."""
    import keras

    with strategy.scope():
        generator = keras.random.SeedGenerator(0)
    generator.state.assign(value)
    _compat.set_global_seeds(generator)
