"""What steps add up: sums and weights, and the one place that divides them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu.accumulation.loss_sum import OTHER_ROWS, LossTerm
from tfmultigpu.errors import LossError

_COUNTERS = ("steps", "rows", "skipped", "loss")  # The loss is multiplied by the rows.


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
        taken = (*_COUNTERS, "weight", "gradient_norm", "loss_scale")
        for name in (str(term.name) for term in terms if term.logged):
            if name in taken or name.endswith("_weight") or name.startswith("val_"):
                raise LossError(
                    f"A step or a validation logs {name!r} itself. Received: {name!r} among the "
                    "values of forward. Take another name."
                )
        plain = [dataclasses.replace(term, sum=None, weight=None) for term in terms]
        return cls((*plain, LossTerm(None, None, added=True)), trains)

    @property
    def own(self) -> tuple[LossTerm, ...]:
        """The terms that replicas compute: all but the regularization."""
        return self.terms[:-1]

    @property
    def measured(self) -> list[int]:
        """Numbers of the terms whose divisor is known only after the addition."""
        late = [t.per_row is None and not t.fixed and not t.logged for t in self.own]
        return [number for number, is_late in enumerate(late) if is_late]

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
        kept = [number for number, term in enumerate(terms) if not term.logged]
        known = [scaled[number] for number in kept if number not in late]
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
    """Numbers of one or more steps, not yet divided: ``tally + tally`` is that of both.

    Attributes:
        sums: Steps, rows, skipped steps, and the loss times the rows; then the sum of each term,
            the weight of each, and the mean of each times the rows: a float64 vector.
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
        factors = tf.constant([_factor(term) for term in layout.terms], tf.float64)
        counters = tf.stack([one, rows, wide[-1], tf.reduce_sum(means * factors) * rows])
        ends = tf.stack([tf.cast(value, tf.float64) for value in last])
        return cls(layout, tf.concat([counters, totals, divisors, means * rows], 0), ends)

    def __add__(self, other: Tally) -> Tally:  # type: ignore[override]
        """Returns the tally of both; what is only of the last step is that of ``other``."""
        sums = _padded(self.sums, other.sums) + other.sums
        return Tally(self.layout or other.layout, sums, other.last)

    def repeated(self, times: int) -> Tally:
        """Returns the sum of ``times`` steps on one batch as one step: its means are over them."""
        assert self.layout is not None
        count = len(self.layout.terms)
        once = [1.0 / times] * 2 + [1.0, 1.0 / times] + [1.0] * 2 * count + [1.0 / times] * count
        return self._replace(sums=self.sums * tf.constant(once, tf.float64))

    def logs(self) -> dict[str, Any]:
        """Divides, once: each mean by its own weight."""
        assert self.layout is not None
        terms = self.layout.terms
        size = len(_COUNTERS) + 3 * len(terms)
        values = tf.unstack(_padded(self.sums, tf.zeros([size], tf.float64)), num=size)
        steps, rows, skipped, _, *_ = values
        sums, weights, _ = self._by_term(values)
        means = [tf.math.divide_no_nan(*pair) for pair in zip(sums, weights, strict=True)]
        loss: Any = tf.add_n([_factor(t) * mean for t, mean in zip(terms, means, strict=True)])
        plain = terms[0].name is None and not terms[0].added
        logs = {"loss": loss, "weight": weights[0] if plain else rows}
        if self.layout.trains:
            last = tf.unstack(_padded(self.last, tf.zeros([2], tf.float64)), num=2)
            logs |= {"skipped": skipped, "gradient_norm": last[0], "loss_scale": last[1]}
        for term, mean, weight in zip(terms, means, weights, strict=True):
            if term.name is not None:
                logs |= {_key(term): mean, f"{term.name}_weight": weight}
        single = {name: tf.cast(value, tf.float32) for name, value in logs.items()}
        return {"steps": tf.cast(steps, tf.int64), **single}

    def additive(self) -> dict[str, float]:
        """Returns what epochs add up, by name: losses times rows, values and their weights.

        Logs of an epoch divide losses by ``"rows"``, as Keras does, and values by their weight.
        """
        if self.layout is None:  # No step yet, or none since a trace was made anew.
            return {"steps": 0.0}
        size = len(_COUNTERS) + 3 * len(self.layout.terms)
        values: list[float] = self.sums.numpy().tolist() or [0.0] * size
        sums = dict(zip(_COUNTERS, values, strict=False))
        for term, s, w, m in zip(self.layout.terms, *self._by_term(values), strict=True):
            if term.logged:
                sums |= {str(term.name): s, f"{term.name}_weight": w}
            elif term.name is not None:
                sums[_key(term)] = m
        return sums

    def _by_term(self, values: Any) -> tuple[Any, ...]:
        """The sums, the weights, and the means times rows."""
        assert self.layout is not None
        count, start = len(self.layout.terms), len(_COUNTERS)
        return tuple(values[start + i * count : start + (i + 1) * count] for i in range(3))


Tallies = Mapping[str, Tally]  # By the name of the step in a chain; "" for a step by itself.


def nothing() -> Tally:
    """Returns the tally of no step, to which any other can be added."""
    return Tally(None, tf.zeros([0], tf.float64), tf.zeros([0], tf.float64))


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


def additive(tallies: Tallies) -> dict[str, float]:
    """Returns what epochs add up, behind the names of the steps; all take the same rows."""
    return {
        f"{name}_{key}" if name and key not in ("steps", "rows") else key: value
        for name, tally in tallies.items()
        for key, value in tally.additive().items()
    }


def _key(term: LossTerm) -> str:
    return str(term.name) if term.logged else f"{term.name}_loss"


def _factor(term: LossTerm) -> float:
    """What the mean of a term counts in the loss."""
    return 0.0 if term.logged else term.factor


def _padded(vector: Any, like: Any) -> Any:
    """A vector with zeros for what it does not have: its length is known from the first step on."""
    if vector.shape == like.shape and vector.shape[0] is not None:
        return vector
    padded = tf.pad(vector, [[0, tf.size(like) - tf.size(vector)]])
    return tf.ensure_shape(padded, like.shape)
