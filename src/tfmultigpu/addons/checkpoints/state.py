"""The variables of a run as named arrays: read, compared, and written back."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.accumulation.loss_scale import kept_loss_scales, make_loss_scale
from tfmultigpu.accumulation.update import choose_update, update_of
from tfmultigpu.addons.checkpoints.files import Arrays, Stored
from tfmultigpu.addons.checkpoints.tables import (
    PREFIX,
    Tables,
    check_holds_states,
    check_tables_fit,
    is_table,
    named_tables,
    read_tables,
    write_tables,
)
from tfmultigpu.arguments import brief
from tfmultigpu.data.sharded_dataset import ShardedDataset
from tfmultigpu.errors import CheckpointError
from tfmultigpu.steps.agreement import COUNTER, check_values_alike
from tfmultigpu.steps.build_model import prepare_model
from tfmultigpu.steps.chain import ChainedStep
from tfmultigpu.steps.other_states import OtherState
from tfmultigpu.steps.train import TrainStep
from tfmultigpu.strategies.row_parts import RowParts, copies_of
from tfmultigpu.strategies.scopes import all_layers, check_kinds
from tfmultigpu.strategies.topology import is_mirrored, is_on_read, strategy_of, tf_variable
from tfmultigpu.strategies.worker_exchange import WorkerExchange, digest_of
from tfmultigpu.types import Array, KerasModel, KerasOptimizer, KerasVariable, ShardUpdate, Tensor

Variables: TypeAlias = dict[str, tf.Variable]  # By group, number and path.
_SEEDS = "seeds"
_log = logging.getLogger("tfmultigpu")


def say_if_cut_otherwise(before: int | None, now: int | None) -> None:
    """Warns if a run that is resumed has another number of logical replicas than before."""
    if before not in (None, now):
        _log.warning(
            f"The checkpoint was computed with logical_replicas={before}, and the run goes on "
            f"with {now}: the end is equal to rounding, and not bit for bit. For the same bits "
            f"write logical_replicas={before}, in tmg.fit or tmg.make_train_step."
        )


class RunVariables:
    """The variables of models, optimizers, seeds and extra objects; all workers call alike."""

    def __init__(
        self,
        model: KerasModel,
        optimizer: KerasOptimizer,
        train_step: TrainStep | ChainedStep | None,
        extra: Mapping[str, object] | None,
    ) -> None:
        parts = [(model, optimizer)]
        if train_step is not None:
            is_step = isinstance(train_step, (TrainStep, ChainedStep))
            if (model, optimizer) != (None, None) or not is_step:
                raise TypeError(
                    "train_step must come from tmg.make_train_step or tmg.chain_steps, in place of "
                    f"model and optimizer. Received: train_step={brief(train_step)} and "
                    f"model={brief(model)}. Write tmg.Checkpoints(directory, train_step=step)."
                )
            parts = [(step.model, step.optimizer) for step in train_step.train_steps]
            model, optimizer = parts[0]
        if model is None:
            raise TypeError(
                "Checkpoints save a model with its optimizer, or a train step. Received: model=None"
                " and train_step=None. Write tmg.Checkpoints(directory, model, model.optimizer)."
            )
        strategy = strategy_of(model)
        check_kinds(model, strategy, *([] if optimizer is None else [optimizer]))
        self._optimizer, self._step = optimizer, train_step
        # Each trained model with its optimizer, by the begin of the names of variables.
        self._parts = {"": parts[0]}
        for number, part in enumerate(parts[1:], 1):
            self._parts[f"{number}/"] = part
        self._extra = dict(extra or {})
        self.exchange = WorkerExchange(strategy)
        self._checked: list[OtherState] = []  # State other than variables that is held.
        _extra_variables(self._extra)  # Checks them.

    def count_updates(self) -> int:
        """Returns the steps that the optimizer of the first model has counted."""
        return 0 if self._optimizer is None else int(self._optimizer.iterations.numpy())

    def all(self) -> Variables:
        """Returns all variables of TensorFlow that exist, by group, number in it, and path."""
        groups: dict[str, Iterable[KerasVariable]] = {**_extra_variables(self._extra)}
        if self._step is not None:
            groups["step/metrics"] = _variables_of(self._step.metrics)
        for prefix, (model, optimizer) in self._parts.items():
            groups[f"{prefix}model"] = model.variables
            groups[f"{prefix}attributes"] = _untracked_variables(model)
            # Of the model and its layers; ``model.metrics`` has those of compile too.
            metrics = keras.layers.Layer.metrics.fget(model)
            groups[f"{prefix}metrics"] = _variables_of(metrics)
            if optimizer is not None:
                groups[f"{prefix}optimizer"] = optimizer.variables
                scale = kept_loss_scales.get(optimizer)
                groups[f"{prefix}loss_scale"] = () if scale is None else scale.variables
        variables = by_name(groups)
        seeds = _compat.global_seeds()
        if seeds is not None:
            variables[_SEEDS] = seeds.state.value
        return variables

    def read(self, data: ShardedDataset | None) -> Arrays:
        """Returns the arrays of all variables by name; checks that they are all, and alike."""
        self._build(data)
        if self._step is not None:
            self.check_holds(self._step.changed_variables())
            self.check_holds_states(self._step.other_states())
        alike: list[KerasVariable] = []
        for model, optimizer in self._parts.values():
            check_values_alike(self.exchange.strategy, model, optimizer)
            alike += model.trainable_variables
            if optimizer is not None:
                alike += optimizer.variables
        variables = read_state(self.all(), self.exchange, {id(tf_variable(v)) for v in alike})
        return {**variables, **read_tables(self._tables(), self.exchange)}

    def write(self, arrays: Arrays, where: Path) -> None:
        """Writes back what ``read`` has returned, or a checkpoint that is stored ``where``."""
        tables = self._tables()
        check_tables_fit(tables, arrays, where)  # Before anything is written.
        write_state(self.all(), arrays, self.exchange)
        write_tables(tables, arrays)

    def restore(self, stored: Stored, data: ShardedDataset | None) -> None:
        """Restores a checkpoint; what is not built yet is built as a step would."""
        strategy, arrays = self.exchange.strategy, stored.arrays
        if self._step is not None:
            say_if_cut_otherwise(stored.run["logical_replicas"], self.logical_replicas)
        is_owned = stored.run["owned"] and is_mirrored(strategy)
        self._build(data, is_owned or "auto")
        for prefix, (_, optimizer) in self._parts.items():
            if any(name.startswith(f"{prefix}loss_scale/") for name in arrays):
                make_loss_scale("dynamic", optimizer, strategy)
        of_variables = {n: array for n, array in arrays.items() if not n.startswith(PREFIX)}
        check_fits(self.all(), of_variables, stored.path)
        if _SEEDS in arrays and _compat.global_seeds() is None:  # Keras makes it when it draws.
            with strategy.scope():
                _compat.set_global_seeds(keras.random.SeedGenerator(0))
        self.write(arrays, stored.path)

    @property
    def logical_replicas(self) -> int | None:
        """Into how many the train step cuts each batch, if there is one that does."""
        return None if self._step is None else self._step.logical_replicas

    @property
    def is_owned(self) -> bool:
        """True if the variables of the first optimizer have owners, also in a resumed run."""
        if self._optimizer is None:
            return False
        update = update_of(self._optimizer)
        return update is not None and update.owned

    def _build(self, data: ShardedDataset | None, shard_update: ShardUpdate = "auto") -> None:
        strategy = self.exchange.strategy
        spec = None if data is None else data.cut.element_spec
        for model, optimizer in self._parts.values():
            prepare_model(model, strategy, spec)
            if self._step is None and optimizer is not None and not optimizer.built:
                choose_update(optimizer, model.trainable_variables, strategy, shard_update)
        if self._step is not None and spec is not None:
            self._step.runner.settle(lambda: spec)

    def _tables(self) -> Tables:
        """Returns the tables in attributes of layers and in extra objects, by name."""
        groups: dict[str, list[object]] = {}
        for prefix, (model, _) in self._parts.items():
            groups[prefix] = []
            for layer in all_layers(model):
                groups[prefix] += _leaves(vars(layer))
        for name, owner in self._extra.items():
            groups[f"extra/{name}/"] = tf.nest.flatten(owner)
        return named_tables(groups)

    def check_holds_states(
        self, states: Sequence[OtherState], others: Iterable[KerasVariable] = ()
    ) -> None:
        """Checks that the state which the traces of a training change is saved.

        Args:
            states: The state.
            others: Variables that are saved besides.
        """
        new = [state for state in states if state not in self._checked]
        if not new:
            return
        handles: set[int] = set()
        for variable in (*self.all().values(), *map(tf_variable, others)):
            copies = copies_of(self.exchange.strategy, variable)
            handles.update(id(copy.handle) for copy in copies)
        check_holds_states(new, self._tables(), handles)
        self._checked += new

    def check_holds(self, changed: Iterable[KerasVariable]) -> None:
        """Checks that all variables that a training changes are among those saved."""
        saved = set(map(id, self.all().values()))
        if names := sorted(_path(v) for v in changed if id(tf_variable(v)) not in saved):
            raise CheckpointError(
                "The training changes variables that the checkpoint would not hold.",
                f"{len(names)} variables {names[:3]}",
                "Write tmg.Checkpoints(directory, model, model.optimizer), or for several models "
                "train_step=step; for a SeedGenerator or a metric outside of the models, "
                'extra={"seeds": [seeds.state]}.',
            )


def _path(variable: KerasVariable) -> str:
    # A variable of TensorFlow would add its values over the replicas, to find such an attribute.
    return str(variable.name if isinstance(variable, tf.Variable) else variable.path)


def by_name(groups: Mapping[str, Iterable[KerasVariable]]) -> Variables:
    """Returns the variables of groups by number and path, without what Keras counts per process."""
    named: Variables = {}
    for group, variables in groups.items():
        for number, variable in enumerate(variables):
            path = COUNTER.sub("", _path(variable))
            named[f"{group}/{number:04d}/{path}"] = tf_variable(variable)
    return named


def _variables_of(owners: Iterable[Any]) -> list[KerasVariable]:
    variables: list[KerasVariable] = []
    for owner in owners:
        variables += owner.variables
    return variables


def _untracked_variables(model: KerasModel) -> list[tf.Variable]:
    """Returns variables in attributes of layers, and in what ``_leaves`` looks into there."""
    known = {id(tf_variable(variable)) for variable in model.variables}
    untracked = []
    for layer in all_layers(model):
        for leaf in _leaves(vars(layer)):
            if _is_number(leaf) and id(leaf) not in known:
                known.add(id(leaf))
                untracked.append(leaf)
    return untracked


def _leaves(value: object) -> list[Tensor]:
    """Returns the items of lists and dicts, whose keys cannot be sorted, and states of modules."""
    if isinstance(value, tf.random.Generator):
        return [value.state]
    if isinstance(value, tf.Module):
        return list(value.variables)
    items = list(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(items, (list, tuple)):
        return [items]
    leaves = []
    for item in items:
        leaves += _leaves(item)
    return leaves


def _extra_variables(owners: Mapping[str, object]) -> dict[str, list[KerasVariable]]:
    """Returns the variables of objects, such as metrics, or of lists of variables."""
    groups = {}
    for name, owner in owners.items():
        values = tf.nest.flatten(getattr(owner, "variables", owner))
        variables = groups[f"extra/{name}"] = [value for value in values if not is_table(value)]
        if not all(_is_number(tf_variable(variable)) for variable in variables):
            raise TypeError(
                f"Checkpoints save only variables of numbers. Received: extra={{{name!r}: "
                f'{brief(owner)}}}. Write extra={{"accuracy": metric}}, or give a list of '
                "variables; for several steps, train_step=tmg.chain_steps(first, second)."
            )
    return groups


def _is_number(value: object) -> bool:
    others = (tf.string, tf.resource, tf.variant)
    return isinstance(value, tf.Variable) and value.dtype not in others


def read_state(
    variables: Variables, exchange: WorkerExchange, alike: Collection[int] = ()
) -> Arrays:
    """Returns the arrays of variables by name; all workers must call it.

    The first axis counts replicas if their copies differ or may differ, and of size 1 if not.
    Variables whose ``id`` is in ``alike`` are not compared.
    """
    strategy = exchange.strategy
    copies_of: dict[str, list[Array]] = {}
    digests: list[int] = []  # -1 if copies differ here.
    for name, variable in variables.items():
        if strategy.num_replicas_in_sync == 1 or id(variable) in alike:
            copies_of[name] = [_array_of(variable)]
            digests.append(0)
            continue
        copies = list(map(_array_of, strategy.experimental_local_results(variable)))
        kinds = {digest_of(copy.tobytes()) for copy in copies}
        if len(kinds) > 1 or is_on_read(variable):
            copies_of[name] = copies
            digests.append(-1)
        else:
            copies_of[name] = copies[:1]
            digests.append(kinds.pop())

    by_worker = exchange("the state to save", digests)
    differing = (by_worker < 0).any(0) | (by_worker != by_worker[0]).any(0)
    arrays: dict[str, Array] = {}
    for (name, copies), differs in zip(copies_of.items(), differing, strict=True):
        arrays[name] = copies[0]
        if differs:
            arrays[name] = exchange.rows(itertools.cycle(copies).__next__)
    return arrays


def _array_of(variable: tf.Variable) -> Array:
    """Returns the value of a variable with an axis for replicas."""
    value: Array = np.asarray(variable.numpy())[None]
    return value


def write_state(variables: Variables, arrays: Arrays, exchange: WorkerExchange) -> None:
    """Assigns arrays to their variables; those without one keep their values."""
    for name in variables.keys() & arrays.keys():
        local = exchange.strategy.experimental_local_results(variables[name])
        values = _for_replicas(variables[name], arrays[name], exchange.workers * len(local))
        for copy, value in zip(local, values[exchange.worker * len(local) :], strict=False):
            # A table in parts never is whole on a device.
            copy.assign(value if isinstance(copy, RowParts) else tf.constant(value))


def _for_replicas(variable: tf.Variable, copies: Array, replicas: int) -> Sequence[Array] | Array:
    """Returns values of the replicas; for another number of them, of the same sum or mean."""
    copies = copies.view(variable.dtype.as_numpy_dtype)
    if len(copies) == replicas:
        return copies
    is_sum = variable.aggregation == tf.VariableAggregation.SUM
    if is_sum and (is_on_read(variable) or len(copies) > 1):
        total = copies.sum(0, dtype=copies.dtype)
        return [total] + [np.zeros_like(total)] * (replicas - 1)
    if len(copies) > 1 and (variable.dtype.is_floating or variable.dtype.is_complex):
        mean = copies.mean(0, dtype=np.result_type(copies, "float64"))
        return [mean.astype(copies.dtype)] * replicas
    return [copies[0]] * replicas


def check_fits(variables: Variables, arrays: Arrays, where: object) -> None:
    """Checks that arrays, stored ``where``, belong to variables: names, shapes and dtypes."""
    stored = {n: f"{array.dtype} of shape {array.shape[1:]}" for n, array in arrays.items()}
    here = {}
    for name, variable in variables.items():
        # NumPy files know bfloat16 and similar types as bytes alone.
        dtype = np.dtype(np.dtype(variable.dtype.as_numpy_dtype).str)
        here[name] = f"{dtype} of shape {tuple(variable.shape)}"
    # Keras makes its seeds when it first draws: either run may have drawn before.
    names = sorted({*stored, *here} - {_SEEDS})
    differing = [name for name in names if stored.get(name) != here.get(name)]
    if differing:
        told = [f"{n} is {stored.get(n)}, and here {here.get(n)}" for n in differing[:3]]
        raise CheckpointError(
            "The checkpoint is of another model, optimizer or loss scale.",
            f"{where}; {len(differing)} variables differ: {'; '.join(told)}",
            "Build the same ones as when it was saved, or give another directory to start over.",
        )
