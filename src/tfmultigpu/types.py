"""Types of arguments, and of what ``fit`` and the callbacks that resume it hand each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeAlias

Prefer: TypeAlias = Literal["auto", "tpu", "multi_worker", "mirrored", "one_device"]
Communication: TypeAlias = Literal["auto", "nccl", "ring", "hierarchical_copy", "one_device"]
Verify: TypeAlias = Literal["first", "gradients"] | bool
ShardUpdate: TypeAlias = Literal["auto"] | bool
LossScaling: TypeAlias = Literal["dynamic"] | float | None
StepsPerCall: TypeAlias = Literal["auto"] | int
Verbose: TypeAlias = Literal["auto", 0, 1, 2]

# Objects of Keras and TensorFlow, which no checker knows; the names say what they are.
KerasModel: TypeAlias = Any
KerasOptimizer: TypeAlias = Any
KerasVariable: TypeAlias = Any
KerasLayer: TypeAlias = Any
PhysicalDevice: TypeAlias = Any  # Of ``tf.config``.
Scalar: TypeAlias = Any  # A tensor of shape (), or a number.
Shard: TypeAlias = Any  # The rows of a replica, or a batch: a nested structure of tensors.
BatchSpec: TypeAlias = Any  # The type specs of a batch, in its structure.


class Model(Protocol):
    """The part of a Keras model that a checker compares; Keras itself has no types."""

    built: Any
    name: Any
    steps_per_execution: Any
    stop_training: Any

    def count_params(self) -> Any:
        """Returns the number of weights."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the outputs."""


class Optimizer(Protocol):
    """The part of a Keras optimizer that a checker compares."""

    apply_gradients: Callable[..., Any]
    stateless_apply: Callable[..., Any]


class Strategy(Protocol):
    """The public part of ``tf.distribute.Strategy``, which has no types where Keras is used."""

    run: Callable[..., Any]
    reduce: Callable[..., Any]
    gather: Callable[..., Any]
    experimental_distribute_dataset: Callable[..., Any]
    distribute_datasets_from_function: Callable[..., Any]
    experimental_local_results: Callable[..., tuple[Any, ...]]

    @property
    def cluster_resolver(self) -> Any:
        """The description of the cluster, or None."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""

    @property
    def extended(self) -> Any:
        """Further methods."""

    def scope(self) -> AbstractContextManager[Any]:
        """Returns the context in which variables are created."""


@dataclasses.dataclass(frozen=True)
class FitStart:
    """Where a resumed ``fit`` begins.

    Attributes:
        seed: The seed of the order of arrays.
        first_epoch: The ``initial_epoch`` of this ``fit`` in its first process.
        epoch: The epoch to begin with; the number of epochs if there is nothing left to do.
        step: Batches of this epoch that are done.
        batches: Batches of this ``fit`` that are done.
    """

    seed: int
    first_epoch: int
    epoch: int
    step: int
    batches: int


class RunningFit(Protocol):
    """A running ``fit``, as a callback that saves and resumes it sees it.

    Such a callback has ``on_fit_begin(fit)``, which returns where to begin, or None to begin as
    asked. ``fit`` calls it on every worker, before it prepares data and step, and ends with
    ``on_fit_exit()``, after an error too. Every other hook comes after the hooks of all other
    callbacks, so it sees their state, and what it restores stays.

    Attributes:
        callbacks: All callbacks of this worker, with ``History``.
        epochs: The number of the last epoch.
        first_epoch: The ``initial_epoch`` that was asked for, or as in the ``FitStart``.
        seed: The seed of the order of arrays, likewise.
        batches: Batches so far, with those before a restart.
        sums: Sums over the batches of this epoch, from which logs are made; empty before
            ``on_epoch_begin``. A callback may restore it there.
        data: What is known of the data, in JSON types, from ``on_train_begin`` on.
    """

    callbacks: Sequence[Any]
    epochs: int
    first_epoch: int
    seed: int
    batches: int
    sums: dict[str, float]
    data: Mapping[str, Any]

    def metric_variables(self) -> list[Any]:
        """Returns the variables of the metrics in the logs, which ``fit`` resets in each epoch."""

    def changed_variables(self) -> list[Any]:
        """Returns what the training changes: weights, optimizers, and states in closures."""

    def other_states(self) -> list[Any]:
        """Returns the state that its traces change: variables, tables, and what is out of reach."""
