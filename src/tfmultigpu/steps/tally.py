"""What steps add up: sums and weights, and the one place that divides them."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfmultigpu.accumulation.losses import LossTerm
from tfmultigpu.accumulation.shown import shown
from tfmultigpu.data.batch_format import cast_all
from tfmultigpu.lists import pick
from tfmultigpu.types import Scalar, Tensor

# What a step logs of itself alone, and what it is if nobody says: steps do not add it up.
OF_LAST_STEP: dict[str, Scalar] = {"gradient_norm": 0.0, "loss_scale": 1.0}
# Those that follow from the gradient, and round and overflow as it does.
OF_GRADIENT = frozenset({"gradient_norm"})


class Numbers(NamedTuple):
    """The numbers of a tally, by name: tensors, or floats.

    Attributes:
        steps: How many steps they are of.
        rows: The rows of their global batches.
        skipped: How many updates were skipped.
        sums: For each term of the loss its sum.
        weights: For each term what divides its sum.
        means_of_rows: For each term the mean of each step times the rows of that step.
    """

    steps: Scalar
    rows: Scalar
    skipped: Scalar
    sums: Sequence[Tensor]
    weights: Sequence[Tensor]
    means_of_rows: Sequence[Scalar]

    @classmethod
    def of(cls, values: Sequence[Tensor]) -> Numbers:
        """Names the entries of ``Tally.sums``."""
        steps, rows, skipped, *of_terms = values
        count = len(of_terms) // 3
        sums, weights = of_terms[:count], of_terms[count : 2 * count]
        return cls(steps, rows, skipped, sums, weights, of_terms[2 * count :])

    @staticmethod
    def length(terms: int) -> int:
        """Returns how many numbers there are for so many terms."""
        return 3 + 3 * terms


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is known of the terms of a loss before any number is: names, factors, divisors.

    The last term is the weight regularization, whose weight over several steps is the number of
    their rows.
    """

    terms: tuple[LossTerm, ...]
    trains: bool = True  # Whether there are gradients, whose norm is logged.

    @classmethod
    def of(cls, terms: Sequence[LossTerm], *, trains: bool = True) -> Layout:
        """Returns the layout of the terms of one replica, which all have."""
        plain = [dataclasses.replace(term, sum=None, weight=None) for term in terms]
        return cls((*plain, LossTerm(None, None, added=True)), trains)

    @property
    def own(self) -> tuple[LossTerm, ...]:
        """The terms that replicas compute: all but the regularization."""
        return self.terms[:-1]

    @property
    def is_whole(self) -> bool:
        """Whether a ``compute_loss`` has returned the loss, with what regularizers add."""
        return any(term.whole for term in self.own)

    @property
    def reads_weights(self) -> bool:
        """Whether the sample weights of a batch, if it has any, reach the loss."""
        return all(term.reads_weights for term in self.own)

    @property
    def measured(self) -> list[int]:
        """Numbers of the terms whose divisor is known only after the addition."""
        return [i for i, t in enumerate(self.own) if t.per_row is None and not t.fixed]

    def targets(self, terms: Sequence[LossTerm], rows: Scalar, *factors: Scalar) -> list[Scalar]:
        """Returns what is differentiated: a scalar for each divisor, first for all known ones.

        ::

            known divisor:  factors * sum / divisor, all of these terms added
            others:         factors * sum / rows, one by one; ``corrections`` multiplies what was
                            added over the replicas by rows / weight

        A weight is known here if it follows from the rows of the global batch. Else the rows
        divide: a sum that nothing had divided would overflow float16.

        Args:
            terms: The terms of this replica.
            rows: The rows of the global batch, a float64 scalar.
            *factors: What every term is multiplied by, scalars; None for 1.
        """
        known: list[Tensor] = []
        measured: list[Tensor] = []
        for number, term in enumerate(terms):
            divisor = 1.0 if term.fixed else rows * (term.per_row or 1.0)
            product = tf.cast(term.factor / divisor, term.sum.dtype)
            for factor in factors:
                if factor is not None:
                    product = product * tf.cast(factor, product.dtype)
            if number in self.measured:
                measured.append(term.sum * product)
            else:
                known.append(term.sum * product)
        if len(known) > 1:
            known = [tf.add_n(cast_all(known, widest(known)))]
        return [*known, *measured]

    def corrections(self, targets: int, weights: Sequence[Tensor], rows: Scalar) -> list[Scalar]:
        """Returns what the added gradients of each target are multiplied by; None for 1."""
        factors: list[Scalar] = [None] * (targets - len(self.measured))
        for weight in pick(weights, self.measured):
            factors.append(tf.math.divide_no_nan(tf.cast(rows, weight.dtype), weight))
        return factors

    def unstack(self, stats: Tensor) -> tuple[list[Scalar], list[Scalar]]:
        """Returns the sums and the weights of the own terms, which are added as one vector."""
        values = tf.unstack(stats, num=2 * len(self.own))
        return values[: len(self.own)], values[len(self.own) :]

    def means(self, numbers: Numbers, *, by_rows: bool = False) -> dict[str, Scalar]:
        """Divides the sums of a tally: each by its own weight.

        ``by_rows`` divides losses as Keras divides the losses of an epoch: by the rows, after each
        step has divided by its weight.
        """
        sums, divisors = numbers.sums, numbers.weights
        if by_rows:
            sums, divisors = numbers.means_of_rows, [numbers.rows] * len(self.terms)

        losses: list[Tensor] = []
        named: dict[str, Tensor] = {}
        columns = self.terms, sums, divisors, numbers.weights
        for term, total, divisor, weight in zip(*columns, strict=True):
            mean = _divided(total, divisor)
            losses.append(term.factor * mean)
            if term.name is not None:
                named |= {f"{term.name}_loss": mean, f"{term.name}_weight": weight}

        first = self.terms[0]
        weight = numbers.rows
        if first.name is None and not first.added:
            weight = numbers.weights[0]
        return {"loss": functools.reduce(operator.add, losses), "weight": weight, **named}


class Tally(NamedTuple):
    """Numbers of steps, not yet divided: ``tally + tally`` counts both.

    Of no step they are scalar zeros, to which any others can be added.

    Attributes:
        sums: A float64 vector, whose entries ``Numbers`` names.
        last: ``OF_LAST_STEP`` of the last step: a float64 vector.
    """

    layout: Layout | None  # None after no step.
    sums: Tensor
    last: Scalar

    @classmethod
    def empty(cls) -> Tally:
        """Returns the tally of no step."""
        zero = tf.zeros([], tf.float64)
        return cls(None, zero, zero)

    @classmethod
    def of_step(
        cls,
        layout: Layout,
        sums_of_losses: Sequence[Scalar],
        weights: Sequence[Tensor],
        penalty: Scalar,
        rows: Scalar,
        *,
        skipped: Scalar = 0.0,
        **of_last_step: Scalar,
    ) -> Tally:
        """Returns the tally of one step, from scalars of any float dtype.

        Args:
            layout: The terms of the loss.
            sums_of_losses: For each term that replicas compute its sum over the global batch.
            weights: For each of these its weight.
            penalty: The weight regularization, the last term.
            rows: The rows of the global batch.
            skipped: Whether the update was skipped.
            **of_last_step: Numbers of ``OF_LAST_STEP``, by name.
        """
        sums: list[Tensor] = []
        divisors: list[Scalar] = []
        one = tf.ones([], tf.float64)
        for term, total, weight in zip(layout.own, sums_of_losses, weights, strict=True):
            sums.append(tf.cast(total, tf.float64))
            divisors.append(one if term.fixed else tf.cast(weight, tf.float64))
        sums.append(tf.cast(penalty, tf.float64) * rows)
        divisors.append(rows)

        totals, divided_by = tf.stack(sums), tf.stack(divisors)
        means = tf.math.divide_no_nan(totals, divided_by)
        counters = tf.stack([one, rows, tf.cast(skipped, tf.float64)])
        last = tf.stack(cast_all({**OF_LAST_STEP, **of_last_step}.values(), tf.float64))
        return cls(layout, tf.concat([counters, totals, divided_by, means * rows], 0), last)

    def __repr__(self) -> str:
        """Returns its numbers, not divided; inside a ``tf.function`` that there are none."""
        if tf.is_symbolic_tensor(self.sums):
            return "Tally(of a trace)"
        if not self.sums.shape.rank:
            return "Tally(of no step)"
        numbers = Numbers.of(self.sums.numpy().tolist())
        sums, weights = shown(list(numbers.sums)), shown(list(numbers.weights))
        counts = f"steps={numbers.steps:g}, rows={numbers.rows:g}, skipped={numbers.skipped:g}"
        return f"Tally({counts}, sums={sums}, weights={weights})"

    def __add__(self, other: Tally) -> Tally:  # type: ignore[override]
        """Returns the tally of both; of the last step what ``other`` has."""
        return Tally(self.layout or other.layout, self.sums + other.sums, other.last)

    def logs(self) -> dict[str, Tensor]:
        """Divides, once: each mean by its own weight."""
        assert self.layout is not None
        size = Numbers.length(len(self.layout.terms))
        # Of no step there are scalars in place of vectors.
        numbers = Numbers.of(tf.unstack(tf.broadcast_to(self.sums, [size]), num=size))
        logs = self.layout.means(numbers)
        if self.layout.trains:
            count = len(OF_LAST_STEP)
            last = tf.unstack(tf.broadcast_to(self.last, [count]), num=count)
            logs |= {"skipped": numbers.skipped, **dict(zip(OF_LAST_STEP, last, strict=True))}
        single = {name: tf.cast(value, tf.float32) for name, value in logs.items()}
        return {"steps": tf.cast(numbers.steps, tf.int64), **single}


def widest(tensors: Iterable[Tensor]) -> tf.DType:
    """Returns the dtype in which numbers of several dtypes are added: at least float32."""
    if any(tensor.dtype == tf.float64 for tensor in tensors):
        return tf.float64
    return tf.float32


Tallies = Mapping[str, Tally]  # By the name of the step in a chain; "" for a step by itself.


def vectors_of(tallies: Tallies) -> tuple[Tensor, ...]:
    """Returns the tensors of tallies, which compiled functions take and return."""
    return tuple(vector for tally in tallies.values() for vector in tally[1:])


def tallies_of(layouts: Mapping[str, Layout], vectors: Sequence[Tensor]) -> Tallies:
    """Returns the tallies to which vectors belong, by what their numbers are."""
    turn = iter(vectors)
    return {name: Tally(layout, next(turn), next(turn)) for name, layout in layouts.items()}


def layouts_of(tallies: Tallies) -> dict[str, Layout]:
    """Returns what the numbers of each tally are, as far as it is known."""
    return {name: tally.layout for name, tally in tallies.items() if tally.layout}


def steps_of(tallies: Tallies) -> int:
    """Returns how many steps tallies are of, outside of graphs."""
    for tally in tallies.values():
        if tally.sums.shape.rank:
            return int(Numbers.of(tally.sums.numpy()).steps)
    return 0


def add(tallies: Tallies, others: Tallies) -> Tallies:
    """Adds the tallies of several steps, each to the tally of the same name."""
    if not tallies:
        return others
    return {name: tallies[name] + others[name] for name in others}


def logs_of(tallies: Tallies) -> dict[str, Tensor]:
    """Returns the logs of several steps, each behind its name; ``"steps"`` counts all."""
    logs: dict[str, Tensor] = {}
    for name, tally in tallies.items():
        of_step = tally.logs()
        steps = {"steps": of_step.pop("steps")}
        if name:
            of_step = {f"{name}_{key}": value for key, value in of_step.items()}
        if both := sorted(of_step.keys() & logs.keys()):
            raise ValueError(
                "Two logs of a chain have one name, so one of them would be lost. Received: "
                f"{both} from the step {name!r} and from one before it. Give chain_steps other "
                "names."
            )
        logs = {**steps, **logs, **of_step}
    return logs


def logs_of_step(tallies: Tallies) -> dict[str, Tensor]:
    """Returns the logs of one step on one batch, which need not say how many steps they are of."""
    logs = logs_of(tallies)
    del logs["steps"]
    return logs


def _divided(total: Scalar, weight: Scalar) -> Scalar:
    if tf.is_tensor(total):
        return tf.math.divide_no_nan(total, weight)
    if not weight:
        return 0.0
    return total / weight
