"""All variables of a run: those of its models and optimizers, of seeds, and of extra objects."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfmultigpu.addons.checkpoints import state
from tfmultigpu.addons.checkpoints.files import Arrays, Stored
from tfmultigpu.errors import CheckpointError
from tfmultigpu.losses.build_model import prepare_model
from tfmultigpu.optimizers.loss_scaling import make_loss_scale
from tfmultigpu.optimizers.sharded import can_be_sharded
from tfmultigpu.optimizers.update import build_optimizer, when_built
from tfmultigpu.steps.chain import ChainedStep
from tfmultigpu.steps.train_step import Trained, TrainStep
from tfmultigpu.steps.value_agreement import check_values_alike
from tfmultigpu.strategies.variable_sharding import is_sharded
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["RunVariables", "first_and_others"]


def first_and_others(step: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the first train step of a chain, and the others by name; a train step is alone."""
    if not isinstance(step, ChainedStep):
        return step, {}
    (_, first), *others = step.steps.items()
    return first, dict(others)


class RunVariables:
    """The variables of a run; all workers must call every method alike."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        train_step: Any,
        extra: Mapping[str, Any],
        exchange: WorkerExchange,
    ) -> None:
        """Stores the models, optimizers and steps; see ``Checkpoints``."""
        self._updates_per_step = 1
        if isinstance(train_step, ChainedStep):
            self._updates_per_step = train_step.times[0]
            train_step, *_ = train_step.steps.values()
        steps = {f"extra/{n}/": step for n, step in extra.items() if isinstance(step, TrainStep)}
        self._steps = steps if train_step is None else {"": train_step, **steps}
        self._extra = {n: owner for n, owner in extra.items() if not isinstance(owner, TrainStep)}
        self._model, self._optimizer, self._exchange = model, optimizer, exchange
        # Entries and arrays of variables of optimizers that are not built yet, by name.
        self._waiting: dict[str, tuple[Any, np.ndarray[Any, Any]]] = {}

    def count_updates(self) -> int:
        """Returns the steps that the optimizer of the first model has counted."""
        if self._optimizer is None:
            return 0
        return int(self._optimizer.iterations.numpy()) // self._updates_per_step

    def trained(self) -> dict[str, Trained]:
        """Returns each trained model with its optimizer, by the begin of the names of variables."""
        trained = {prefix: step.trained[0] for prefix, step in self._steps.items()}
        variables = self._model.trainable_variables
        return {"": Trained(self._model, self._optimizer, variables), **trained}

    def all(self) -> list[state.StateVariable]:
        """Returns all variables that exist."""
        variables = [*state.seed_variables(), *state.extra_variables(self._extra)]
        for prefix, (model, optimizer, _) in self.trained().items():
            variables += state.trained_variables(model, optimizer, prefix)
        return variables

    def read(self) -> tuple[dict[str, Any], Arrays]:
        """Returns the entries and arrays of all variables, with those still to be built."""
        arrays, entries = state.read_state(self.all(), self._exchange)
        for name, (entry, array) in self._waiting.items():
            entries[name], arrays[name] = entry, array
        return entries, arrays

    def prepare_to_save(self, data: Any) -> None:
        """Builds what is not built; checks that all is saved, and the same on all workers."""
        self._build_model(data)
        for _, optimizer, variables in self.trained().values():
            if optimizer is not None and not optimizer.built:
                build_optimizer(optimizer, variables, self._exchange.strategy)
        self.check_restored()
        state.check_holds(self.all(), self._states_beside_models)
        for model, optimizer, _ in self.trained().values():
            check_values_alike(self._exchange.strategy, model, optimizer)

    @functools.cached_property
    def _states_beside_models(self) -> list[Any]:
        """States that the steps change and no model of them has; tracing takes a moment."""
        return [one for step in self._steps.values() for one in step.states_beside_model()]

    def restore(self, stored: Stored, data: Any) -> None:
        """Restores a checkpoint; optimizers that a step has yet to build, once it has."""
        self._build_model(data)
        entries, strategy = dict(stored.run["variables"]), self._exchange.strategy
        self._waiting = {}
        for prefix, (_, optimizer, variables) in self.trained().items():
            names = [name for name in entries if name.startswith(prefix)]
            if not names:
                steps = sorted({n.split("/")[1] for n in entries if n.startswith("extra/")})
                raise CheckpointError(
                    "The checkpoint holds no train step of this name. Received: "
                    f"{prefix.split('/')[1]!r}, and {stored.path} with {steps}. Give the steps the "
                    "names that they had when it was saved, in chain_steps(..., names=) or extra=."
                )
            if optimizer is not None and prefix + state.LOSS_SCALE[0] in entries:
                make_loss_scale("dynamic", optimizer, strategy)
            if optimizer is None or optimizer.built:
                continue
            # Wrappers build the optimizers inside them, and sharded variables have no copies.
            at_once = hasattr(optimizer, "inner_optimizer") or any(map(is_sharded, variables))
            if at_once or not can_be_sharded(optimizer, variables, strategy):
                build_optimizer(optimizer, variables, strategy)
                continue
            # The step that builds it decides where its slots live.
            group, built = f"{prefix}optimizer/", len(optimizer.variables)
            slots = [name for name in names if name.startswith(group)][built:]
            self._waiting |= {name: (entries.pop(name), stored.arrays[name]) for name in slots}
            when_built(optimizer, functools.partial(self._restore_slots, group, built, stored))
        self._write(self.all(), entries, stored)

    def _restore_slots(self, group: str, built: int, stored: Stored) -> None:
        names = [name for name in self._waiting if name.startswith(group)]
        slots = [one for one in self.all() if one.name.startswith(group)][built:]
        self._write(slots, {name: self._waiting.pop(name)[0] for name in names}, stored)

    def _write(self, variables: Any, entries: state.Entries, stored: Stored) -> None:
        state.check_fits(variables, entries, stored.arrays, stored.path)
        state.write_state(variables, entries, stored.arrays, self._exchange)

    def check_restored(self) -> None:
        """Checks that no optimizer was built without what is restored of it."""
        trained = self.trained().values()
        if self._waiting and all(getattr(one.optimizer, "built", True) for one in trained):
            raise CheckpointError(
                "The optimizer was built after restore() by other code than this library, so its "
                f"restored state is lost. Received: {len(self._waiting)} variables to restore. "
                "Call optimizer.build(model.trainable_variables) before checkpoints.restore()."
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
        prepare_model(self._model, self._exchange.strategy, data.element_spec)
