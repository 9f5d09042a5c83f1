"""What the functions ``make_..._step`` return: a computation that is called with batches."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self, cast

import keras
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.accumulation.table_rows import is_table
from tfmultigpu.lists import by_id, of_type, present
from tfmultigpu.steps.features.feature import BoundStep, Feature
from tfmultigpu.steps.features.logical_replicas import LogicalReplicas
from tfmultigpu.steps.features.lookups import written_of
from tfmultigpu.steps.features.micro_batches import MicroBatches
from tfmultigpu.steps.program import Key
from tfmultigpu.steps.retraces import Facts
from tfmultigpu.steps.runner import Runner
from tfmultigpu.steps.tally import Tallies
from tfmultigpu.steps.values import Call, Shards, Trace
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.strategies.topology import describe
from tfmultigpu.types import KerasLayer, KerasModel, KerasVariable, Nested, Shard

_OUTCOMES = {
    "same": "as on one device",
    "different": "not as on one device: print(step.verification)",
    "not verified": "not compared with one device: print(step.verification)",
}


class Step:
    """A computation that is called with batches: what the functions ``make_..._step`` return.

    Attributes:
        logical_replicas: Into how many it cuts each batch; None if into one for each replica.
    """

    runner: Runner
    logical_replicas: int | None = None

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(self, batch: Shard, *more: object) -> Nested:
        """Computes one batch.

        Args:
            batch: An element of a distributed dataset, or a whole global batch, which is cut here.
            *more: None may be given; they are named in the error.

        Returns:
            The logs, by name, as the function that made the step says; or the predictions.

        Raises:
            TypeError: It is called with several arguments.
            DataError: The batch has no rows, or was distributed for another strategy.
            ScopeError: It is called on a replica, or under another strategy.
        """
        if more:
            raise TypeError(f"A step takes one batch, not {1 + len(more)}. Write step((x, y)).")
        return self.runner(batch)


class ModelStep(Step):
    """A step of one model, with features.

    Attributes:
        strategy: The strategy.
        features: Its optional parts, in their order.
        model: The model.
        assigned: The Keras variables that its traces assign, by their ``id``; None before the
            first.
        beside: The layers that its traces call and that are not in the model, by their ``id``.
    """

    strategy: tf.distribute.Strategy
    features: tuple[Feature, ...]
    model: KerasModel
    assigned: dict[int, KerasVariable] | None = None
    beside: dict[int, KerasLayer]
    # What traces hold of the model. It stays alive, or another object could have its ``id``.
    _taken_in: _TakenIn | None = None
    _version = 0
    _called_before: tuple[KerasLayer, ...] = ()  # Beside the model, by the traces that are stale.

    def shown(self, *does: str) -> str:
        """Returns a line: what the step does, in a few words each, where, and if that was right."""
        status = "not called yet"
        if self.verification is not None:
            status = _OUTCOMES[self.verification.outcome]
        elif len(self.runner.programs):
            status = "not compared with one device"
        words = ", ".join([*does, describe(self.strategy)])
        return f"<{type(self).__name__} of {self.model.name!r}: {words}; {status}>"

    @property
    def parts(self) -> int:
        """How many parts a batch has at most: micro-batches of all replicas."""
        parts: int = self.logical_replicas or self.strategy.num_replicas_in_sync
        for feature in of_type(self.features, MicroBatches):
            parts *= feature.count
        return parts

    @property
    def why_each(self) -> str:
        """Why a function is traced for each replica, of all that is compiled now; "" if none is."""
        programs = self.runner.programs.now.programs
        return "; ".join(filter(None, dict.fromkeys(each.trace.why_each for each in programs)))

    def key(self) -> Key | None:
        """Returns what the model consists of, which layers are frozen, and how tables are read."""
        before = self._taken_in
        if before is None:
            return None
        now = _TakenIn.of(self.model, before.beside)
        if not now.has_objects_of(before):
            return None
        return Key((self._version, written_of(before.tables)), now.flags)

    def facts(self) -> Facts:
        """Returns what is trained and synchronized, and what is frozen of what a loss calls."""
        layers = all_layers(self.model)
        synchronized = [each.name for each in layers if getattr(each, "synchronized", False)]
        trained = [variable.path for variable in self.model.trainable_variables]
        frozen = [layer.name for layer in self._called_before if not layer.trainable]
        return {
            "the trained variables": trained,
            "the synchronized layers": synchronized,
            "the frozen layers beside the model": frozen,
        }

    def take_in(self, *, changed: bool = False) -> bool:
        """Notes the model as it is, before a trace; all traces are stale if it has changed.

        Args:
            changed: Whether something else has changed that traces hold.

        Returns:
            Whether they are stale; before the first, too.
        """
        is_stale = changed or self.key() is None
        if is_stale:
            self._version += 1
            self._called_before = tuple(self.beside.values())
            self.assigned, self.beside = None, {}
            self._taken_in = _TakenIn.of(self.model).with_tables()
        return is_stale

    def note_trace(self, trace: Trace) -> None:
        """Notes what a trace assigns, and the variables that the code of the user made in it."""
        self.assigned = (self.assigned or {}) | by_id(trace.state)
        if self._taken_in is not None:
            beside = tuple(self.beside.values())
            self._taken_in = _TakenIn.of(self.model, beside).with_tables()

    @property
    def verification(self) -> Any:
        """The comparison of the last verified step with one device; None before the first."""
        for feature in self.features:
            if feature.verification is not None:
                return feature.verification
        return None

    # Whoever traces a step calls these: no caller can leave out a context of a feature.

    def compute(self, shards: Shards, trace: Trace) -> tuple[Nested, Tallies]:
        """Computes one global batch, and assigns what changes; traced."""
        with self.around_trace():
            return self._compute(shards, trace)

    def look(self, shards: Shards, trace: Trace) -> Nested:
        """Computes one global batch and assigns nothing; traced."""
        with self.around_trace():
            return self._look(shards, trace)

    @contextmanager
    def around_trace(self) -> Iterator[None]:
        """Enters the contexts in which features have all of the step traced."""
        with ExitStack() as contexts:
            for feature in self.features:
                contexts.enter_context(feature.around_trace())
            yield

    def _compute(self, shards: Shards, trace: Trace) -> tuple[Nested, Tallies]:
        raise NotImplementedError

    def _look(self, shards: Shards, trace: Trace) -> Nested:
        raise NotImplementedError

    def around_call(self, call: Call) -> Call:
        """Returns a call with what features do around it."""
        for feature in self.features:
            call = feature.around_call(call)
        return call

    def features_on_one_device(self) -> list[Feature]:
        """Returns what takes the place of the features in the same step on one device."""
        return present(feature.on_one_device() for feature in self.features)

    def bind(self, known: Sequence[Feature] = ()) -> Self:
        """Gives itself to its features, but not to those that are ``known`` to have a step."""
        for feature in self.features:
            if id(feature) not in map(id, known):
                # Features of train steps alone ask for an optimizer.
                feature.bind(cast(BoundStep, self))
            if isinstance(feature, LogicalReplicas):
                self.logical_replicas = feature.count
        return self


class Looped:
    """A step whose results are sums, so that many batches can be computed in one call."""

    runner: Runner

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def run(self, iterator: Any, steps: int) -> dict[str, Nested]:
        """Computes up to ``steps`` batches in one call, which saves the cost of calls.

        Args:
            iterator: ``iter()`` of a distributed dataset, or of a plain dataset of global batches.
            steps: How many, at least 1.

        Returns:
            The logs, with ``"steps"``, an int64 scalar: how many ran, fewer if the data ended.
            Losses are means over these steps, each by its own weight. Weights and ``"skipped"``
            are sums. The rest describes the last step.

        Raises:
            DataError: ``iterator`` is not an iterator, or is for another strategy; or a batch has
                no rows.
            ValueError: ``steps`` is less than 1.
        """
        return self.runner.run(iterator, steps)[0]


# What a trace takes in of a model -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _TakenIn:
    """A model as it is at one time.

    Attributes:
        objects: Its layers, their dtypes and their variables, in order, then all of what is called
            beside it, and whether that is frozen or synchronized.
        flags: What may change of them and change back: which are frozen, and which layers are
            synchronized.
        beside: Layers that are not in the model, and that a trace has called, as a loss calls
            another model.
        tables: The large variables of the model.
    """

    objects: tuple[object, ...]
    flags: tuple[Hashable, ...]
    beside: tuple[KerasLayer, ...] = ()
    tables: tuple[KerasVariable, ...] = ()

    @classmethod
    def of(cls, model: KerasModel, beside: tuple[KerasLayer, ...] = ()) -> _TakenIn:
        """Returns what there is in a model now, and in layers beside it; asked at each step."""
        objects: list[object] = []
        flags: list[Hashable] = []
        for layer in all_layers(model):
            flags += layer.trainable, getattr(layer, "synchronized", None)
            objects += layer, getattr(layer, "dtype_policy", None)
            for variable in _compat.own_variables(layer):
                objects.append(variable)
                flags.append(variable.trainable)
        # Flags tell what is trained, unless the user says it: to ask Keras takes much longer.
        if model.__class__.trainable_variables is not keras.Model.trainable_variables:
            flags += map(id, model.trainable_variables)
        for layer in beside:
            # Not as flags: which layers are called is known after the trace, and its key is not.
            objects += layer.trainable, getattr(layer, "synchronized", None)
            objects += layer, getattr(layer, "dtype_policy", None), *_compat.own_variables(layer)
        return cls(tuple(objects), tuple(flags), beside)

    def has_objects_of(self, other: _TakenIn) -> bool:
        """Returns whether the layers and the variables are the same ones."""
        if len(self.objects) != len(other.objects):
            return False
        return all(map(operator.is_, self.objects, other.objects))

    def with_tables(self) -> _TakenIn:
        """Returns the same with its tables, which takes longer."""
        variables = [each for each in self.objects if isinstance(each, keras.Variable)]
        return dataclasses.replace(self, tables=tuple(filter(is_table, variables)))
