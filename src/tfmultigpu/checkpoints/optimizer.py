"""Restoring of variables, including those of an optimizer that is not built yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tfmultigpu.checkpoints import state
from tfmultigpu.optimizers.sharded import can_be_sharded
from tfmultigpu.optimizers.update import build_optimizer
from tfmultigpu.steps.train_step import Trained
from tfmultigpu.strategies.variable_sharding import is_sharded
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["restore_variables"]

_GROUP = "optimizer/"


def restore_variables(
    trained: Trained,
    extra: Mapping[str, Any],
    exchange: WorkerExchange,
    entries: list[dict[str, Any]],
    arrays: Mapping[str, np.ndarray[Any, Any]],
    path: Any,
) -> None:
    """Checks that the stored variables fit, and restores them.

    If the update may be sharded, an unbuilt optimizer stays unbuilt. The step that builds it
    decides where its slots live, and they are restored then.

    Args:
        trained: A built model, its optimizer or None, and the variables that it trains.
        extra: More objects with variables.
        exchange: The workers of the strategy.
        entries: The description of each stored variable.
        arrays: The stored arrays.
        path: The folder of the checkpoint.

    Raises:
        CheckpointError: The checkpoint is of another model or optimizer.
    """
    model, optimizer, variables = trained
    strategy = exchange.strategy
    state.make_loss_scale_of(entries, optimizer, strategy)
    # Wrappers build the optimizers inside them, and state beside sharded variables is not copied.
    at_once = hasattr(optimizer, "inner_optimizer") or any(map(is_sharded, variables))
    if optimizer is None or at_once or not can_be_sharded(optimizer, variables, strategy):
        if optimizer is not None and not optimizer.built:
            build_optimizer(optimizer, variables, strategy)
        present = state.state_variables(model, optimizer, extra)
        state.check_fits(present, entries, path)
        state.write_state(present, arrays, entries, exchange)
        return
    present = state.state_variables(model, optimizer, extra)
    # A copy of the optimizer shows which variables it will have.
    with strategy.scope():
        twin = type(optimizer).from_config(optimizer.get_config())
        twin.build(list(variables))
    state.check_fits(state.state_variables(model, twin, {}) | present, entries, path)
    del twin
    built = len(optimizer.variables)  # Step count and learning rate.
    later = [
        entry
        for entry in entries
        if entry["name"].startswith(_GROUP) and int(entry["name"].split("/")[1]) >= built
    ]
    names = {entry["name"] for entry in later}
    state.write_state(present, arrays, [f for f in entries if f["name"] not in names], exchange)
    waiting = {name: arrays[name] for name in names}

    def write() -> None:
        state.write_state(state.state_variables(model, optimizer, {}), waiting, later, exchange)

    _after_build(optimizer, write)


def _after_build(optimizer: Any, then: Any) -> None:
    """Calls a function once an optimizer is built."""

    def build(variables: Any) -> None:
        del optimizer.build  # Uncovers the method of the class.
        optimizer.build(variables)
        then()

    optimizer.build = build
