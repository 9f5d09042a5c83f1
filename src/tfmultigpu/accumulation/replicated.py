"""Who adds gradients over the replicas, and who applies them: one object for each optimizer.

Both kinds call the stock ``optimizer.apply`` once, outside every scope. There Keras calls
``strategy.extended.update`` for each variable. For ``Replicated`` that is TensorFlow's own: each
replica updates its copy. ``Owned`` gives a variable to one replica: the function of Keras runs on
the copy of the owner alone, and the new value goes to the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import setting
from tfmultigpu.accumulation.gradients import in_global_phase
from tfmultigpu.accumulation.loss_scale import unwrap_optimizer
from tfmultigpu.accumulation.owners import assign_owners, outside_scopes, parts_of, size_of
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.strategies.collectives import sum_on_devices, sum_over_replicas, sum_over_workers
from tfmultigpu.strategies.topology import is_sharded, owner_of, per_replica, tf_variable

_Addends = list[list[Any]]


class Replicated:
    """Each replica updates all variables, from gradients that are added for all of them."""

    owned = False

    def __init__(self, optimizer: Any, strategy: tf.distribute.Strategy, reason: str) -> None:
        """Takes an optimizer that was created in the scope of the strategy."""
        # Updates are remembered by optimizer, and must not keep it alive.
        self._optimizer = weakref.ref(unwrap_optimizer(optimizer))
        self.strategy, self.reason = strategy, reason  # The reason is for a person.
        # The ``id`` of each Keras variable of the optimizer that exists once.
        self.state: frozenset[int] = frozenset()

    @property
    def optimizer(self) -> Any:
        """The optimizer that does the work, without a ``LossScaleOptimizer`` around it."""
        return self._optimizer()

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the state of the optimizer before anything is traced."""
        if not self.optimizer.built:
            with self.strategy.scope():
                self.optimizer.build(list(variables))

    def add(self, addends: _Addends, variables: Sequence[Any]) -> _Addends:
        """Returns sums over the replicas: one list, or one for each if they share no memory."""
        return sum_over_replicas(self.strategy, addends)

    def where(self, finish: Callable[..., Any], sums: _Addends, *args: Any) -> Any:
        """Runs the global phase where the sums of ``add`` are: once, or on each replica.

        ``finish(sums, *args)`` returns a ``Gradient``, and tensors equal on all replicas.
        """
        if len(sums) == 1:
            return finish(sums[0], *args)
        gradients: list[Any] = []

        def run(*args: Any) -> Any:
            with in_global_phase():
                gradient, others = finish(*args)
            gradients.append(gradient)
            return list(gradient.tensors), (gradient.norm, gradient.valid, others)

        values = (per_replica(self.strategy, sums), *args)
        tensors, alike = self.strategy.run(run, args=values)
        norm, valid, others = tf.nest.map_structure(lambda value: self._local(value)[0], alike)
        return gradients[-1]._replace(tensors=tuple(tensors), norm=norm, valid=valid), others

    def at(self, variable: Any) -> AbstractContextManager[Any]:
        """Places what is computed of a variable on the device where its gradients are added."""
        return nullcontext()

    def apply(
        self, gradients: Sequence[Any], variables: Sequence[Any], after: Sequence[Any] = ()
    ) -> None:
        """Makes one step of the stock optimizer for all replicas; in a cross-replica context."""
        before = [*after, *(tensor for g in gradients for tensor in self._local(g))]

        def apply() -> None:
            with tf.control_dependencies([tf.group(*before)]), self.updating(variables):
                self._apply(list(zip(gradients, variables, strict=True)))

        outside_scopes(apply)

    @contextmanager
    def updating(self, variables: Sequence[Any]) -> Iterator[None]:
        """Makes stock methods right that write ``variables`` by ``strategy.extended.update``.

        Those are ``finalize_variable_values``, and what ``keras.callbacks.SwapEMAWeights`` does.
        """
        yield

    def _apply(self, pairs: list[tuple[Any, Any]]) -> None:
        # A MultiOptimizer wants a gradient for each variable, so its parts are called.
        parts = parts_of(self.optimizer)
        for part in parts:
            known = {id(variable) for variable in _compat.optimizer_trains(part)}
            own = [pair for pair in pairs if len(parts) == 1 or id(pair[1]) in known]
            if not own:
                continue
            gradients, variables = map(list, zip(*own, strict=True))
            hidden = ["loss_scale_factor"]  # Gradients are unscaled already.
            apply = type(part).apply  # That of the object refuses, if there are owners.
            if any(len(self._local(gradient)) > 1 for gradient in gradients):
                if self.owned or not _compat.is_part_of_keras(apply):  # They take tensors.
                    gradients = [self._local(gradient)[0] for gradient in gradients]
                else:
                    gradients = self._clipped(part, gradients)
                    hidden += ["clipnorm", "global_clipnorm", "clipvalue"]
            with setting(part, **dict.fromkeys(hidden), **_compat.keeping_sums()):
                apply(part, gradients, variables)
        if pairs and parts != [self.optimizer]:
            self.optimizer.iterations.assign_add(1)

    def _clipped(self, optimizer: Any, gradients: list[Any]) -> list[Any]:
        """Clips per-replica values on each replica, which Keras would not."""
        devices = self.strategy.extended.worker_devices
        clipped = []
        for device, *tensors in zip(devices, *map(self._local, gradients), strict=True):
            with tf.device(device):
                clipped.append(_compat.clip_as_set(optimizer, tensors))
        return [per_replica(self.strategy, list(copies)) for copies in zip(*clipped, strict=True)]

    def _local(self, value: Any) -> tuple[Any, ...]:
        return tuple(self.strategy.experimental_local_results(value))


class Owned(Replicated):
    """One replica owns each variable: its gradients are added there, and it alone updates it.

    What the optimizer keeps of a variable exists once, with the owner. Several workers each have
    an owner of the same number, which update alike.
    """

    owned = True

    def build(self, variables: Sequence[Any]) -> None:
        """Creates what the optimizer keeps of a variable once, on the device of its owner."""
        optimizer = self.optimizer
        self.devices = tuple(self.strategy.extended.worker_devices)
        variables = _compat.optimizer_trains(optimizer) or list(variables)
        owners = {i: owner_of(v, self.devices) for i, v in enumerate(variables) if is_sharded(v)}
        if not optimizer.built:  # Else others have their state on all replicas.
            sizes = [size_of(variable) for variable in variables]
            owners = dict(enumerate(assign_owners(sizes, len(self.devices), owners)))
        # By the id of the tf.Variable, which is what Keras gives to ``extended.update``.
        self._owners = {id(tf_variable(variables[i])): owner for i, owner in owners.items()}
        if optimizer.built:
            return

        def with_owner(variable: Any) -> AbstractContextManager[Any]:
            owner = self._owners.get(id(variable))
            return nullcontext() if owner is None else tf.device(self.devices[owner])

        def build() -> None:  # A variable is created once outside the scope.
            with setting(self.strategy.extended, colocate_vars_with=with_owner):
                optimizer.build(list(variables))

        before = {id(variable) for variable in optimizer.variables}
        outside_scopes(build)
        self.state = frozenset(id(variable) for variable in optimizer.variables) - before
        for each in (optimizer, *parts_of(optimizer)):
            each.apply = _refuse_replicas

    def add(self, addends: _Addends, variables: Sequence[Any]) -> _Addends:
        """Adds each gradient on the device of its owner, and the other sums on the first."""
        places = [*map(self._device, variables), self.devices[0]]
        sums = sum_on_devices(addends, places)
        return [sum_over_workers(self.strategy, sums, places)]

    def at(self, variable: Any) -> AbstractContextManager[Any]:
        """Places what is computed of a variable with its owner."""
        return tf.device(self._device(variable))  # type: ignore[no-any-return]

    @contextmanager
    def updating(self, variables: Sequence[Any]) -> Iterator[None]:
        """Has functions that Keras runs on all copies of a variable run on that of the owner.

        The other copies are written at once, because moving averages, constraints and the code of
        a user read the first one; after the weight decay of Keras, without arguments, at the end.
        """
        extended: Any = self.strategy.extended
        original = extended.update
        own_code = not all(map(_compat.is_own_class_of_keras, parts_of(self.optimizer)))
        written: dict[int, Any] = {}

        def update(
            variable: Any, function: Any, args: Any = (), kwargs: Any = None, group: bool = True
        ) -> Any:
            copies = self._local(variable)
            if len(copies) == 1:  # A sharded variable, or a slot that is assigned itself.
                with tf.device(variable.device):
                    return function(variable, *args, **(kwargs or {}))
            owner = self._owners.get(id(variable))
            if owner is None:  # A counter, for example, is on all replicas.
                return original(variable, function, args, kwargs=kwargs, group=group)

            def on_owner(copy: Any, *args: Any, **kwargs: Any) -> None:
                if copy is copies[owner]:
                    function(copy, *args, **kwargs)

            original(variable, on_owner, args, kwargs=kwargs, group=False)
            written[id(variable)] = variable
            if own_code or args:
                self._copy(written.pop(id(variable)))
            return None

        with setting(extended, update=update):
            yield
        for variable in written.values():
            self._copy(variable)

    def _copy(self, variable: Any) -> None:
        owner = self._owners[id(variable)]
        copies = self._local(variable)
        with tf.device(self.devices[owner]):
            value = copies[owner].read_value()
        for number, device in enumerate(self.devices):
            if number != owner:
                with tf.device(device):
                    copies[number].assign(value)

    def _device(self, variable: Any) -> str:
        return str(self.devices[self._owners.get(id(tf_variable(variable)), 0)])


def _refuse_replicas(*_: Any, **__: Any) -> None:
    raise TfMultiGpuError(
        "The state of this optimizer exists once, with the replicas that own it. Received: "
        "optimizer.apply, apply_gradients or Keras' own fit, with which each replica would change "
        "it. Write tmg.apply_reduced_gradients(optimizer, gradients, variables) outside of "
        "strategy.run; or create a new optimizer, for a step with shard_update=False."
    )
