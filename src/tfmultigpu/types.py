"""Types of arguments, and of what ``fit`` and the callbacks that resume it hand each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

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
Batches: TypeAlias = "tf.data.Dataset[Any]"  # Of batches, of examples, or of elements of a cut.
Scalar: TypeAlias = Any  # A tensor of shape (), or a number.
Tensor: TypeAlias = Any  # Dense, ragged or sparse; a gradient may be a list of rows.
Nested: TypeAlias = Any  # A structure of tensors, or of values of replicas.
Shard: TypeAlias = Any  # The rows of a replica, or a batch: a nested structure of tensors.
Function: TypeAlias = Callable[..., Any]  # Of a user or of TensorFlow, called as it is.
ForwardFunction: TypeAlias = Callable[[KerasModel, Shard, bool], Any]  # The last: training.
Context: TypeAlias = AbstractContextManager[Any]
Options: TypeAlias = dict[str, Any]  # Arguments by name.
Array: TypeAlias = np.ndarray[Any, Any]


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


class StepSums(NamedTuple):
    """Sums over batches of one step, in JSON types: a resumed run may have no further batch in it.

    Attributes:
        numbers: The numbers of its tally.
        terms: The fields of each term of its loss.
    """

    numbers: list[float]
    terms: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class FitStart:
    """Where a ``fit`` begins.

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
    step: int = 0
    batches: int = 0


class RunningFit(Protocol):
    """A running ``fit``, as a callback that saves and resumes it sees it.

    Attributes:
        callbacks: All callbacks of this worker, with ``History``.
        start: Where it began, in this process.
    """

    callbacks: Sequence[Any]
    start: FitStart

    @property
    def logical_replicas(self) -> int | None:
        """Into how many it cuts each batch; None if into one for each replica."""

    def batches(self) -> int:
        """Returns the batches so far, with those before a restart."""

    def sums(self) -> Mapping[str, StepSums]:
        """Returns by step the sums over the batches of this epoch, from which logs are made."""

    def restore_sums(self, sums: Mapping[str, Sequence[Any]]) -> None:
        """Puts back the sums of a resumed epoch, in its ``on_epoch_begin``."""

    def data(self) -> Mapping[str, Any]:
        """Returns what is known of the data, in JSON types."""

    def metric_variables(self) -> list[KerasVariable]:
        """Returns the variables of the metrics in the logs, which ``fit`` resets in each epoch."""

    def changed_variables(self) -> list[KerasVariable]:
        """Returns what the training changes: weights, optimizers, and states in closures."""

    def other_states(self) -> list[Any]:
        """Returns the state that its traces change: variables, tables, and what is out of reach."""


@runtime_checkable
class ResumingCallback(Protocol):
    """A callback that saves a ``fit`` and resumes it; every worker has the same ones.

    Its hooks of Keras come after the hooks of all other callbacks. So it sees their state, and what
    it restores stays.
    """

    def on_fit_begin(self, asked: FitStart, epochs: int) -> FitStart | None:
        """Returns where to begin, before data and step are prepared; None to begin as asked.

        Args:
            asked: Where the ``fit`` begins that nothing resumes.
            epochs: The number of the last epoch.
        """

    def on_fit_ready(self, fit: RunningFit) -> None:
        """Gets to know the ``fit``, before its ``on_train_begin``."""

    def on_fit_exit(self) -> None:
        """Lets go of the ``fit``, which has ended, also by an error."""
