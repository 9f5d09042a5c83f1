"""The optimizer update sharded over the replicas of a process.

Each variable has one owner. Gradients are added on the device of the owner, over several workers
among the owners of the same number on each, which then update alike. A stock Keras optimizer of the
owner's applies them to its copy of the variable, and the new value is copied to the other
replicas. A sharded variable is owned by the device that it lives on, and has no copies. Optimizer
state exists once; the optimizer of the user and those of the owners are views of the same
variables.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu._compat import (
    gradients_already_summed,
    is_own_class_of_keras,
    moving_averages,
    optimizer_trains,
    update_averages,
)
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.optimizers.gradients import clipped, global_norm
from tfmultigpu.optimizers.placement import (
    assign_owners,
    component_as_keras,
    outside_scopes,
    owned_state,
    using,
)
from tfmultigpu.strategies.collectives import replicas_share_memory
from tfmultigpu.strategies.topology import is_mirrored
from tfmultigpu.strategies.variable_sharding import is_sharded, owner_of

__all__ = [
    "PAYS_FROM",
    "PAYS_FROM_VARIABLES",
    "ShardedUpdate",
    "UpdatePlan",
    "can_be_sharded",
    "owned_variables",
    "placed",
    "plan_update",
    "reset_averages",
    "shard_update",
    "slots_of_each_variable",
    "swap_averages",
]

# Trained numbers from which steps are faster on virtual CPUs, and variables from which the first
# step is, in which everything is traced; see decisions 6 and 7.
PAYS_FROM = 50_000
PAYS_FROM_VARIABLES = 30

# What the step has done before the owners' optimizers are called, or does for all of them.
_DONE_BEFORE = ("global_clipnorm", "loss_scale_factor")
_SETTINGS = (bool, int, float, str, type(None), set, frozenset, re.Pattern)


class UpdatePlan(NamedTuple):
    """The decision how variables are updated, and its reason.

    Attributes:
        sharded: Whether each variable is updated by its owner alone.
        reason: Why, for a person.
    """

    sharded: bool
    reason: str


def plan_update(
    asked: str | bool, optimizer: Any, variables: Sequence[Any], strategy: tf.distribute.Strategy
) -> UpdatePlan:
    """Says whether an update can be sharded, and where it is to be decided, whether it pays.

    Args:
        asked: ``"auto"``, or True or False.
        optimizer: The Keras optimizer, not a wrapper around it.
        variables: The Keras variables it trains.
        strategy: Their strategy.

    Raises:
        TfMultiGpuError: It was asked for and cannot be had; or the state is sharded already, and
            that was asked not to be.
    """
    known = _sharded.get(optimizer)
    alone = [variable for variable in variables if is_sharded(variable)]
    if alone and known is None:
        return _plan_of_sharded(asked, alone, optimizer, variables, strategy)
    if known is not None:
        if asked is False:
            raise TfMultiGpuError(
                "The state of this optimizer lives with its owners since an earlier step sharded "
                "it. Received: shard_update=False. Make a new optimizer, or leave shard_update out."
            )
        return UpdatePlan(True, "an earlier step has sharded the state of this optimizer")
    if asked is False:
        return UpdatePlan(False, "shard_update=False")
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return UpdatePlan(False, "there is one replica")
    obstacle = _obstacle(optimizer, variables, strategy)
    if asked is True:
        if obstacle is not None:
            raise TfMultiGpuError(
                f"The update cannot be sharded: {obstacle}. Received: shard_update=True. With "
                'shard_update="auto" every replica updates everything, with the same result.'
            )
        return UpdatePlan(True, "shard_update=True")
    if obstacle is not None:
        return UpdatePlan(False, obstacle)
    if not replicas_share_memory(strategy):
        return UpdatePlan(
            False,
            "only on CPUs was it measured to be faster; shard_update=True saves "
            f"{replicas - 1}/{replicas} of the memory of the optimizer's state",
        )
    count = sum(_size(variable) for variable in variables)
    return UpdatePlan(
        count >= PAYS_FROM or len(variables) >= PAYS_FROM_VARIABLES,
        f"{count:,} trained numbers in {len(variables)} variables: it is faster from {PAYS_FROM:,} "
        f"numbers, or {PAYS_FROM_VARIABLES} variables, on",
    )


def _plan_of_sharded(
    asked: str | bool,
    alone: Sequence[Any],
    optimizer: Any,
    variables: Sequence[Any],
    strategy: tf.distribute.Strategy,
) -> UpdatePlan:
    """Returns the plan for variables that live on one device alone, which has no alternative."""
    which = f"{len(alone)} sharded variables, such as {alone[0].path!r}"
    if asked is False:
        raise TfMultiGpuError(
            "A variable that lives on one device alone is updated there. Received: "
            f"shard_update=False for a model with {which}. Leave shard_update out, or create the "
            "model without tmg.sharded_variables()."
        )
    known = optimizer_trains(optimizer)
    check_divisible(optimizer, known or variables, strategy, which, built=bool(known))
    return UpdatePlan(True, f"the model has {which}")


def check_divisible(
    optimizer: Any,
    variables: Sequence[Any],
    strategy: tf.distribute.Strategy,
    which: str,
    *,
    built: bool,
) -> None:
    """Checks that an optimizer can update sharded variables, each on its device.

    Args:
        optimizer: As for ``plan_update``.
        variables: What it trains; none asks about the optimizer alone.
        strategy: As for ``plan_update``.
        which: The sharded variables, for a person.
        built: Whether the optimizer may be built already.

    Raises:
        TfMultiGpuError: It cannot.
    """
    obstacle = _obstacle(optimizer, variables, strategy, built=built)
    if obstacle is not None:
        raise TfMultiGpuError(
            "A variable that lives on one device alone is updated there, and this update cannot be "
            f"divided: {obstacle}. Received: a model with {which}. Create the model without "
            "tmg.sharded_variables(); or, if the optimizer is the reason, take an optimizer of "
            "Keras such as Adam, AdamW, SGD or Lion."
        )


def can_be_sharded(
    optimizer: Any, variables: Sequence[Any], strategy: tf.distribute.Strategy
) -> bool:
    """Returns whether a step could still have each variable updated by one replica."""
    several = strategy.num_replicas_in_sync > 1
    return several and _obstacle(optimizer, variables, strategy) is None


def _obstacle(
    optimizer: Any,
    variables: Sequence[Any],
    strategy: tf.distribute.Strategy,
    *,
    built: bool = False,
) -> str | None:
    """Returns why an update cannot be sharded; None if it can.

    Args:
        optimizer: The optimizer.
        variables: What it trains.
        strategy: Their strategy.
        built: Whether the optimizer may be built already.
    """
    kind = type(optimizer)
    if not is_mirrored(strategy):
        return f"{type(strategy).__name__} has no two devices that one process could write to"
    if hasattr(optimizer, "optimizers"):
        return f"{kind.__name__} holds several optimizers"
    if not is_own_class_of_keras(optimizer):
        return (
            f"{kind.__name__} is not an optimizer of Keras, so whether it updates each variable "
            "by itself is not known"
        )
    if optimizer.built and not built:
        return "the optimizer was built before the step was made, with its state on every replica"
    if len({variable.path for variable in variables}) < len(variables):
        return "two variables have the same path"
    try:
        owned, made = outside_scopes(lambda: _state_of_a_trial(optimizer))
    except (NotImplementedError, TypeError, ValueError) as error:
        return f"{kind.__name__} cannot be made again from its settings ({error})"
    if owned < made:
        return f"{kind.__name__} keeps state that is not of the shape of a variable"
    return None


def slots_of_each_variable(optimizer: Any) -> int:
    """Returns how many variables of the shape of a variable an optimizer keeps beside it."""
    return outside_scopes(lambda: _state_of_a_trial(optimizer))[0]


def _state_of_a_trial(optimizer: Any) -> tuple[int, int]:
    """Returns how many variables an optimizer makes from a small one, and how many it makes."""
    made: list[Any] = []
    trial = _make_again(
        optimizer, [tf.Variable(tf.constant(0, tf.int64), trainable=False)], lambda: 0.1
    )
    tiny = tf.Variable(tf.zeros([2, 2]))
    with owned_state(trial, lambda _: 0, [tiny.device]) as owned:

        def count(create: Any, **options: Any) -> Any:
            made.append(create(**options))
            return made[-1]

        import keras

        with using(iter([tiny])):
            variable = keras.Variable("zeros", shape=(2, 2), name="trial")
        with tf.variable_creator_scope(count):
            trial.build([variable])
    return len(owned), len(made)


def _make_again(optimizer: Any, variables: list[Any], learning_rate: Callable[[], Any]) -> Any:
    """Another optimizer of the same settings, whose first variables are those given."""
    config = {
        **optimizer.get_config(),
        **dict.fromkeys(_DONE_BEFORE),
        "learning_rate": learning_rate,
    }
    with using(iter(variables)):
        return type(optimizer).from_config(config)


def shard_update(
    optimizer: Any, variables: Sequence[Any], strategy: tf.distribute.Strategy
) -> ShardedUpdate:
    """Builds an optimizer with its state sharded, or returns what it was built with before.

    Args:
        optimizer: A Keras optimizer for which ``plan_update`` says that it can be sharded.
        variables: The variables it will train.
        strategy: Their strategy.
    """
    if optimizer not in _sharded:
        _sharded[optimizer] = ShardedUpdate(optimizer, variables, strategy)
    return _sharded[optimizer]


class ShardedUpdate:
    """The owners' side of an optimizer.

    Attributes:
        devices: The device of each replica.
        owners: The owner of each trained variable, by ``id`` of the variable.
        state: The ``id`` of each variable of the user's optimizer that exists once.
    """

    def __init__(
        self, optimizer: Any, variables: Sequence[Any], strategy: tf.distribute.Strategy
    ) -> None:
        """Builds the optimizer of the user, and one for each owner on the same variables."""
        self.devices: tuple[str, ...] = tuple(strategy.extended.worker_devices)
        replicas = range(len(self.devices))
        built = bool(optimizer.built)
        variables = optimizer_trains(optimizer) if built else variables
        fixed = {
            i: owner_of(one, self.devices) for i, one in enumerate(variables) if is_sharded(one)
        }
        if built:  # What is read of a mirrored variable is that of the first replica.
            fixed = {i: fixed.get(i, 0) for i in range(len(variables))}
        sizes = [_size(variable) for variable in variables]
        owners = assign_owners(sizes, len(self.devices), fixed)
        self.owners = {id(v): owner for v, owner in zip(variables, owners, strict=True)}
        self._optimizer = weakref.ref(optimizer)  # The owners must not keep it alive.
        self._strategy = strategy
        self._variables = list(variables)
        self._learning_rate: Any = None
        counters = strategy.experimental_local_results(optimizer.iterations.value)
        own = (id(optimizer.iterations), id(optimizer.learning_rate))
        if built:
            state = [one for one in optimizer.variables if id(one) not in own]
            made = outside_scopes(lambda: self._state_of(optimizer, variables, state, counters[0]))
        else:
            with (
                strategy.scope(),
                owned_state(optimizer, self._owner, self.devices) as made,
            ):
                optimizer.build(list(variables))
        self.state = frozenset(id(one) for one in optimizer.variables if id(one) not in own)
        twins = [
            component_as_keras(v, self._component(v, owner))
            for v, owner in zip(variables, owners, strict=True)
        ]
        self._twins = {id(v): twin for v, twin in zip(variables, twins, strict=True)}
        self._by_owner: list[Any] = []

        def build() -> None:
            for r in replicas:
                with tf.device(self.devices[r]):
                    again = _make_again(optimizer, [counters[r]], lambda: self._learning_rate)
                    with using(iter([one for owner, one in made if owner == r])):
                        again.build([t for t, o in zip(twins, owners, strict=True) if o == r])
                self._by_owner.append(again)

        outside_scopes(build)
        optimizer.apply = _refuse

    def _owner(self, variable: Any) -> int:
        return self.owners[id(variable)]

    def _state_of(
        self, optimizer: Any, variables: Sequence[Any], state: Sequence[Any], counter: Any
    ) -> list[tuple[int, tf.Variable]]:
        """Returns the owner of each variable of an optimizer that is built, in their order."""
        again = _make_again(optimizer, [counter], lambda: self._learning_rate)
        values = iter([self._components(one)[0] for one in state])
        with owned_state(again, self._owner, self.devices, values) as made:
            again.build(list(variables))
        return made

    def at(self, variable: Any) -> AbstractContextManager[Any]:
        """Places what is computed of a variable on the device of its owner."""
        device: AbstractContextManager[Any] = tf.device(self.devices[self.owners[id(variable)]])
        return device

    def places(self, variables: Sequence[Any], present: Sequence[Sequence[bool]]) -> list[str]:
        """Returns where what replicas return is added: gradients with the owners, then the rest.

        Args:
            variables: The trained variables.
            present: For each backward pass, which of them have a gradient.
        """
        owners = [self.owners[id(variable)] for variable in variables]
        used = [o for one in present for o, here in zip(owners, one, strict=True) if here]
        return [self.devices[owner] for owner in [*used, 0]]

    def apply(
        self, gradients: Sequence[tf.Tensor], variables: Sequence[Any], after: Sequence[Any]
    ) -> None:
        """Updates variables on all replicas; call while a step is traced, for all replicas at once.

        Args:
            gradients: Those of the global batch, not scaled, on the devices of the owners.
            variables: The variables, some of those it was built for.
            after: What must not have failed before anything is assigned.
        """
        outside_scopes(lambda: self._apply(list(gradients), list(variables), tf.group(*after)))

    def _apply(self, gradients: list[tf.Tensor], variables: list[Any], after: Any) -> None:
        optimizer: Any = self._optimizer()
        self._follow(optimizer)
        # Before any counter is advanced, for a schedule asks them.
        self._learning_rate = tf.convert_to_tensor(optimizer.learning_rate)
        limit = optimizer.global_clipnorm
        if limit is not None and gradients:
            gradients = clipped(gradients, limit, global_norm(gradients))
        if gradients:
            with tf.control_dependencies([after]):
                for owner, own in enumerate(self._by_owner):
                    mine = [i for i, v in enumerate(variables) if self.owners[id(v)] == owner]
                    with tf.device(self.devices[owner]):
                        if mine:
                            twins = [self._twins[id(variables[i])] for i in mine]
                            # A sum over one replica would add nothing, but TensorFlow keeps its
                            # graph for ever.
                            with gradients_already_summed(own):
                                own.apply([gradients[i] for i in mine], twins)
                        else:
                            if own.use_ema:
                                update_averages(own)
                            own.iterations.assign_add(1)
        overwrites = optimizer.use_ema and optimizer.ema_overwrite_frequency
        for variable in self._variables if overwrites else variables:
            self._copy(variable)

    def _copy(self, variable: Any) -> None:
        components = self._components(variable)
        if len(components) == 1:
            return
        owner = self.owners[id(variable)]
        with tf.device(self.devices[owner]):
            value = components[owner].read_value()
        for replica, component in enumerate(components):
            if replica != owner:
                with tf.device(self.devices[replica]):
                    component.assign(value)

    def _follow(self, optimizer: Any) -> None:
        """Takes over settings that were changed since, as every new trace of a step does."""
        for own in self._by_owner:
            own.exclude_from_weight_decay()  # Forgets what was decided; what was set follows.
        for name, value in vars(optimizer).items():
            if isinstance(value, _SETTINGS) and name not in _DONE_BEFORE:
                for own in self._by_owner:
                    setattr(own, name, value)

    def _component(self, variable: Any, owner: int) -> tf.Variable:
        components = self._components(variable)
        return components[owner if len(components) > 1 else 0]

    def _components(self, variable: Any) -> tuple[tf.Variable, ...]:
        return tuple(self._strategy.experimental_local_results(variable.value))


_sharded: weakref.WeakKeyDictionary[Any, ShardedUpdate] = weakref.WeakKeyDictionary()


def _refuse(*_: Any, **__: Any) -> None:
    raise TfMultiGpuError(
        "The state of this optimizer is sharded over the replicas since tmg.fit or a step of "
        "make_train_step used it first: each part of it exists once, and replicas that called "
        "optimizer.apply (apply_gradients, Keras' own fit) would each change it. To use it there "
        "too, write shard_update=False in that call, tmg.fit(..., shard_update=False) or "
        "make_train_step(..., shard_update=False), and make the optimizer anew. Sharded "
        "variables are updated by tmg.fit and by a step only."
    )


def owned_variables(optimizer: Any) -> frozenset[int]:
    """Returns the ``id`` of each variable of an optimizer that exists once, with its owner."""
    known = _sharded.get(optimizer)
    return frozenset() if known is None else known.state


def swap_averages(optimizer: Any) -> None:
    """Gives variables the values of their moving averages, and these theirs; outside of replicas.

    Args:
        optimizer: One with ``use_ema``, its state sharded or not.
    """
    for variable, average in moving_averages(optimizer):
        value = tf.identity(variable)
        variable.assign(average)
        average.assign(value)


def reset_averages(optimizer: Any) -> None:
    """Has moving averages begin anew, from the variables as they are; outside of replicas."""
    for variable, average in moving_averages(optimizer):
        average.assign(variable)


def placed(update: ShardedUpdate | None, variable: Any) -> AbstractContextManager[Any]:
    """Places what is computed of a variable where it is updated; anywhere, where that is all."""
    return nullcontext() if update is None else update.at(variable)


def _size(variable: Any) -> int:
    return int(tf.TensorShape(variable.shape).num_elements() or 0)
