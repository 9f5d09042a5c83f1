"""What an optional part of a step may do: its hooks, and what it may know of its step.

Draws, micro-batches, loss scaling, clipping, XLA and verification are features; the features of
users are given to ``make_train_step(..., features=[...])``. ``steps/phases.py`` calls the hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from typing import Any, Protocol

from tfmultigpu.steps.values import Call, Gradient, Phase, Replica, Rows
from tfmultigpu.types import Context, KerasModel, KerasOptimizer, KerasVariable, Scalar

# run(body, most, count, values): number, *values = body(number, *values) for 1 to count - 1.
RunsParts = Callable[[Callable[..., Any], int, Any, Sequence[Any]], list[Any]]


class BoundStep(Protocol):
    """What a feature may know of its step.

    Attributes:
        strategy: The strategy.
        model: The Keras model.
        optimizer: The optimizer; of train steps alone.
        variables: The variables that it trains; of train steps alone.
        metrics: The Keras metrics that it updates.
        features: All its features, in their order.
    """

    strategy: Any
    model: KerasModel
    optimizer: KerasOptimizer
    metrics: Sequence[Any]
    features: Sequence[Feature]

    @property
    def variables(self) -> Sequence[KerasVariable]:
        """The variables that it trains."""


class Feature:
    """An optional part of a step. Each hook may be left as it is.

    ``bind`` is called once, ``around_call`` at each call, and all others while a step is traced.
    Features act in the order of their list: each wraps the phase that those before it have wrapped,
    and gets the gradient that those before it return.

    Attributes:
        variables: The Keras variables that the feature keeps.
        takes_lists: Whether ``on_gradient`` and ``after_update`` take, for a large table, a list of
            unique rows, a ``tf.IndexedSlices``. Else they get a tensor, which costs its size.
        colocates_gradients: Whether gradients are computed where the forward pass was.
        traces_once: Whether the function of a replica is traced once for all, if it can be.
        loop: Runs the micro-batches after the first, if not one after the other.
        verification: The result of a feature that compares its step with one device.
    """

    variables: Sequence[KerasVariable] = ()
    takes_lists = False
    colocates_gradients = False
    traces_once = False
    loop: RunsParts | None = None
    verification: Any = None

    def __init_subclass__(cls) -> None:
        """Refuses a method that is named nearly as a hook, and so would never be called."""
        hooks = [name for name in vars(Feature) if not name.startswith("_")]
        for name in vars(cls).keys() - set(hooks):
            if callable(vars(cls)[name]) and (near := get_close_matches(name, hooks, 1, 0.85)):
                raise TypeError(f"{cls.__name__}.{name} is never called. Name it {near[0]}.")

    def bind(self, step: BoundStep) -> None:
        """Keeps the step, creates variables, and raises if the two do not fit.

        Args:
            step: The step, before its first batch; its model may not be built yet.
        """

    def around_trace(self) -> Context:
        """Returns the context in which all of a step is traced, the update included."""
        return nullcontext()

    def around_model(self, rows: Rows) -> Context:
        """Returns the context, on a replica, in which the code of the user is traced.

        Args:
            rows: Which rows of the global batch this replica computes.
        """
        return nullcontext()

    def around_backward(self) -> Context:
        """Returns the context, on a replica, in which the gradients of one target are traced."""
        return nullcontext()

    def around_replica(self, replica: Replica) -> Replica:
        """Returns the function of one replica, compiled otherwise or placed elsewhere.

        Args:
            replica: ``replica(shard, rows, state, factor, total, trace=trace)``, which returns a
                ``Pass`` of tensors and changes no variable.
        """
        return replica

    def around_phase(self, phase: Phase) -> Phase:
        """Returns the function of all replicas, cut into parts or looped.

        Args:
            phase: ``phase(shards, trace)``, which returns a ``Pass`` for each replica; it is called
                outside of replicas.
        """
        return phase

    def loss_factor(self) -> Scalar:
        """Returns what the loss is multiplied by, a scalar; None for 1.

        The gradient is divided by the product of all factors after the addition.
        """
        return None

    def on_gradient(self, gradient: Gradient) -> Gradient:
        """Returns the gradient of the global batch, clipped, changed or forbidden.

        Args:
            gradient: As the features before this one have left it. This hook is called once, or on
                each replica if replicas share no memory; then all must return the same.
        """
        return gradient

    def after_update(self, gradient: Gradient) -> None:
        """Advances own state, after the update of the variables; called once.

        Args:
            gradient: The gradient of the update; ``gradient.valid`` says whether there was one.
        """

    def on_one_device(self) -> Feature | None:
        """Returns what takes its place in the same step on one device; None for nothing.

        Returns:
            ``self``, which is not bound again, if the feature keeps nothing of its step, or needs
            just what it keeps. A new object is bound to the step on one device.
        """
        return None

    def around_call(self, call: Call) -> Call:
        """Returns a call that also verifies or times the step; ``call`` itself to add nothing.

        Args:
            call: From a batch to the logs, and the tally of each step of a chain.
        """
        return call
