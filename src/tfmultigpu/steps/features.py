"""What an optional part of a step may do, and the values that the parts of a step hand on.

A step has a replica phase, one addition, a global phase and one update::

    rows of a replica -> Pass        forward and backward; changes no variable
    all Passes -> sums               added once, over micro-batches and replicas
    sums -> Gradient, Tally          divided once
    Gradient -> variables            updated once

A ``Feature`` takes part in some of these. Draws, micro-batches, XLA, loss scaling, clipping and
verification are features; ``make_train_step(..., features=[...])`` takes those of users.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import count_rows

if TYPE_CHECKING:
    from tfmultigpu.steps.program import Program
    from tfmultigpu.steps.tally import Tallies


class Rows(NamedTuple):
    """The place of a replica's rows in the global batch, as scalars.

    Attributes:
        first: The number of the first row, int64.
        count: How many rows there are here, int64.
        total: The rows of the global batch, int64.
        weight: What each row counts, float64: 1, or 1 / copies if all replicas hold the same few
            rows; None for 1.
        parts: The micro-batches of the shard, int64; None if it is computed in one piece.
        copy: The number of the copy of these rows, int64; metrics count copy 0. None for 0.
    """

    first: Any
    count: Any
    total: Any
    weight: Any = None
    parts: Any = None
    copy: Any = None

    def cut(self, number: Any, parts: Any) -> Rows:
        """Returns the place of one of ``parts`` micro-batches of these rows."""
        start, stop = partition.part_bounds(self.count, parts, number)
        once = partition.row_weight(self.count, parts)
        weight = once if self.weight is None else self.weight * once
        copy = tf.where(self.count < parts, number, tf.zeros_like(number))
        copy = copy if self.copy is None else self.copy + copy
        return Rows(self.first + start, stop - start, self.total, weight, parts, copy)

    def share(self, replicas: int) -> Any:
        """Returns the part of each replica, micro-batch and copy of a weight that is 1 in total."""
        known = [tf.cast(n, tf.float64) for n in (self.weight, self.parts) if n is not None]
        return 1.0 / math.prod(known, start=replicas)

    def counts(self) -> Any:
        """Returns whether metrics count these rows, a bool or a bool scalar."""
        known = 0 if self.copy is None else tf.get_static_value(self.copy)
        return tf.equal(self.copy, 0) if known is None else bool(known == 0)


class Shards(NamedTuple):
    """A global batch, or a micro-batch of it, as this process computes it: all a replica is given.

    Attributes:
        local: For each replica of this process its rows, a structure of tensors.
        rows: The place of each.
        state: For each replica the values that assigned variables have before; () for their own.
        factor: What the loss is multiplied by before the backward pass; None for 1.
        total: The rows of the global batch, a float64 scalar.
    """

    local: list[Any]
    rows: list[Rows]
    state: list[tuple[Any, ...]]
    factor: Any
    total: Any

    @classmethod
    def of(cls, local: list[Any], offsets: Any, numbers: Sequence[int], replicas: int) -> Shards:
        """Returns the shards of the replicas ``numbers``; offsets as ``partition`` gives them."""
        with tf.device("CPU:0"):  # Shapes are decided there; nothing waits for a GPU.
            total = offsets[-1]
            weight = partition.row_weight(total, replicas) if replicas > 1 else None
            zero = tf.zeros([], tf.int64)
            places = [
                Rows(
                    offsets[number], count_rows(shard), total, weight,
                    copy=tf.where(total < replicas, zero + number, zero) if number else zero,
                )
                for number, shard in zip(numbers, local, strict=True)
            ]  # fmt: skip
            return cls(local, places, [()] * len(local), None, tf.cast(total, tf.float64))

    def cut(self, number: Any, parts: Any) -> Shards:
        """Returns one of ``parts`` micro-batches."""
        local = [partition.cut_part(shard, parts, number) for shard in self.local]
        with tf.device("CPU:0"):
            return self._replace(local=local, rows=[rows.cut(number, parts) for rows in self.rows])


class Pass(NamedTuple):
    """What a replica gives for some rows. Only tensors: it can be added, looped and compiled.

    Attributes:
        gradients: For each divisor, for each trained variable: of a sum, or None.
        stats: The sum of each term of the loss, then the weight of each.
        state: The new values of ``Trace.state``, in its order.
    """

    gradients: tuple[tuple[Any, ...], ...]
    stats: Any
    state: tuple[Any, ...]

    @property
    def addends(self) -> list[Any]:
        """What is added over micro-batches and replicas: the gradients that exist, then stats."""
        return [*[g for each in self.gradients for g in each if g is not None], self.stats]

    def with_addends(self, values: Sequence[Any]) -> Pass:
        """Returns the same with other tensors in place of ``addends``."""
        turn = iter(values)
        gradients = tf.nest.map_structure(
            lambda gradient: None if gradient is None else next(turn), self.gradients
        )
        return self._replace(gradients=gradients, stats=next(turn))


class Gradient(NamedTuple):
    """The gradient of the global batch, between the one division and the one update.

    Attributes:
        tensors: A tensor for each variable that has a gradient.
        norm: The norm of all together, a scalar.
        valid: Whether there is an update, a bool scalar; None if nothing can forbid it.
        variables: The Keras variables that they are for.
    """

    tensors: tuple[Any, ...]
    norm: Any
    valid: Any = None
    variables: tuple[Any, ...] = ()


Phase = Callable[[Shards], list[Pass]]  # Cross-replica: a Pass for each replica of this process.
Replica = Callable[..., Pass]  # In a replica: (shard, rows, state, factor, total) -> Pass.
Batch = tuple[Any, list[list[Any]], Any]  # A structure, the leaves of each shard, and offsets.
# Python: from a batch to the logs, and the tally of each step of a chain.
Call = Callable[[Batch], "tuple[dict[str, Any], Tallies]"]


class Feature:
    """An optional part of a step. Each hook may be left as it is.

    ``bind`` is called once. The others are called while a step is traced, ``around_call`` at each
    call. The order of features is that of the hooks: phases nest outwards, gradients run forwards.
    """

    variables: Sequence[Any] = ()
    colocates_gradients = False  # Whether gradients are computed where the forward pass was.

    def __init_subclass__(cls) -> None:
        """Refuses a method that is named nearly as a hook, and so would never be called."""
        hooks = [name for name in vars(Feature) if not name.startswith("_")]
        for name in vars(cls).keys() - set(hooks):
            if callable(vars(cls)[name]) and (near := get_close_matches(name, hooks, 1, 0.85)):
                raise TypeError(f"{cls.__name__}.{name} is never called. Name it {near[0]}.")

    def bind(self, step: Program) -> None:
        """Takes the step, creates variables, and raises if the two do not fit."""

    def around_trace(self) -> AbstractContextManager[Any]:
        """Returns the context in which all of a step is traced, the update included."""
        return nullcontext()

    def around_model(self, rows: Rows) -> AbstractContextManager[Any]:
        """Returns the context, on a replica, in which the code of the user is traced."""
        return nullcontext()

    def around_backward(self) -> AbstractContextManager[Any]:
        """Returns the context, on a replica, in which the gradients of one target are traced."""
        return nullcontext()

    def around_replica(self, replica: Replica) -> Replica:
        """Returns the function of one replica, compiled otherwise or placed elsewhere."""
        return replica

    def around_phase(self, phase: Phase) -> Phase:
        """Returns the function of all replicas, cut into parts or looped."""
        return phase

    def loss_factor(self) -> Any:
        """Returns what the loss is multiplied by, and the gradient then divided; None for 1."""
        return None

    def on_gradient(self, gradient: Gradient) -> Gradient:
        """Returns the gradient of the global batch, clipped, changed or forbidden."""
        return gradient

    def after_update(self, gradient: Gradient) -> None:
        """Advances own state, after the update of the variables."""

    def on_one_device(self) -> Feature | None:
        """Returns what takes its place in the same step on one device; None for nothing."""
        return None

    def around_call(self, call: Call) -> Call:
        """Returns one call of the step, verified or timed; ``call`` itself for no more of it."""
        return call
