"""The loss of a model on one shard, as terms that can be added over shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching
from tfmultigpu.accumulation.losses import LossSum, LossTerm, as_loss, is_fixed, loss_term
from tfmultigpu.arguments import brief, check_callable
from tfmultigpu.data.batch_format import cast_all, count_rows, unpack_batch
from tfmultigpu.errors import LossError
from tfmultigpu.lists import by_id, names_of, pick, present
from tfmultigpu.steps.outputs import Output, match_outputs
from tfmultigpu.steps.tally import Layout, widest
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.types import (
    ForwardFunction,
    Function,
    KerasLayer,
    KerasModel,
    KerasVariable,
    Nested,
    Scalar,
    Shard,
    Tensor,
)
from tfmultigpu.user_code import warn

_FORWARD = "def forward(model, batch, training), which returns tmg.loss_sum(loss, y, outputs)."


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss with what belongs to it, for models of several outputs: an argument ``loss`` of steps.

    Attributes:
        loss: As for ``make_train_step``; None for an output without a loss.
        loss_weights: A number, or a dict or list of numbers, one per output.
        weighted_metrics: Keras metrics that are updated with sample weights; for several outputs a
            dict or list by output.

    Example:
        >>> import tfmultigpu as tmg
        >>> loss = {"kind": "sparse_categorical_crossentropy", "size": "mse"}
        >>> objective = tmg.steps.Objective(loss, loss_weights={"kind": 1.0, "size": 0.5})
        >>> objective.loss_weights["size"]
        0.5
    """

    loss: Any
    loss_weights: Nested = None
    weighted_metrics: Any = ()


@dataclasses.dataclass(frozen=True)
class Forward:
    """The forward pass of a step: from a shard to additive terms, and outputs for metrics.

    Attributes:
        forward: ``f(model, batch, training)`` in place of the losses, or None.
        chosen: The variables to train; None for the model's.
    """

    model: KerasModel
    objective: Objective
    forward: ForwardFunction | None = None
    chosen: tuple[KerasVariable, ...] | None = None

    @classmethod
    def of(
        cls,
        model: KerasModel,
        loss: Any,
        forward: ForwardFunction | None = None,
        variables: Sequence[KerasVariable] | None = None,
    ) -> Forward:
        """Creates a forward pass from the arguments of a step."""
        if forward is not None:
            check_callable("forward", forward, "model", "batch", "training", write=_FORWARD)
        if forward is not None and loss is not None:
            raise LossError(
                "Give either a loss, or forward=f(model, batch, training), which returns the "
                "LossSum itself.",
                f"loss={brief(loss)} and forward={brief(forward)}",
            )
        objective = loss
        if not isinstance(loss, Objective):
            objective = Objective(loss)
        losses = tf.nest.map_structure(
            lambda each: None if each is None else as_loss(each), objective.loss
        )
        objective = dataclasses.replace(objective, loss=losses)
        chosen = None if variables is None else _check_variables(variables, model)
        return cls(model, objective, forward, chosen)

    @property
    def loss_name(self) -> str:
        """The name of the loss, or the names of several."""
        if self.forward is not None:
            return getattr(self.forward, "__name__", type(self.forward).__name__)
        losses = present(tf.nest.flatten(self.objective.loss))
        return " + ".join(names_of(losses)) or "no loss"

    @property
    def trained(self) -> list[KerasVariable]:
        """The variables to train; a frozen variable is left out."""
        if self.chosen is None:
            return list(self.model.trainable_variables)
        return [variable for variable in self.chosen if variable.trainable]

    def __call__(self, shard: Shard, training: bool) -> tuple[list[LossTerm], list[Output]]:
        """Runs the model on a shard."""
        terms: list[LossTerm] = []
        outputs: list[Output] = []
        with self._recording_added_losses() as added:
            if self.forward is not None:
                term = _term_of_forward(self.forward(self.model, shard, training))
                reads = _reads_weights(shard, term)
                whole = added.is_computed
                terms.append(dataclasses.replace(term, reads_weights=reads, whole=whole))
            else:
                x, y, weight = unpack_batch(shard)
                names = getattr(self.model, "output_names", None)
                y_pred = self.model(x, training=training)
                losses, factors = self.objective.loss, self.objective.loss_weights
                outputs = match_outputs(y, y_pred, weight, losses, factors, names)
                # A step divides by the rows, of which an evaluation has no need.
                rows = count_rows(shard) if training else None
                for output in outputs:
                    if output.loss is not None:
                        terms.append(_term_of_output(output, rows))
        if not added.is_computed:
            for value in added.losses:
                terms.append(_term_of_added(value, count_rows(shard)))
        return terms, outputs

    @contextmanager
    def _recording_added_losses(self) -> Iterator[_Added]:
        """Yields what the layers of the model add, also for activity regularizers.

        The public ``model.losses`` is one list per model: with a synchronized layer, replicas clear
        and read each other's losses. A ``forward`` that reads it gets a warning. A ``compute_loss``
        that a ``forward`` calls may add it, and returns the whole loss, as in Keras.
        """
        # The model may be a weak reference, of which a bound method has the object itself.
        model = self.model.add_loss.__self__
        own = set(map(id, all_layers(model)))
        added = _Added()

        def add(original: Function, layer: KerasLayer, losses: Any) -> Tensor:
            if id(layer) in own:  # As in Keras, the losses of another model are its own.
                added.losses.extend(tf.nest.flatten(losses))
            return original(layer, losses)

        def compute(original: Function, *args: object, **kwargs: object) -> Tensor:
            with added.computing():
                return original(*args, **kwargs)

        def read(original: Function, layer: KerasLayer) -> Tensor:
            if added.is_computing and layer is model:
                penalties = present(map(penalty_of, model.trainable_variables))
                return [*added.losses, *(penalty for penalty, _ in penalties)]
            losses = original(layer)
            if losses and self.forward is not None and id(layer) in own and not added.is_computing:
                warn(
                    "forward reads the losses of the model, which the step adds by itself: the "
                    "losses of regularizers and of add_loss. In the sum that forward returns "
                    f"they would count twice. Received: losses of {layer.name!r}. Leave out "
                    "sum(model.losses)."
                )
            return losses

        layers = keras.layers.Layer
        computes = patching(type(model), "compute_loss", compute)
        with patching(layers, "add_loss", add), patching(layers, "losses", read), computes:
            yield added


@dataclasses.dataclass
class _Added:
    """What a forward pass adds to the loss.

    Attributes:
        losses: What layers have added.
        is_computed: Whether the forward has called the ``compute_loss`` of the model.
        is_computing: Whether it is in it.
    """

    losses: list[Tensor] = dataclasses.field(default_factory=list)
    is_computed: bool = False
    is_computing: bool = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Notes a call of ``compute_loss``."""
        self.is_computed = self.is_computing = True
        yield
        self.is_computing = False


@contextmanager
def undivided_losses() -> Iterator[None]:
    """Has losses of Keras return the mean of the rows that they get, as on one device.

    Keras divides it by the replicas too, for loops that add the gradients of means. A step divides
    what its replicas have added.
    """

    def keep(_: Function, value: Tensor) -> Tensor:
        return value

    module, names = _compat.division_of_losses()
    with ExitStack() as contexts:
        for name in names:
            contexts.enter_context(patching(module, name, keep))
        yield


def stack(terms: Sequence[LossTerm], row_weight: Scalar) -> tf.Tensor:
    """Returns the sums of the terms, then their weights, as one vector to add over shards."""
    parts = [term.sum for term in terms] + [term.weight for term in terms]
    if not parts:
        return tf.zeros([0])
    dtype = widest(parts)
    stats = tf.stack(cast_all(parts, dtype))
    if row_weight is None:
        return stats
    return tf.math.multiply_no_nan(stats, tf.cast(row_weight, dtype))  # Losses may be infinite.


def check_weights(layout: Layout, terms: Sequence[LossTerm], values: Sequence[Tensor]) -> None:
    """Checks that no weight depends on trained variables: only sums are differentiated."""
    weights = [term.weight for term in pick(terms, layout.measured)]
    if weights and values and present(tf.gradients(weights, list(values))):
        raise LossError(
            "The weight that divides the loss depends on trained variables, and a step "
            "differentiates only the sum.",
            "a weight that has a gradient",
            "Write tf.stop_gradient(weight) if it is to be a constant; else divide by the sum "
            "over all replicas: total = tf.reduce_sum(tmg.gather_rows(weights)); "
            "tmg.LossSum(tf.reduce_sum(weights * values) / total * rows.total, rows.count) with "
            "rows = tmg.rows().",
        )


def penalty_of(variable: KerasVariable, assigned: Tensor = None) -> tuple[Tensor, Tensor] | None:
    """Returns the penalty of a variable, a float32 scalar, and its gradient; None without one.

    Args:
        variable: A Keras variable, which carries its ``regularizer``.
        assigned: The value that a layer assigns to it in this step; None for its own.
    """
    regularizer = getattr(variable, "regularizer", None)
    if regularizer is None:
        return None
    if assigned is None:
        assigned = variable.value
    value = tf.convert_to_tensor(assigned)
    with tf.GradientTape() as tape:
        tape.watch(value)
        penalty = tf.cast(tf.reduce_sum(regularizer(value)), tf.float32)
    gradient = tape.gradient(penalty, value)
    if others := names_of(tape.watched_variables()):
        raise LossError(
            "A regularizer gets the value of its own variable, and this one reads others, whose "
            "gradient would be lost.",
            f"{variable.path!r}, whose regularizer reads {others}",
            "Add that penalty in a layer: self.add_loss(penalty).",
        )
    return penalty, gradient


def _check_variables(
    variables: Sequence[KerasVariable], model: KerasModel
) -> tuple[KerasVariable, ...]:
    """Returns the variables to train, each once."""
    chosen, known = by_id(variables), by_id(model.variables)
    strange = [variable for key, variable in chosen.items() if key not in known]
    if strange or not chosen:
        raise ValueError(
            "variables must hold variables of the model that the step is made for. Received: "
            f"{strange or 'no variable'}. Make several models attributes of one keras.Model."
        )
    return tuple(chosen.values())


def _term_of_output(output: Output, rows: Scalar) -> LossTerm:
    if output.y_true is None:
        raise LossError(
            "There is a loss but no labels.",
            f"y=None{'' if output.name is None else f' of output {output.name!r}'}",
            "Give batches (x, y) or (x, y, sample_weight) as tuples, because a list is x alone; "
            "or, for a loss without labels, forward=f(model, batch, training).",
        )
    term = loss_term(output.loss, output.y_true, output.y_pred, output.sample_weight, rows)
    return dataclasses.replace(term, name=output.name, factor=output.factor)


def _term_of_added(value: Tensor, rows: Scalar) -> LossTerm:
    """What a layer adds is a mean over its rows; what has an axis of rows is summed over them."""
    value = tf.cast(value, widest([value]))
    if value.shape.rank and value.shape[0] is None:
        total = tf.reduce_sum(value)
        return LossTerm(total, tf.ones_like(total), fixed=True, added=True)
    rows = tf.cast(rows, value.dtype)
    return LossTerm(tf.reduce_sum(value) * rows, rows, per_row=1.0, added=True)


def _reads_weights(shard: Shard, term: LossTerm) -> bool:
    """Returns whether the third part of a batch, if it has one, reaches a loss; in a graph."""
    if not isinstance(shard, tuple) or len(shard) != 3 or shard[2] is None:
        return True
    ends = {id(tensor) for tensor in tf.nest.flatten([term.sum, term.weight])}
    waiting = tf.nest.flatten(shard[2], expand_composites=True)
    reached: dict[int, Tensor] = {}
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in ends:
            return True
        if id(tensor) not in reached:
            reached[id(tensor)] = tensor
            for operation in tensor.consumers():
                waiting += operation.outputs
    return False


def _term_of_forward(result: Nested) -> LossTerm:
    if not isinstance(result, LossSum) or tf.convert_to_tensor(result.sum).shape.rank != 0:
        raise LossError(
            "forward returns a sum over its rows and the weight that divides it, so that replicas "
            "can be added.",
            brief(result),
            "Return tmg.loss_sum(loss, y_true, y_pred) or tmg.LossSum(tf.reduce_sum(values), "
            "count). For the logs of fit update a keras.metrics.Mean in it, an attribute of the "
            "model.",
        )
    # Half precision cannot count many rows.
    total, weight = cast_all(result, widest([tf.convert_to_tensor(result.sum)]))
    return LossTerm(total, weight, fixed=is_fixed(result))
