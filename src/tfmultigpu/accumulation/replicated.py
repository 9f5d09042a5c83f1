"""Who adds gradients over the replicas, and who applies them: one object for each optimizer.

Both kinds call the stock ``optimizer.apply`` once, outside every scope. There Keras calls
``strategy.extended.update`` for each variable. TensorFlow's function updates the copy of each
replica. ``Owned`` updates the copy of one replica, and copies the new value to the others.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching
from tfmultigpu.accumulation.applying import (
    OfParts,
    applying,
    clip_as_set,
    lists_rows,
    of_rows,
    update_parts,
    updating_by,
    whole_tables,
)
from tfmultigpu.accumulation.gradients import in_global_phase
from tfmultigpu.accumulation.loss_scale import parts_of, unwrap_optimizer
from tfmultigpu.accumulation.table_rows import check_updates_parts, how_taken, is_table
from tfmultigpu.accumulation.targets import Target
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.lists import pick
from tfmultigpu.strategies.called_by_all import PAYS_FROM_VARIABLES, call_on_replica
from tfmultigpu.strategies.collectives import (
    adds_in_pairs,
    adds_lists,
    replicas_share_memory,
    sum_on_devices,
    sum_over_replicas,
    sum_over_workers,
)
from tfmultigpu.strategies.row_parts import RowParts, units_of
from tfmultigpu.strategies.topology import is_sharded, owner_of, per_replica, tf_variable
from tfmultigpu.types import Context, Function, KerasOptimizer, KerasVariable, Tensor

_Addends = list[list[Any]]
T = TypeVar("T")


class Replicated:
    """Each replica updates all variables, from gradients that are added for all of them."""

    owned = False

    def __init__(
        self, optimizer: KerasOptimizer, strategy: tf.distribute.Strategy, reason: str
    ) -> None:
        """Keeps an optimizer that was created in the scope of the strategy."""
        # Updates are remembered by optimizer, and must not keep it alive.
        self._optimizer = weakref.ref(unwrap_optimizer(optimizer))
        self.strategy, self.reason = strategy, reason  # The reason is for a person.
        self.state: frozenset[int] = frozenset()  # The ``id`` of each variable that exists once.

    @property
    def optimizer(self) -> Any:
        """The optimizer that does the work, without a ``LossScaleOptimizer`` around it."""
        return self._optimizer()

    def build(self, variables: Sequence[KerasVariable]) -> None:
        """Creates the state of the optimizer before anything is traced."""
        if not self.optimizer.built:
            with self.strategy.scope(), _filling_at_once():
                self.optimizer.build(list(variables))

    def part_copies(self, variables: Iterable[KerasVariable]) -> None:
        """Gives each copy of a table, whose rows are updated alone, memory of its own.

        TensorFlow makes all copies of one first value, in one memory if they share it. At the first
        write each would be copied, all at one time, while the first value is still there.
        """
        for target in self.targets_of(variables):
            for copy in target.copies[1:] if target.takes == "rows" else ():
                with tf.device(copy.device):
                    copy.assign(tf.raw_ops.DeepCopy(x=copy.read_value()))

    def add(self, addends: _Addends, targets: Sequence[Target]) -> _Addends:
        """Returns sums over the replicas: one list, or one for each if they share no memory."""
        if not adds_lists(self.strategy):
            addends = [_without_lists(of_replica, targets) for of_replica in addends]
        return sum_over_replicas(self.strategy, addends)

    def where(self, finish: Callable[..., Any], sums: _Addends, *args: Any) -> Any:
        """Runs ``finish``, the global phase, where the sums are: once, or on each replica."""
        if len(sums) == 1:
            return finish(sums[0], *args)

        def run(*args: Any) -> Any:
            with in_global_phase():
                return finish(*args)

        gradient, others = self.strategy.run(run, args=(per_replica(self.strategy, sums), *args))
        alike = gradient.norm, gradient.valid, gradient.finite, others
        norm, valid, finite, others = tf.nest.map_structure(
            lambda value: self._local(value)[0], alike
        )
        return gradient._replace(norm=norm, valid=valid, finite=finite), others

    def targets_of(self, variables: Iterable[KerasVariable]) -> list[Target]:
        """Returns a record of each variable; of a table on several devices one of each part."""
        return [self.target_of(unit) for unit in units_of(variables)]

    def target_of(self, variable: KerasVariable) -> Target:
        """Returns where a variable is, and how the optimizer takes its gradient, as it is now."""
        large, takes = is_table(variable), "tensor"
        if large:
            with tf.init_scope():
                takes = outside_scopes(functools.partial(how_taken, self.optimizer, variable))
        value = tf_variable(variable)
        copies, device = self._local(value), self._device_of(value)
        return Target(variable, copies, is_sharded(variable), large, takes, device)

    def _device_of(self, value: tf.Variable) -> str | None:
        return None

    def apply(
        self,
        gradients: Sequence[Any],
        variables: Sequence[KerasVariable],
        after: Sequence[Any] = (),
    ) -> None:
        """Makes one step of the stock optimizer for all replicas; in a cross-replica context."""
        parts = [part for gradient in gradients for part in self._local(gradient)]
        gradients, variables = whole_tables(gradients, variables)
        before = [*after, *tf.nest.flatten(parts, expand_composites=True)]

        def apply() -> None:
            for part in parts_of(self.optimizer):
                known = {id(variable) for variable in _compat.optimizer_trains(part)}
                pairs = zip(gradients, variables, strict=True)
                own = [pair for pair in pairs if part is self.optimizer or id(pair[1]) in known]
                if own:
                    self._apply(part, *map(list, zip(*own, strict=True)))
            if gradients and self.optimizer not in parts_of(self.optimizer):
                self.optimizer.iterations.assign_add(1)

        def update() -> None:
            with _compat.waiting_for(before), self.updating():
                if self._traces_once(parts, variables):
                    self._call_on_all(apply)
                else:
                    apply()

        outside_scopes(update)

    def _traces_once(self, gradients: Sequence[Tensor], variables: Sequence[Any]) -> bool:
        """Returns whether the first replica traces the update for all of them.

        They differ in their copies of the variables alone, if the gradients exist once. TensorFlow
        rewrites a function that is called by itself, and its numbers may round otherwise than on
        one device. So with logical replicas each replica has a trace.
        """
        if not tf.inside_function() or adds_in_pairs():
            return False
        if not replicas_share_memory(self.strategy):
            return False
        if len(gradients) > len(variables) or len(variables) < PAYS_FROM_VARIABLES:
            return False
        replicas = self.strategy.num_replicas_in_sync
        held = [*variables, *self.optimizer.variables]
        return all(len(self._local(tf_variable(variable))) == replicas > 1 for variable in held)

    def _call_on_all(self, apply: Callable[[], None]) -> None:
        """Traces an update of the first replica, and calls it on each."""

        def update(
            _: Function, variable: KerasVariable, function: Function, args: Any, kwargs: Any
        ) -> Any:
            first = functools.partial(tf.nest.map_structure, lambda value: self._local(value)[0])
            function = of_rows(self.optimizer, self.strategy, variable, function)
            return function(first(variable), *first(args), **first(kwargs))

        def run() -> None:
            with updating_by(self.strategy, update):  # In place of ``_update``.
                apply()

        traced: Any = tf.function(run, autograph=False, **_compat.called_as_whole())
        function = traced.get_concrete_function()
        for number, device in enumerate(self.strategy.extended.worker_devices):
            with tf.device(device):
                call_on_replica(self.strategy, function, number)

    def updating(self) -> AbstractContextManager[None]:
        """Has what Keras runs on all copies of a variable run as ``_update`` says, EMA too."""
        return updating_by(self.strategy, self._update)

    def _update(
        self, original: Function, variable: Any, function: Function, args: Any, kwargs: Any
    ) -> Any:
        """Runs a function of Keras on each copy, on the listed rows alone if there is a list."""
        function = of_rows(self.optimizer, self.strategy, variable, function)
        return original(variable, function, args, kwargs=kwargs)

    def on_first(self) -> AbstractContextManager[Any]:
        """Has updates change the first copy of each variable alone."""

        def update(
            original: Function, variable: Any, function: Function, args: Any, kwargs: Any
        ) -> Any:
            function = _on_copy(self._local(variable)[0], function)
            return original(variable, function, args, kwargs=kwargs, group=False)

        return updating_by(self.strategy, update)

    def _apply(
        self, optimizer: KerasOptimizer, gradients: list[Any], variables: list[KerasVariable]
    ) -> None:
        apply = type(optimizer).apply  # That of the object refuses, if there are owners.
        firsts = [self._local(gradient)[0] for gradient in gradients]
        several = any(len(self._local(gradient)) > 1 for gradient in gradients)
        # Keras clips tensors alone, which exist once; and code of a user takes tensors.
        clipped = any(isinstance(first, (OfParts, tf.IndexedSlices)) for first in firsts)
        clipped = clipped or (several and _compat.is_part_of_keras(apply))
        if clipped and several:
            clip = functools.partial(clip_as_set, optimizer)
            gradients = list(self.strategy.run(clip, args=(gradients,)))
        elif clipped:
            gradients = clip_as_set(optimizer, gradients)
        elif several:
            gradients = firsts
        with applying(optimizer, clipped=clipped):
            apply(optimizer, gradients, variables)

    def _local(self, value: Any) -> tuple[Any, ...]:
        return tuple(self.strategy.experimental_local_results(value))


class Owned(Replicated):
    """One replica owns each variable: its gradients are added there, and it alone updates it.

    Several workers each have an owner of the same number, which update alike.
    """

    owned = True

    def build(self, variables: Sequence[KerasVariable]) -> None:
        """Creates what the optimizer keeps of a variable once, on the device of its owner."""
        optimizer = self.optimizer
        self.devices = tuple(self.strategy.extended.worker_devices)
        variables = _compat.optimizer_trains(optimizer) or list(variables)
        units = units_of(variables)
        if len(units) > len(variables):
            outside_scopes(functools.partial(check_updates_parts, optimizer, units))
        owners = {i: owner_of(v, self.devices) for i, v in enumerate(units) if is_sharded(v)}
        if not optimizer.built:  # Else others have their state on all replicas.
            sizes = [math.prod(unit.shape) for unit in units]
            owners = dict(enumerate(assign_owners(sizes, len(self.devices), owners)))
        # By the id of the tf.Variable, which is what Keras gives to ``extended.update``.
        self._owners = {id(tf_variable(units[i])): owner for i, owner in owners.items()}
        if optimizer.built:
            return

        def with_owner(original: Function, variable: KerasVariable) -> Any:
            owner = self._owners.get(id(variable))
            return original(variable) if owner is None else tf.device(self.devices[owner])

        def build() -> None:  # A variable is created once outside the scope.
            owning = patching(self.strategy.extended, "colocate_vars_with", with_owner)
            with owning, _filling_at_once():
                optimizer.build(list(variables))

        before = {id(variable) for variable in optimizer.variables}
        outside_scopes(build)
        self.state = frozenset(id(variable) for variable in optimizer.variables) - before
        for each in (optimizer, *parts_of(optimizer)):
            each.apply = _refuse_replicas

    def add(self, addends: _Addends, targets: Sequence[Target]) -> _Addends:
        """Adds each gradient on the device of its owner, and the other sums on the first."""
        places = [target.device or self.devices[0] for target in targets]
        places += [self.devices[0]] * (len(addends[0]) - len(targets))
        sums = sum_on_devices(addends, places)
        if not adds_lists(self.strategy):
            sums = _without_lists(sums, targets)
        return [sum_over_workers(self.strategy, sums, places)]

    def on_first(self) -> AbstractContextManager[Any]:
        """Changes nothing: the update of an owner is one update anyway."""
        return nullcontext()

    def _device_of(self, value: tf.Variable) -> str:
        return str(self.devices[self._owners.get(id(value), 0)])

    def _update(
        self, original: Function, variable: Any, function: Function, args: Any, kwargs: Any
    ) -> Any:
        """Runs a function of Keras on the owner's copy, or on each part of a table.

        The other copies are written at once: moving averages and constraints read the first one.
        """
        of_copy = of_rows(self.optimizer, self.strategy, variable, function)
        if isinstance(variable, RowParts):
            update_parts(variable, of_copy, args, kwargs)
            return None
        copies = self._local(variable)
        if len(copies) == 1:  # A sharded variable, or a slot that is assigned itself.
            with tf.device(variable.device):
                return of_copy(variable, *args, **kwargs)
        owner = self._owners.get(id(variable))
        if owner is None:  # A counter, for example, is on all replicas.
            return original(variable, function, args, kwargs=kwargs)
        original(variable, _on_copy(copies[owner], of_copy), args, kwargs=kwargs, group=False)
        ids = args[0].indices if lists_rows(args) else None
        with tf.device(self.devices[owner]):
            updated = copies[owner]
            value = updated.read_value() if ids is None else updated.sparse_read(ids)
        for number, device in enumerate(self.devices):
            if number == owner:
                continue
            with tf.device(device):
                if ids is None:
                    copies[number].assign(value)
                else:
                    copies[number].scatter_update(tf.IndexedSlices(value, ids))
        return None


def _on_copy(chosen: tf.Variable, function: Function) -> Function:
    """Returns a function of Keras that does nothing to other copies of a variable."""

    def on_copy(copy: tf.Variable, *args: Any, **kwargs: Any) -> None:
        if copy is chosen:
            function(copy, *args, **kwargs)

    return on_copy


def _without_lists(addends: Sequence[Tensor], targets: Sequence[Target]) -> list[Tensor]:
    """Returns addends, of which those for variables come first, with tensors in place of lists."""
    dense = list(addends)
    for number, target in enumerate(targets):
        with tf.device(dense[number].device):
            dense[number] = target.as_tensor(dense[number])
    return dense


@contextmanager
def _filling_at_once() -> Iterator[None]:
    """Has Keras' ``Constant``, by which slots begin, fill memory instead of multiplying ones.

    A product needs room for two tables, and a slot has the size of one.
    """
    import keras

    def fill(
        original: Callable[..., tf.Tensor],
        initializer: Tensor,
        shape: Sequence[int],
        dtype: str | None = None,
    ) -> Tensor:
        if dtype is None or isinstance(initializer.value, (Sequence, np.ndarray)):
            return original(initializer, shape, dtype=dtype)
        return tf.fill(shape, tf.cast(initializer.value, dtype))

    with patching(keras.initializers.Constant, "__call__", fill):
        yield


def _refuse_replicas(*_: Any, **__: Any) -> None:
    raise TfMultiGpuError(
        "The state of this optimizer exists once, and optimizer.apply or Keras' own fit would "
        "have each replica change it.",
        "",
        "Write outside of strategy.run tmg.accumulation.apply_reduced_gradients(optimizer, "
        "gradients, variables), or create a new optimizer.",
    )


def assign_owners(
    sizes: Sequence[int], owners: int, fixed: Mapping[int, int] | None = None
) -> tuple[int, ...]:
    """Returns each variable's owner, largest variable first: the replica that owns least.

    ``fixed`` has the owners of variables that have one already, by their index.
    """
    chosen = dict(fixed or {})
    loads = [0] * owners
    # Those that have an owner already come first.
    for index in sorted(range(len(sizes)), key=lambda i: (i not in chosen, -sizes[i], i)):
        owner = chosen.setdefault(index, loads.index(min(loads)))
        loads[owner] += sizes[index]
    return tuple(pick(chosen, range(len(sizes))))


def outside_scopes(function: Callable[[], T]) -> T:
    """Calls a function without any strategy in effect, in the graph of the caller."""
    if not tf.distribute.has_strategy():
        return function()
    graph: Context = nullcontext()
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph().as_default()

    def call() -> T:
        with graph:
            return function()

    with ThreadPoolExecutor(1) as pool:  # TensorFlow has no other way out of a scope.
        return pool.submit(copy_context().run, call).result()
