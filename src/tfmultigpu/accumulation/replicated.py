"""Who adds gradients over the replicas, and who applies them: one object for each optimizer.

Both kinds call the stock ``optimizer.apply`` once, outside every scope. There Keras calls
``strategy.extended.update`` for each variable. TensorFlow's function updates the copy of each
replica. ``Owned`` updates the copy of one replica, and copies the new value to the others.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching, setting
from tfmultigpu.accumulation.gradients import in_global_phase
from tfmultigpu.accumulation.loss_scale import parts_of, unwrap_optimizer
from tfmultigpu.accumulation.table_parts import OfParts, clip_parts, update_parts, whole_tables
from tfmultigpu.accumulation.table_rows import (
    check_updates_parts,
    is_table,
    takes_lists,
    takes_rows,
    updating_rows,
)
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.lists import pick
from tfmultigpu.strategies.called_by_all import PAYS_FROM_VARIABLES, call_on_replica
from tfmultigpu.strategies.collectives import (
    adds_lists,
    replicas_share_memory,
    sum_on_devices,
    sum_over_replicas,
    sum_over_workers,
)
from tfmultigpu.strategies.row_lists import Gradient, as_tensor, is_list, values_of, with_values
from tfmultigpu.strategies.row_parts import RowParts, copies_of, units_of
from tfmultigpu.strategies.topology import is_sharded, owner_of, per_replica, tf_variable
from tfmultigpu.types import Context, Function, KerasOptimizer, KerasVariable, Scalar

_Addends = list[list[Any]]
T = TypeVar("T")
_CLIPS = ["clipnorm", "global_clipnorm", "clipvalue"]


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
        # In an update: by the ``id`` of a copy of a table, which rows change.
        self._ids: dict[int, tf.Tensor | None] = {}

    @property
    def optimizer(self) -> Any:
        """The optimizer that does the work, without a ``LossScaleOptimizer`` around it."""
        return self._optimizer()

    def build(self, variables: Sequence[KerasVariable]) -> None:
        """Creates the state of the optimizer before anything is traced."""
        if not self.optimizer.built:
            with self.strategy.scope(), _filling_at_once():
                self.optimizer.build(list(variables))

    def part_copies(self, variables: Sequence[KerasVariable]) -> None:
        """Gives each copy of a table, whose rows are updated alone, memory of its own.

        TensorFlow makes all copies of one first value, in one memory if they share it. At the first
        write each would be copied, all at one time, while the first value is still there.
        """
        for variable in variables:
            copies = self._local(tf_variable(variable))
            if len(copies) == 1 or not is_table(variable) or not self.takes_rows(variable):
                continue
            for copy in copies[1:]:
                with tf.device(copy.device):
                    copy.assign(tf.raw_ops.DeepCopy(x=copy.read_value()))

    def add(self, addends: _Addends, variables: Sequence[KerasVariable]) -> _Addends:
        """Returns sums over the replicas: one list, or one for each if they share no memory."""
        if not adds_lists(self.strategy):
            addends = [_without_lists(one, variables) for one in addends]
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

    def at(self, variable: KerasVariable) -> AbstractContextManager[Any]:
        """Places what is computed of a variable on the device where its gradients are added."""
        return nullcontext()

    def takes_rows(self, variable: KerasVariable) -> bool:
        """Returns whether ``apply`` may be given a list of rows, each once, for a variable."""
        with tf.init_scope():
            ask = functools.partial(takes_rows, self.optimizer, variable)
            return bool(outside_scopes(ask))

    def as_taken(self, rows: tf.IndexedSlices, variable: KerasVariable) -> Gradient:
        """Returns the gradient of a variable, a list with each row once, as ``apply`` takes it."""
        if self.takes_rows(variable):
            return rows
        with self.at(variable):
            if takes_lists(self.optimizer, variable):
                return with_values(rows, rows.values, variable.shape)
            return as_tensor(rows, variable.shape)

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

    def _traces_once(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> bool:
        """Returns whether the first replica traces the update for all of them.

        They differ in their copies of the variables alone, if the gradients exist once.
        """
        if not tf.inside_function() or not replicas_share_memory(self.strategy):
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
            return function(first(variable), *first(args), **first(kwargs))

        def run() -> None:
            with updating_by(self.strategy, update):
                apply()

        traced: Any = tf.function(run, autograph=False, **_compat.called_as_whole())
        function = traced.get_concrete_function()
        for number, device in enumerate(self.strategy.extended.worker_devices):
            with tf.device(device):
                call_on_replica(self.strategy, function, number)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Makes stock methods right that write by ``strategy.extended.update``, for example EMA."""
        yield

    def _apply(
        self, optimizer: KerasOptimizer, gradients: list[Any], variables: list[KerasVariable]
    ) -> None:
        hidden = ["loss_scale_factor"]  # Gradients are unscaled already.
        apply = type(optimizer).apply  # That of the object refuses, if there are owners.
        gradients = clip_parts(optimizer, gradients)
        if any(isinstance(gradient, OfParts) for gradient in gradients):
            hidden += _CLIPS
        ids = self._take_ids(gradients, variables)
        if any(len(self._local(gradient)) > 1 for gradient in gradients):
            if _compat.is_part_of_keras(apply):  # It cannot clip per-replica values.
                clip = functools.partial(_compat.clip_as_set, optimizer)
                gradients = list(self.strategy.run(clip, args=(gradients,)))
                hidden += _CLIPS
            else:  # Code of a user takes tensors.
                gradients = [self._local(gradient)[0] for gradient in gradients]
        with (
            setting(optimizer, **dict.fromkeys(hidden), **_compat.keeping_sums()),
            setting(self, _ids=ids),  # Not for longer: they hold the graph of the trace.
            updating_rows(optimizer, ids, self._copies),
        ):
            apply(optimizer, gradients, variables)

    def _take_ids(
        self, gradients: list[Gradient], variables: Sequence[KerasVariable]
    ) -> dict[int, tf.Tensor | None]:
        """Puts the values of lists in their place; returns their ids by the ``id`` of a copy.

        Of a part of a table whose gradient is a tensor there are no ids, but None.
        """
        ids: dict[int, tf.Tensor | None] = {}
        for number, variable in enumerate(variables):
            if isinstance(gradients[number], OfParts):
                parts: list[Gradient] = []
                pairs = zip(gradients[number].parts, self._copies(variable), strict=True)
                for part, copy in pairs:
                    ids[id(copy)] = part.indices if is_list(part) else None
                    parts.append(part if part is None else values_of(part))
                gradients[number] = OfParts(parts)
                continue
            lists = self._local(gradients[number])
            if not is_list(lists[0]) or not self.takes_rows(variable):
                continue  # Of a list that is not updated by rows Keras makes what it needs.
            copies = self._local(tf_variable(variable))
            for place, copy in enumerate(copies):
                ids[id(copy)] = lists[place % len(lists)].indices  # Of all, or of each.
            values = [each.values for each in lists]
            several = len(lists) > 1
            gradients[number] = per_replica(self.strategy, values) if several else values[0]
        return ids

    def _copies(self, variable: KerasVariable) -> Sequence[tf.Variable]:
        return copies_of(self.strategy, variable)

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

        def with_owner(_: Any, variable: KerasVariable) -> AbstractContextManager[Any]:
            if isinstance(variable, RowParts):
                return tf.variable_creator_scope(variable.create_like)  # type: ignore[no-any-return]
            owner = self._owners.get(id(variable))
            return nullcontext() if owner is None else tf.device(self.devices[owner])

        def build() -> None:  # A variable is created once outside the scope.
            owning = patching(self.strategy.extended, "colocate_vars_with", with_owner)
            with owning, _filling_at_once():
                optimizer.build(list(variables))

        before = {id(variable) for variable in optimizer.variables}
        outside_scopes(build)
        self.state = frozenset(id(variable) for variable in optimizer.variables) - before
        for each in (optimizer, *parts_of(optimizer)):
            each.apply = _refuse_replicas

    def add(self, addends: _Addends, variables: Sequence[KerasVariable]) -> _Addends:
        """Adds each gradient on the device of its owner, and the other sums on the first."""
        others = len(addends[0]) - len(variables)
        places = [*map(self._device, variables), *[self.devices[0]] * others]
        sums = sum_on_devices(addends, places)
        if not adds_lists(self.strategy):
            sums = _without_lists(sums, variables)
        return [sum_over_workers(self.strategy, sums, places)]

    def at(self, variable: KerasVariable) -> AbstractContextManager[Any]:
        """Places what is computed of a variable with its owner."""
        return tf.device(self._device(variable))  # type: ignore[no-any-return]

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Has functions that Keras runs on all copies of a variable run on the owner's copy.

        The other copies are written at once: moving averages and constraints read the first one.
        """

        def update(
            original: Function, variable: KerasVariable, function: Function, args: Any, kwargs: Any
        ) -> Any:
            if isinstance(variable, RowParts):
                update_parts(variable, function, args, kwargs)
                return None
            copies = self._local(variable)
            if len(copies) == 1:  # A sharded variable, or a slot that is assigned itself.
                with tf.device(variable.device):
                    return function(variable, *args, **kwargs)
            owner = self._owners.get(id(variable))
            if owner is None:  # A counter, for example, is on all replicas.
                return original(variable, function, args, kwargs=kwargs)

            def on_owner(copy: Scalar, *args: Any, **kwargs: Any) -> None:
                if copy is copies[owner]:
                    function(copy, *args, **kwargs)

            original(variable, on_owner, args, kwargs=kwargs, group=False)
            ids = self._ids.get(id(copies[owner]))
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

        with updating_by(self.strategy, update):
            yield

    def _device(self, variable: KerasVariable) -> str:
        return str(self.devices[self._owners.get(id(tf_variable(variable)), 0)])


@contextmanager
def updating_by(strategy: tf.distribute.Strategy, update: Function) -> Iterator[None]:
    """Has a function called in place of ``strategy.extended.update``.

    Args:
        strategy: The strategy.
        update: ``update(original, variable, function, args, kwargs)``.
    """

    def called(
        original: Function,
        variable: KerasVariable,
        function: Function,
        args: Any = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        original = functools.partial(original, group=group)
        return update(original, variable, function, args, kwargs or {})

    with patching(strategy.extended, "update", called):
        yield


def _without_lists(
    addends: Sequence[Gradient], variables: Sequence[KerasVariable]
) -> list[Gradient]:
    """Returns addends, of which those for variables come first, with tensors in place of lists."""
    dense = list(addends)
    for number, variable in enumerate(variables):
        with tf.device(dense[number].device):
            dense[number] = as_tensor(dense[number], variable.shape)
    return dense


@contextmanager
def _filling_at_once() -> Iterator[None]:
    """Has Keras' ``Constant``, by which slots begin, fill memory instead of multiplying ones.

    A product needs room for two tables, and a slot has the size of one.
    """
    import keras

    def fill(
        original: Callable[..., tf.Tensor],
        initializer: Gradient,
        shape: Sequence[int],
        dtype: str | None = None,
    ) -> Gradient:
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
        "Write outside of strategy.run tmg.apply_reduced_gradients(optimizer, gradients, "
        "variables), or create a new optimizer.",
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
        return pool.submit(call).result()
