"""Types of arguments, so that a type checker finds a misspelt choice or a misplaced object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeAlias

__all__ = [
    "Communication",
    "LossScaling",
    "Model",
    "Models",
    "Optimizer",
    "Prefer",
    "ShardUpdate",
    "StepsPerCall",
    "Strategy",
    "Verbose",
    "Verify",
]

Prefer: TypeAlias = Literal["auto", "tpu", "multi_worker", "mirrored", "one_device"]
Communication: TypeAlias = Literal["auto", "nccl", "ring", "hierarchical_copy", "one_device"]
Verify: TypeAlias = Literal["first", "gradients"] | bool
ShardUpdate: TypeAlias = Literal["auto"] | bool
LossScaling: TypeAlias = Literal["dynamic"] | float | None
StepsPerCall: TypeAlias = Literal["auto"] | int
Verbose: TypeAlias = Literal["auto", 0, 1, 2]


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

    def apply_gradients(self, grads_and_vars: Any, /) -> Any:
        """Updates variables."""

    def stateless_apply(self, optimizer_variables: Any, grads: Any, /, *args: Any) -> Any:
        """Returns updated values of variables."""


class Strategy(Protocol):
    """The public part of ``tf.distribute.Strategy``, which has no types where Keras is used."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""

    @property
    def extended(self) -> Any:
        """Further methods."""

    @property
    def cluster_resolver(self) -> Any:
        """The description of the cluster, or None."""

    def scope(self) -> AbstractContextManager[Any]:
        """Returns the context in which variables are created."""

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Calls a function on each replica."""

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Adds or averages a value over replicas."""

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates a value over replicas."""

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the values of the replicas of this process."""

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Distributes a dataset as TensorFlow does."""

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
        """Distributes one dataset for each worker."""

    def experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        """Returns one value for each replica."""


Models: TypeAlias = Model | Sequence[Model] | Mapping[str, Model]
