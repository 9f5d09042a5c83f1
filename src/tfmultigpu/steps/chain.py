"""Several train steps in turn on each batch, as one step: ``chain_steps``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from tfmultigpu.arguments import check_count
from tfmultigpu.data.batch_format import with_dependencies
from tfmultigpu.steps.failures import effects_of, noting_operations
from tfmultigpu.steps.features import SEES, Sees, Shards
from tfmultigpu.steps.program import Batch, Program
from tfmultigpu.steps.step import Trained, TrainStep
from tfmultigpu.steps.tally import Tallies, Tally, logs_of


def chain_steps(
    *steps: TrainStep, names: Sequence[str] | None = None, times: Sequence[int] | None = None
) -> ChainedStep:
    """Makes one step of several train steps, which take each batch in turn.

    Each step sees the weights that the step before it has left. If a step raises, it has changed
    nothing, and those before it in the chain have trained on the batch.

    Args:
        *steps: Steps of ``make_train_step`` for the same strategy, such as those of a discriminator
            and a generator.
        names: A name for each step, which its logs begin with; None means the names of the
            models, or ``"step1"``, ``"step2"`` if these are not different.
        times: How many times each step takes a batch, such as ``(5, 1)`` for a critic that is
            trained five times as often; None means once.

    Returns:
        A step like that of ``make_train_step``, also for ``fit`` and ``Checkpoints``. Its logs are
        those of each step, as ``"NAME_loss"``. If a step takes a batch several times, its losses
        are means over them, weights and ``"NAME_skipped"`` are sums, and the rest is that of the
        last time.

    Raises:
        TypeError: Something is not a train step, or there are no steps.
        ValueError: There is another number of names or times, a name is given twice, or the steps
            belong to different strategies.

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
    if not steps or not all(isinstance(step, TrainStep) for step in steps):
        raise TypeError(
            "chain_steps takes steps of make_train_step, at least one. Received: "
            f"{[type(step).__name__ for step in steps]}. Write tmg.chain_steps(d_step, g_step)."
        )
    if any(step.strategy is not steps[0].strategy for step in steps):
        raise ValueError(
            "All steps of a chain must run on one strategy, because they take the same shards. "
            "Received: steps for different strategies. Make all with the same strategy argument."
        )
    numbered = [f"step{number}" for number in range(1, len(steps) + 1)]
    if names is None:
        own = [str(step.model.name) for step in steps]
        names = own if len(set(own)) == len(own) else numbered
    chosen = [names] if isinstance(names, str) else list(names)
    texts = {name for name in chosen if isinstance(name, str) and name}
    if len(texts) != len(steps) or len(chosen) != len(steps):
        raise ValueError(
            "The names of the steps begin their logs, so there is one for each, and they differ. "
            f"Received: names={names!r} for {len(steps)} step(s). Write names={tuple(numbered)}."
        )
    listed = [1] * len(steps) if times is None else times
    listed = listed if isinstance(listed, Sequence) else [listed]
    counts = [check_count("times", count) for count in listed]
    if len(counts) != len(steps):
        raise ValueError(
            f"times must have one entry for each step. Received: times={times!r} for {len(steps)} "
            f"step(s). Write times={(1,) * len(steps)!r}, for example."
        )
    return ChainedStep(dict(zip(chosen, steps, strict=True)), counts)


class ChainedStep(Program):
    """Several train steps in turn on each batch; what ``chain_steps`` returns.

    Attributes:
        steps: The steps by name, in order.
        times: How many times each takes a batch.
    """

    def __init__(self, steps: Mapping[str, TrainStep], times: Sequence[int]) -> None:
        """Use ``chain_steps``, which checks what it is given."""
        self.steps, self.times, self.names = dict(steps), tuple(times), tuple(steps)
        super().__init__(next(iter(self.steps.values())).strategy)

    @property
    def metrics(self) -> tuple[Any, ...]:
        """The Keras metrics that the steps update."""
        metrics = {id(metric): metric for s in self.steps.values() for metric in s.metrics}
        return tuple(metrics.values())

    @property
    def trained(self) -> tuple[Trained, ...]:
        """The models that the steps train, with optimizers and variables."""
        return tuple(part for step in self.steps.values() for part in step.trained)

    def changed_variables(self) -> list[Any]:
        """Returns the variables that the steps change; see ``TrainStep.changed_variables``."""
        return [v for step in self.steps.values() for v in step.changed_variables()]

    def states_beside_model(self) -> list[Any]:
        """Returns what the ``forward`` of a step assigns that no model and no metric of it has."""
        return [v for step in self.steps.values() for v in step.states_beside_model()]

    @property
    def verification(self) -> dict[str, Any]:
        """The comparison of each step with one device, by its name."""
        return {name: step.verification for name, step in self.steps.items()}

    def key(self) -> Hashable:
        """Returns the keys of the steps."""
        keys = tuple(step.key() for step in self.steps.values())
        return None if None in keys else keys

    def prepare(self, spec: Callable[[], Any]) -> None:
        """Prepares each step."""
        for step in self.steps.values():
            step.settle(spec)

    def sees(self) -> Sees:
        """Returns which batches a step wants to see by themselves, to verify them."""
        return min((step.sees() for step in self.steps.values()), key=SEES.index)

    def call(self, batch: Batch) -> tuple[dict[str, Any], Tallies]:
        """Runs one batch; if a step is to be verified, each step by itself."""
        if not self.is_seen(batch):
            return super().call(batch)
        tallies = {}
        for (name, step), times in zip(self.steps.items(), self.times, strict=True):
            each = [step.call(batch)[1][""] for _ in range(times)]
            tallies[name] = functools.reduce(Tally.__add__, each).repeated(times)
        logs = logs_of(tallies)
        del logs["steps"]
        return logs, tallies

    def compute(self, shards: Shards) -> dict[str, Tally]:
        """Runs the steps on a batch; traced."""
        tallies: dict[str, Tally] = {}
        for (name, step), times in zip(self.steps.items(), self.times, strict=True):
            each = []
            for _ in range(times):
                with noting_operations() as made:
                    each.append(step.compute(shards)[""])
                # Steps of other variables would run at the same time: if one failed, TensorFlow
                # would break off the update of the other. ``tf.control_dependencies`` does not
                # reach the threads of replicas, so the rows wait.
                local = [with_dependencies(effects_of(made), rows) for rows in shards.local]
                shards = shards._replace(local=local)
            tallies[name] = functools.reduce(Tally.__add__, each).repeated(times)
        return tallies
