"""Holding a step to what one device computes on the same global batch."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.errors import ReplicaDependenceWarning, WorkerLostError
from tfmultigpu.optimizers.loss_scaling import LossScale
from tfmultigpu.steps.batch_function import BatchFunction, Shards, as_tensor
from tfmultigpu.steps.callers import stack_level_of_user
from tfmultigpu.steps.multi_step import TERMS, MultiStep
from tfmultigpu.steps.verification.advice import (
    advice_for_layer,
    advice_for_loss,
    advice_for_state,
    advice_for_value,
    advice_for_weight,
    name_of,
)
from tfmultigpu.steps.verification.comparison import (
    Deviation,
    beyond_rounding,
    compare_copies,
    compare_gradients,
    compare_outputs,
    compare_states,
    compare_terms,
)
from tfmultigpu.steps.verification.effects import CannotVerifyError, first_line_of
from tfmultigpu.steps.verification.expectation import Expected
from tfmultigpu.steps.verification.global_batch import first_rows, join, size_in_bytes
from tfmultigpu.steps.verification.history import remember
from tfmultigpu.steps.verification.location import Located, Locator
from tfmultigpu.steps.verification.one_device import Computed, OneDevice
from tfmultigpu.steps.verification.outcome import Verification
from tfmultigpu.steps.verification.rounding import Rounding
from tfmultigpu.steps.verification.trial import Forward
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["Verifier"]

_ATTEMPTS = 3
GATHERED_BYTES = 64 * 2**20
_PART_ROWS = 4


class Verifier:
    """Compares what a step computes with what one device computes, changing nothing.

    Attributes:
        verification: The last outcome, or the difference that was found before it; None before the
            first.
    """

    verification: Verification | None = None
    _gradients: BatchFunction | None = None

    def __init__(
        self,
        objective: Forward,
        strategy: tf.distribute.Strategy,
        verify: bool | str,
        *,
        micro_batches: int = 1,
        jit_compile: bool = False,
        training: bool = True,
    ) -> None:
        """Takes what a step was given; ``verify`` as ``check_verify`` allows."""
        self._wants_gradients = verify == "gradients"
        self._objective = objective
        self._strategy = strategy
        self._training = training
        self._micro_batches = micro_batches
        self._always = verify is True
        needed = strategy.num_replicas_in_sync > 1 or micro_batches > 1
        self._first_attempts = _ATTEMPTS if verify and needed else 0
        self._attempts = self._first_attempts
        self._exchange = WorkerExchange(strategy)
        self._one_device = OneDevice(
            objective,
            strategy,
            training=training,
            gradients=self._wants_gradients,
            jit_compile=jit_compile,
        )
        remember(self)

    def renew(self) -> None:
        """Has the next step verified as if it were the first: the model is another one now."""
        self._attempts = self._first_attempts
        self.verification = None

    def _note(self, found: Verification) -> None:
        """Keeps an outcome, unless a step before this one was different."""
        if self.verification is None or self.verification.outcome != "different":
            self.verification = found

    @property
    def variables(self) -> list[Any]:
        """The variables of the model."""
        return list(self._objective.model.variables)

    def _is_small(self, rows: int | None) -> bool:
        """Returns whether a batch has too few rows to be cut."""
        if rows is None or rows >= max(self._strategy.num_replicas_in_sync, 2):
            return False
        reason = "the batch had fewer rows than there are replicas, so each computed all of it"
        self._note(Verification("not verified", 0, rows, reason))
        return True

    @property
    def is_due(self) -> bool:
        """True if the next step is to be verified."""
        return self._attempts > 0 and not tf.inside_function()

    def compare_gradients(self, function: BatchFunction) -> None:
        """Has the gradients compared too, if that was asked for.

        Args:
            function: Returns the gradient of each trained variable by its number, before clipping,
                and changes nothing.
        """
        self._gradients = function if self._wants_gradients else None

    def call(self, function: BatchFunction, batch: Any, loss_scale: LossScale | None = None) -> Any:
        """Runs a step on a batch, and holds it to one device if that is due.

        Args:
            function: The step, whose result has the terms of its loss under ``TERMS``.
            batch: What it takes.
            loss_scale: The loss scale of the step, or None.

        Returns:
            The result without the terms.
        """
        if not self.is_due or self._is_small(function.known_rows(batch)):
            logs = dict(function(batch))
            del logs[TERMS]
            return logs
        expected = self.expect(function.shards(batch), loss_scale)
        logs = dict(function(batch))
        stats = logs.pop(TERMS)
        if expected is not None:
            self.conclude(expected, stats)
        return logs

    def run(
        self, multistep: MultiStep, iterator: Any, steps: Any, loss_scale: LossScale | None = None
    ) -> dict[str, Any]:
        """Runs up to ``steps`` batches, one by one those that are to be held to one device.

        Args:
            multistep: The step in a loop.
            iterator: What it takes its batches from.
            steps: How many, at least 1.
            loss_scale: The loss scale of the step, or None.
        """
        multistep.check(iterator, steps)
        carry = None
        while self.is_due and (first := multistep.take(iterator)) is not None:
            shards, single = first
            expected = self.expect(shards, loss_scale)
            logs, carry, stats = multistep(single, 1, carry)
            if expected is not None:
                self.conclude(expected, stats)
            steps = steps - 1
            if steps == 0:
                return logs
        return multistep(iterator, steps, carry)[0]

    def expect(self, shards: Shards, loss_scale: LossScale | None = None) -> Expected | None:
        """Computes what one device would give for a batch, before the step takes it.

        Args:
            shards: The batch as the replicas of this process have it.
            loss_scale: The loss scale of the step, or None.

        Returns:
            What ``conclude`` is to be given after the step; None if the batch shows nothing.
        """
        if self._is_small(int(shards.global_rows)):
            self._attempts -= 0 if self._always else 1
            return None
        scale = 1.0 if loss_scale is None else loss_scale.value()
        local = tf.nest.map_structure(as_tensor, shards.local)
        expected = Expected(Shards(local, shards.offsets), loss_scale=scale)
        workers = self._exchange.workers
        if workers > 1:
            largest = int(self._exchange([size_in_bytes(expected.shards)]).max())
            if workers * largest > GATHERED_BYTES:
                return dataclasses.replace(expected, reason="workers do not send so large a batch")
        expected = self._alike(self._computed(expected))
        if self._gradients is not None and expected.computed is not None:
            gradients = dict(self._gradients.on_shards(expected.shards))
            expected = dataclasses.replace(expected, gradients=gradients)
        return expected

    def conclude(
        self,
        expected: Expected,
        stats: Any,
        *,
        outputs: Any = None,
    ) -> None:
        """Compares what the step computed, and warns if it differs from one device.

        Args:
            expected: What ``expect`` returned.
            stats: The sums of the terms of the loss over all replicas, then their weights.
            outputs: Predictions for each row of the batch, or None.
        """
        self._attempts = self._attempts if self._always else 0
        self._finish(expected, stats, outputs)
        if not self.is_due:
            self._one_device.forget()

    def _finish(self, expected: Expected, stats: Any, outputs: Any) -> None:
        if not expected.failure:
            try:
                self._conclude(expected, stats, outputs)
            except (WorkerLostError, ReplicaDependenceWarning):
                raise
            except Exception as error:  # A check must not end a training that goes well.
                failure = f"the comparison failed, {type(error).__name__}: {first_line_of(error)}"
                expected = dataclasses.replace(expected, failure=failure)
        if expected.failure:
            rows = int(expected.shards.global_rows)
            self._note(Verification("not verified", 0, rows, expected.failure))
            warnings.warn(
                f"The step could not be held to one device: {expected.failure}. A result that "
                "depends on how the batch is cut would not be noticed. To leave the check out, "
                "write verify=False.",
                ReplicaDependenceWarning,
                stacklevel=stack_level_of_user(),
            )

    def _conclude(self, expected: Expected, stats: Any, outputs: Any) -> None:
        rows = int(expected.shards.global_rows)
        if expected.computed is None:
            self._conclude_from_part(expected)
            return
        found = self._compare(expected.computed, stats, expected.gradients, outputs)
        if self._on_any_worker(found):
            found = self._beyond_rounding(expected, found)
        if not self._on_any_worker(found):
            self._note(Verification("same", rows, rows))
            return
        located = self._locate(first_rows(expected.shards, _PART_ROWS))
        self._report(found, located, rows, expected)

    def _conclude_from_part(self, expected: Expected) -> None:
        part = first_rows(expected.shards, _PART_ROWS)
        rows, total = int(part.global_rows), int(expected.shards.global_rows)
        located = self._locate(part)
        found: list[Deviation] = []
        if located is not None:
            found = self._compare_terms(*located.stats)
            if not found and located.difference is not None:
                found = [Deviation("layer", 0, located.difference, math.inf, math.inf)]
        if self._on_any_worker(found):
            self._report(found, located, rows, expected)
        else:
            outcome: Any = "not verified" if located is None else "same"
            self._note(Verification(outcome, rows, total, expected.reason))

    def _computed(self, expected: Expected) -> Expected:
        """Returns what one device computes, or why that is unknown."""
        try:
            batch = join(self._strategy, expected.shards)
            computed = self._one_device.compute(batch, expected.loss_scale)
        except WorkerLostError:
            raise
        except (MemoryError, tf.errors.ResourceExhaustedError):
            reason = "one device has not enough memory for the whole batch"
            return dataclasses.replace(expected, reason=reason)
        except CannotVerifyError as error:
            return dataclasses.replace(expected, failure=str(error))
        except Exception as error:  # The user's code may raise anything; training goes on.
            failure = (
                f"the forward pass fails outside of replicas, {type(error).__name__}: "
                f"{first_line_of(error)}"
            )
            return dataclasses.replace(expected, failure=failure)
        return dataclasses.replace(expected, batch=batch, computed=computed)

    def _alike(self, expected: Expected) -> Expected:
        """Returns what all workers can compare with, so that none waits for another."""
        if self._exchange.workers == 1:
            return expected
        partly, failed = self._exchange([bool(expected.reason), bool(expected.failure)]).max(axis=0)
        if failed:
            failure = expected.failure or "another worker could not compute the batch by itself"
            return dataclasses.replace(expected, failure=failure)
        if partly:
            reason = expected.reason or "another worker has not enough memory for the whole batch"
            return dataclasses.replace(expected, reason=reason, batch=None, computed=None)
        return expected

    def _on_any_worker(self, found: Sequence[Deviation]) -> bool:
        if self._exchange.workers == 1:
            return bool(found)
        return bool(self._exchange([bool(found)]).any())

    @property
    def _rounding(self) -> Rounding:
        return Rounding(all_layers(self._objective.model))

    def _compare_terms(self, one: Any, replicas: Any) -> list[Deviation]:
        return compare_terms(self._one_device.terms, one, replicas, self._rounding)

    def _compare(
        self, computed: Computed, stats: Any, gradients: dict[str, Any] | None, outputs: Any
    ) -> list[Deviation]:
        found = self._compare_terms(computed.stats, stats)
        states = self._one_device.states
        found += compare_states(states, computed, self._strategy, self._rounding)
        found += compare_copies(self._one_device.overwritten, self._strategy, self._rounding)
        if gradients is not None:
            variables = self._objective.trained
            each = [gradients.get(str(i)) for i in range(len(variables))]
            found += compare_gradients(variables, computed, each, self._rounding)
        if outputs is not None:
            found += compare_outputs(computed, outputs, self._rounding)
        return found

    def _beyond_rounding(self, expected: Expected, found: Sequence[Deviation]) -> list[Deviation]:
        computed = self._one_device.compute_with_moved_weights(
            expected.batch, self._rounding.compute, expected.loss_scale
        )
        terms = len(self._one_device.terms)
        return beyond_rounding(found, computed, terms, self._rounding.margin)

    def _locate(self, part: Shards) -> Located | None:
        """The first layer that depends on the cut; None if looking for it fails."""
        locator = Locator(self._objective, self._strategy, self._training, self._rounding)
        try:
            batch = join(self._strategy, part)
            if self._strategy.num_replicas_in_sync == 1:
                return locator.in_parts(batch)
            located = locator.on_replicas(part, batch)
            if located.layer is None and self._micro_batches > 1:
                return locator.in_parts(batch)
        except WorkerLostError:
            raise
        except Exception:  # The user's code may raise anything; the difference itself is known.
            return None
        return located

    def _report(
        self,
        found: Sequence[Deviation],
        located: Located | None,
        rows: int,
        expected: Expected,
    ) -> None:
        culprit, advice = self._explain(found, located)
        self.verification = Verification(
            "different",
            rows,
            int(expected.shards.global_rows),
            expected.reason,
            tuple(one.difference for one in found),
            culprit,
            advice,
        )
        warnings.warn(
            str(self.verification), ReplicaDependenceWarning, stacklevel=stack_level_of_user()
        )

    def _explain(self, found: Sequence[Deviation], located: Located | None) -> tuple[str, str]:
        """The first thing that depends on the cut, and the line to write."""
        by_parts = located is not None and located.in_parts
        if located is not None and located.layer is not None:
            layer = located.layer
            return name_of(layer), advice_for_layer(layer, by_micro_batches=by_parts)
        states = [one for one in found if one.kind in ("state", "copy")]
        terms = [one for one in found if one.kind == "term"]
        if not terms and states:
            assigned = [*self._one_device.states, *self._one_device.overwritten]
            variables = {id(one): one for one in assigned}
            return states[0].difference.quantity, advice_for_state(variables[states[0].index])
        if terms and all(self._one_device.terms[one.index].logged for one in terms):
            return terms[0].difference.quantity, advice_for_value()
        if terms and terms[0].weight:
            return terms[0].difference.quantity, advice_for_weight()
        # All layers agree: it is the loss, if the few rows that were looked at show it too.
        shown = located is not None and bool(self._compare_terms(*located.stats))
        culprit = terms[0].difference.quantity if terms and shown else ""
        return culprit, advice_for_loss(by_micro_batches=by_parts)
