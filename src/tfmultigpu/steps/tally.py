"""What steps add up: sums and weights, and the one place that divides them."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu.accumulation.losses import OTHER_ROWS, LossTerm

_COUNTERS = "steps", "rows", "skipped"


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is known of the terms of a loss before any number is: names, factors, divisors.

    The last term is the weight regularization, whose weight over several steps is that of their
    rows.
    """

    terms: tuple[LossTerm, ...]
    trains: bool = True  # Whether there are gradients, whose norm is logged.

    @classmethod
    def of(cls, terms: Sequence[LossTerm], *, trains: bool = True) -> Layout:
        """Returns the layout of the terms of one replica, which is that of all."""
        plain = [dataclasses.replace(term, sum=None, weight=None) for term in terms]
        return cls((*plain, LossTerm(None, None, added=True)), trains)

    @property
    def own(self) -> tuple[LossTerm, ...]:
        """The terms that replicas compute: all but the regularization."""
        return self.terms[:-1]

    @property
    def measured(self) -> list[int]:
        """Numbers of the terms whose divisor is known only after the addition."""
        return [i for i, t in enumerate(self.own) if t.per_row is None and not t.fixed]

    def targets(self, terms: Sequence[LossTerm], rows: Any, *factors: Any) -> list[Any]:
        """Returns what is differentiated: one scalar per divisor, that of the known ones first.

        A divisor that follows from the rows of the global batch divides here. For others the rows
        do, which keeps float16 gradients small; ``corrections`` does the rest after the addition.
        """
        scaled = []
        for term in terms:
            divisor = 1.0 if term.fixed else rows * (term.per_row or 1.0)
            product = tf.cast(term.factor / divisor, term.sum.dtype)
            for factor in factors:
                product = product if factor is None else product * tf.cast(factor, product.dtype)
            scaled.append(term.sum * product)
        late = self.measured
        known = [target for number, target in enumerate(scaled) if number not in late]
        wide = tf.float64 if any(v.dtype == tf.float64 for v in known) else tf.float32
        total = known if len(known) < 2 else [tf.add_n([tf.cast(v, wide) for v in known])]
        return [*total, *(scaled[number] for number in late)]

    def corrections(self, targets: int, weights: Sequence[Any], rows: Any) -> list[Any]:
        """Returns what the added gradients of each target are multiplied by; None for 1."""
        late = [weights[number] for number in self.measured]
        factors = [tf.math.divide_no_nan(tf.cast(rows, weight.dtype), weight) for weight in late]
        return [None] * (targets - len(factors)) + factors

    def unstack(self, stats: Any) -> tuple[list[Any], list[Any]]:
        """Returns the sums and the weights of the own terms, which are added as one vector."""
        values = tf.unstack(stats, num=2 * len(self.own))
        return values[: len(self.own)], values[len(self.own) :]

    def means(self, numbers: Sequence[Any], *, by_rows: bool = False) -> dict[str, Any]:
        """Divides the sums of a tally, tensors or floats: each by its own weight.

        ``by_rows`` divides losses as Keras does those of an epoch: by the rows, after each step has
        divided by its weight.
        """
        start, count, rows = len(_COUNTERS), len(self.terms), numbers[1]
        sums, weights, of_steps = (numbers[start + i * count :][:count] for i in range(3))
        divided = (of_steps, [rows] * count) if by_rows else (sums, weights)
        means = [_divided(*pair) for pair in zip(*divided, strict=True)]
        losses = [term.factor * mean for term, mean in zip(self.terms, means, strict=True)]
        plain = self.terms[0].name is None and not self.terms[0].added
        named = {"loss": functools.reduce(operator.add, losses)}
        named["weight"] = weights[0] if plain else rows
        for term, mean, weight in zip(self.terms, means, weights, strict=True):
            if term.name is not None:
                named |= {f"{term.name}_loss": mean, f"{term.name}_weight": weight}
        return named

    def check(self, weights: Sequence[Any], rows: Any) -> list[tf.Operation]:
        """Returns assertions that the weights are those that ``targets`` has divided by."""
        return [
            # tf.debugging.Assert would add two branches.
            tf.raw_ops.Assert(
                condition=abs(weight / tf.cast(rows * term.per_row, weight.dtype) - 1) < 1e-3,
                data=[OTHER_ROWS, weight, rows],
            )
            for term, weight in zip(self.own, weights, strict=True)
            if term.per_row is not None
        ]


class Tally(NamedTuple):
    """Numbers of steps, not yet divided: ``tally + tally`` is that of both.

    Of no step they are scalar zeros, to which any others can be added.

    Attributes:
        sums: Steps, rows and skipped steps; then the sum of each term, the weight of each, and the
            mean of each times the rows: a float64 vector.
        last: The gradient norm and the loss scale of the last step: a float64 vector.
    """

    layout: Layout | None  # None after no step.
    sums: Any
    last: Any

    @classmethod
    def of_step(
        cls,
        layout: Layout,
        sums: Sequence[Any],
        weights: Sequence[Any],
        penalty: Any,
        rows: Any,
        *,
        skipped: Any = 0.0,
        last: Sequence[Any] = (0.0, 1.0),
    ) -> Tally:
        """Returns the tally of one step."""
        wide = [tf.cast(value, tf.float64) for value in (*sums, *weights, penalty, skipped)]
        count = len(layout.own)
        one = tf.ones([], tf.float64)
        totals = tf.stack([*wide[:count], wide[-2] * rows])
        own = [one if term.fixed else w for term, w in zip(layout.own, wide[count:], strict=False)]
        divisors = tf.stack([*own, rows])
        means = tf.math.divide_no_nan(totals, divisors)
        counters = tf.stack([one, rows, wide[-1]])
        ends = tf.stack([tf.cast(value, tf.float64) for value in last])
        return cls(layout, tf.concat([counters, totals, divisors, means * rows], 0), ends)

    def __add__(self, other: Tally) -> Tally:  # type: ignore[override]
        """Returns the tally of both; what is only of the last step is that of ``other``."""
        return Tally(self.layout or other.layout, self.sums + other.sums, other.last)

    def logs(self) -> dict[str, Any]:
        """Divides, once: each mean by its own weight."""
        assert self.layout is not None
        size = len(_COUNTERS) + 3 * len(self.layout.terms)
        numbers = tf.unstack(tf.broadcast_to(self.sums, [size]), num=size)
        logs = self.layout.means(numbers)
        if self.layout.trains:
            last = tf.unstack(tf.broadcast_to(self.last, [2]), num=2)
            logs |= {"skipped": numbers[2], "gradient_norm": last[0], "loss_scale": last[1]}
        single = {name: tf.cast(value, tf.float32) for name, value in logs.items()}
        return {"steps": tf.cast(numbers[0], tf.int64), **single}


Tallies = Mapping[str, Tally]  # By the name of the step in a chain; "" for a step by itself.


def add(tallies: Tallies, others: Tallies) -> Tallies:
    """Adds the tallies of several steps, each to that of the same name."""
    return {name: tallies[name] + others[name] for name in others} if tallies else others


def logs_of(tallies: Tallies) -> dict[str, Any]:
    """Returns the logs of several steps, each behind its name; that of ``"steps"`` is of all."""
    logs: dict[str, Any] = {}
    for name, tally in tallies.items():
        own = tally.logs()
        steps = {"steps": own.pop("steps")}
        own = {f"{name}_{key}" if name else key: value for key, value in own.items()}
        if both := sorted(own.keys() & logs.keys()):
            raise ValueError(
                "Two logs of a chain have one name, so one of them would be lost. Received: "
                f"{both} from the step {name!r} and from one before it. Give chain_steps other "
                "names."
            )
        logs = {**steps, **logs, **own}
    return logs


def logs_of_step(tallies: Tallies) -> dict[str, Any]:
    """Returns the logs of one step on one batch, which need not say how many steps they are of."""
    logs = logs_of(tallies)
    del logs["steps"]
    return logs


def _divided(total: Any, weight: Any) -> Any:
    if tf.is_tensor(total):
        return tf.math.divide_no_nan(total, weight)
    return total / weight if weight else 0.0
