"""Several train steps in turn on each batch, as one step: ``chain_steps``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.losses.objective import MeanKey
from tfmultigpu.steps.batch_function import BatchFunction, Shards
from tfmultigpu.steps.graph_effects import effects_of, noting_operations, run_after
from tfmultigpu.steps.multi_step import TERMS, LastKey, MultiStep
from tfmultigpu.steps.train_step import Trained, TrainStep, addends, as_totals
from tfmultigpu.steps.verification import Verification
from tfmultigpu.strategies.not_copied import NotCopied
from tfmultigpu.strategies.topology import local_replicas

__all__ = ["ChainedStep", "chain_steps"]

_OF_THE_LAST = ("gradient_norm", "loss_scale")


def chain_steps(
    *steps: TrainStep, names: Sequence[str] | None = None, times: Sequence[int] | None = None
) -> ChainedStep:
    """Makes one step of several train steps, which take each batch in turn.

    Each step sees the weights that the step before it has left. The result on N replicas is that of
    the same steps in turn on one device. If a step raises, it has changed nothing, and those before
    it in the chain have trained on the batch.

    Args:
        *steps: Steps of ``make_train_step`` for the same strategy, such as those of a discriminator
            and a generator.
        names: A name for each step, which its logs begin with; None means the names of the
            models, or ``"step1"``, ``"step2"`` if these are not different.
        times: How many times each step takes a batch, such as ``(5, 1)`` for a critic that is
            trained five times as often; None means once.

    Returns:
        A step like that of ``make_train_step``: ``logs = step(batch)``, ``step.run(iterator,
        steps)``, also for ``fit`` and ``Checkpoints``. The logs are those of each step, as
        ``"NAME_loss"``, ``"NAME_weight"`` and so on. If a step takes a batch several times, its
        losses are means over them, weights and ``"NAME_skipped"`` are sums, and the rest is that
        of the last time.

    Raises:
        TypeError: Something is not a train step, or a name is not a text.
        ValueError: There are no steps, or another number of names or times; a name is given twice;
            or the steps belong to different strategies.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> strategy = tmg.create_strategy()
        >>> with strategy.scope():
        ...     models = [keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])] * 2
        ...     optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)]
        >>> parts = [
        ...     tmg.make_train_step(model, optimizer, "mse", strategy)
        ...     for model, optimizer in zip(models, optimizers)
        ... ]
        >>> step = tmg.chain_steps(*parts, names=("first", "second"))
        >>> logs = step((np.ones((5, 2)), np.zeros((5, 1))))
        >>> float(logs["first_loss"]) >= float(logs["second_loss"])
        True
    """
    for step in steps:
        if not isinstance(step, TrainStep):
            raise TypeError(
                "chain_steps takes steps of make_train_step. Received: "
                f"{type(step).__name__}. Write tmg.chain_steps(d_step, g_step)."
            )
    if not steps:
        raise ValueError("chain_steps needs at least one step. Received: none.")
    if any(step.strategy is not steps[0].strategy for step in steps):
        raise ValueError(
            "All steps of a chain must run on one strategy, because they take the same shards. "
            "Received: steps for different strategies. Make all with the same strategy argument."
        )
    own = [str(step.model.name) for step in steps]
    numbered = [f"step{number}" for number in range(1, len(steps) + 1)]
    chosen = _one_each("names", names, steps) or (own if _differ(own) else numbered)
    if not all(isinstance(name, str) and name for name in chosen):
        raise TypeError(
            "The names of the steps begin their logs, so each is a text. Received: "
            f'names={names!r}. Write names=("critic", "generator").'
        )
    if not _differ(chosen):
        raise ValueError(
            "The names of the steps begin their logs, so they must differ. Received: "
            f'names={chosen!r}. Write names=("critic", "generator").'
        )
    counts = _one_each("times", times, steps) or [1] * len(steps)
    counts = [check_count("times", count) for count in counts]
    return ChainedStep(dict(zip(chosen, steps, strict=True)), counts)


class ChainedStep(NotCopied):
    """Several train steps in turn on each batch; what ``chain_steps`` returns.

    Attributes:
        steps: The steps by name, in order.
        times: How many times each takes a batch.
        strategy: The strategy that they run under.
    """

    def __init__(self, steps: Mapping[str, TrainStep], times: Sequence[int]) -> None:
        """Use ``chain_steps``, which checks what it is given."""
        self.steps = dict(steps)
        self.times = tuple(times)
        self.strategy = next(iter(self.steps.values())).strategy
        self._functions: dict[Any, tuple[BatchFunction, MultiStep, MultiStep]] = {}

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(self, batch: Any) -> dict[str, Any]:
        """Trains each step on one batch; see ``chain_steps`` for the logs."""
        if self._is_to_be_verified():
            return _flat(self._one_by_one(batch))
        function, _, _ = self._current(lambda step: step.function.spec_of(batch))
        return dict(function(batch))

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def run(self, iterator: Any, steps: int) -> dict[str, Any]:
        """Trains on up to ``steps`` batches in one call; see ``TrainStep.run``."""

        def look(batch: Any) -> dict[str, Any]:
            return {"steps": tf.constant(1, tf.int64), **_flat(self._one_by_one(batch))}

        logs = self._drive(iterator, steps, look, place=1, merge=_merged)
        return {name: value for name, value in logs.items() if name not in _OF_THE_CHAIN}

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def totals(self, iterator: Any, steps: int) -> dict[str, Any]:
        """Trains on up to ``steps`` batches, and returns sums; see ``TrainStep.totals``."""
        first = next(iter(self.steps.values()))

        def look(batch: Any) -> dict[str, Any]:
            rows = tf.cast(first.function.shards(batch).global_rows, tf.float64)
            found = _addends(self._one_by_one(batch), rows)
            return {"steps": tf.constant(1, tf.int64), **found}

        logs = self._drive(iterator, steps, look, place=2, merge=_added)
        return as_totals(logs)

    @property
    def metrics(self) -> tuple[Any, ...]:
        """The Keras metrics that the steps update."""
        found = {id(one): one for step in self.steps.values() for one in step.metrics}
        return tuple(found.values())

    @property
    def trained(self) -> tuple[Trained, ...]:
        """The models that the steps train, with optimizers and variables."""
        return tuple(one for step in self.steps.values() for one in step.trained)

    def changed_variables(self) -> list[Any]:
        """Returns the variables that the steps change; see ``TrainStep.changed_variables``."""
        return [one for step in self.steps.values() for one in step.changed_variables()]

    def states_beside_model(self) -> list[Any]:
        """Returns what the ``forward`` of a step assigns that no model and no metric of it has."""
        return [one for step in self.steps.values() for one in step.states_beside_model()]

    @property
    def verification(self) -> dict[str, Verification | None]:
        """The comparison of each step with one device, by its name."""
        return {name: step.verification for name, step in self.steps.items()}

    def _is_to_be_verified(self) -> bool:
        return any(step.is_to_be_verified for step in self.steps.values())

    def _one_by_one(self, batch: Any) -> dict[str, dict[str, Any]]:
        """Calls each step by itself, which verifies it; returns their logs by name."""
        found = {}
        for (name, step), times in zip(self.steps.items(), self.times, strict=True):
            logs = step(batch)
            for _ in range(times - 1):
                logs = _merged(logs, step(batch))
            found[name] = logs
        return found

    def _drive(
        self,
        iterator: Any,
        steps: Any,
        look: Callable[[Any], dict[str, Any]],
        place: int,
        merge: Callable[[Any, Any], dict[str, Any]],
    ) -> dict[str, Any]:
        """Runs up to ``steps`` batches, those that are to be verified one by one."""
        first = next(iter(self.steps.values()))
        first.multistep.check(iterator, steps)
        logs: dict[str, Any] | None = None
        while self._is_to_be_verified() and (batch := next(iterator, None)) is not None:
            one = look(batch)
            logs = one if logs is None else merge(logs, one)
            steps = steps - 1
            if steps == 0:
                return logs
        multistep = self._current(lambda step: step.multistep.batch_spec(iterator))[place]
        rest, _, _ = multistep(iterator, steps)
        return rest if logs is None else merge(logs, rest)

    def _current(self, spec: Callable[[TrainStep], Any]) -> Any:
        """Returns the functions compiled for the steps as they are now."""
        for step in self.steps.values():
            step.prepare(functools.partial(spec, step))
        key = tuple(step.function for step in self.steps.values())
        if key not in self._functions:
            local = local_replicas(self.strategy)
            function = BatchFunction(
                lambda shards: _flat(self._compute(shards)), self.strategy, local
            )
            looped = BatchFunction(self._compute_in_loop, self.strategy, local)
            adding = BatchFunction(self._compute_addends, self.strategy, local)
            self._functions[key] = function, MultiStep(looped), MultiStep(adding, wide=True)
        return self._functions[key]

    def _compute(self, shards: Shards) -> dict[str, dict[str, Any]]:
        """Runs the steps on a batch inside a ``tf.function``; returns their logs by name."""
        found: dict[str, dict[str, Any]] = {}
        before: list[Any] = []
        for (name, step), times in zip(self.steps.items(), self.times, strict=True):
            with noting_operations() as made:
                found[name] = _repeated(step, shards, times)
            # Steps of other variables would run at the same time: if one failed, TensorFlow would
            # break off the update of the other.
            run_after(made, before)
            # The logs of a step do not wait for its update.
            with tf.device("CPU:0"), tf.control_dependencies(effects_of(made)):
                before = [tf.no_op()]
        return found

    def _compute_in_loop(self, shards: Shards) -> dict[str, Any]:
        nothing = {"loss": tf.zeros([]), "weight": tf.zeros([])}
        return {**nothing, **_flat(self._compute(shards)), TERMS: tf.zeros([0])}

    def _compute_addends(self, shards: Shards) -> dict[str, Any]:
        rows = tf.cast(shards.global_rows, tf.float32)
        return {**_addends(self._compute(shards), rows), TERMS: tf.zeros([0])}


_OF_THE_CHAIN = ("loss", "weight", *_OF_THE_LAST)


def _repeated(step: TrainStep, shards: Shards, times: int) -> dict[str, Any]:
    """Runs a step so many times on one batch; returns its logs over all of them.

    Traces it here. TensorFlow fails to inline its compiled function, if that holds a loop, into the
    loop of ``MultiStep`` on several workers.
    """

    def once() -> dict[str, Any]:
        logs = dict(step.compute(shards))
        del logs[TERMS]
        return logs

    logs = once()
    if times == 1:
        return logs
    names = list(logs)

    def body(left: Any, *values: Any) -> tuple[Any, ...]:
        merged = _merged(dict(zip(names, values, strict=True)), once())
        return (left - 1, *[merged[name] for name in names])

    with tf.device("CPU:0"):
        left = tf.constant(times - 1)
    _, *values = tf.while_loop(
        lambda left, *_: left > 0, body, [left, *logs.values()], parallel_iterations=1
    )
    return dict(zip(names, values, strict=True))


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the logs of some steps and of further ones as those of all of them."""
    if "steps" in other and not tf.inside_function() and int(other["steps"]) == 0:
        return dict(one)
    merged = {}
    for name in one:
        weight = name.weight if isinstance(name, MeanKey) else "weight" if name == "loss" else None
        if isinstance(name, LastKey) or name in _OF_THE_LAST:
            merged[name] = other[name]
        elif isinstance(name, MeanKey) and name.sum:
            total = one[name.sum] + other[name.sum]
            merged[name] = tf.math.divide_no_nan(total, one[name.weight] + other[name.weight])
        elif weight is None:
            merged[name] = one[name] + other[name]
        else:
            before, after = one[weight], other[weight]
            share = tf.math.divide_no_nan(after, before + after)
            # Without weight a loss is that of regularization alone.
            share = tf.where(before + after > 0, share, 0.5)
            merged[name] = one[name] * (1 - share) + other[name] * share
    return merged


def _added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tf.cast(one[name], other[name].dtype) + other[name] for name in one}


def _addends(logs: Mapping[str, Mapping[str, Any]], rows: Any) -> dict[str, Any]:
    """Returns the logs of all steps as values that can be added up over batches."""
    found: dict[str, Any] = {"loss": tf.zeros([]), "weight": rows}
    for name, own in logs.items():
        found |= addends(own, rows, f"{name}_")
    return found


def _flat(logs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the logs of all steps in one dict, with keys that say how they add up."""
    flat: dict[str, Any] = {}
    for name, own in logs.items():
        for key, value in own.items():
            prefixed = _prefixed(name, key)
            if prefixed in flat:
                raise ValueError(
                    "Two logs of a chain have one name, so one of them would be lost. Received: "
                    f"{str(prefixed)!r} from the step {name!r} and from one before it. Give "
                    "chain_steps other names."
                )
            flat[prefixed] = value
    return flat


def _prefixed(name: str, key: str) -> str:
    if key in _OF_THE_LAST:
        return LastKey(f"{name}_{key}")
    weight = key.weight if isinstance(key, MeanKey) else "weight" if key == "loss" else None
    if weight is None:
        return f"{name}_{key}"
    mean = MeanKey(f"{name}_{key}")
    mean.factor, mean.weight = None, f"{name}_{weight}"
    own = key.sum if isinstance(key, MeanKey) else None
    mean.sum = own and f"{name}_{own}"
    return mean


def _one_each(what: str, given: Any, steps: Sequence[Any]) -> list[Any]:
    if given is None:
        return []
    values = [given] if isinstance(given, (str, int)) else list(given)
    if len(values) != len(steps):
        each = [f"step{i}" if what == "names" else 1 for i in range(1, len(steps) + 1)]
        raise ValueError(
            f"{what} must have one entry for each step. Received: {what}={given!r} for "
            f"{len(steps)} step(s). Write {what}={tuple(each)!r}, for example."
        )
    return values


def _differ(names: Sequence[str]) -> bool:
    return len(set(names)) == len(names)
