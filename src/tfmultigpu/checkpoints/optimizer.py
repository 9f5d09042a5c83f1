"""Variables of a run put back, those of an optimizer that is not built when it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tfmultigpu.checkpoints import state
from tfmultigpu.optimizers.sharded import can_be_sharded
from tfmultigpu.optimizers.update import build_optimizer
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["restore_variables"]

_GROUP = "optimizer/"


def restore_variables(
    model: Any,
    optimizer: Any,
    extra: Mapping[str, Any],
    exchange: WorkerExchange,
    facts: list[dict[str, Any]],
    arrays: Mapping[str, np.ndarray[Any, Any]],
    where: Any,
) -> None:
    """Puts stored variables back, once it was checked that they fit.

    Where the update may be sharded, an optimizer that is not built stays so: whoever builds it
    decides where its state lives, and it gets it then.

    Args:
        model: A built model.
        optimizer: Its optimizer, or None.
        extra: Further objects with variables.
        exchange: The workers of the strategy.
        facts: What is known of each stored variable.
        arrays: The stored arrays.
        where: Where they come from.

    Raises:
        CheckpointError: They are those of another model or optimizer.
    """
    strategy = exchange.strategy
    state.make_loss_scale_of(facts, optimizer, strategy)
    variables = model.trainable_variables
    # Wrappers build what they wrap by themselves.
    wraps = hasattr(optimizer, "inner_optimizer")
    if optimizer is None or wraps or not can_be_sharded(optimizer, variables, strategy):
        if optimizer is not None and not optimizer.built:
            build_optimizer(optimizer, variables, strategy)
        slots = state.slots_of(model, optimizer, extra)
        state.check_fits(slots, facts, where)
        state.write_state(slots, arrays, facts, exchange)
        return
    slots = state.slots_of(model, optimizer, extra)
    # What it will have is known from another one like it.
    with strategy.scope():
        twin = type(optimizer).from_config(optimizer.get_config())
        twin.build(list(variables))
    state.check_fits(state.slots_of(model, twin, {}) | slots, facts, where)
    del twin
    there = len(optimizer.variables)  # Step count and learning rate.
    later = [
        fact
        for fact in facts
        if fact["name"].startswith(_GROUP) and int(fact["name"].split("/")[1]) >= there
    ]
    names = {fact["name"] for fact in later}
    state.write_state(slots, arrays, [f for f in facts if f["name"] not in names], exchange)
    kept = {name: arrays[name] for name in names}

    def write() -> None:
        state.write_state(state.slots_of(model, optimizer, {}), kept, later, exchange)

    _after_build(optimizer, write)


def _after_build(optimizer: Any, then: Any) -> None:
    """Has a function called once an optimizer is built."""

    def build(variables: Any) -> None:
        del optimizer.build  # What its class does is behind it.
        optimizer.build(variables)
        then()

    optimizer.build = build
