"""Several train steps in turn on each batch, as one step: ``chain_steps``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import RLock
from typing import Any

from tfmultigpu.arguments import brief
from tfmultigpu.data.batch_format import with_dependencies
from tfmultigpu.lists import by_id, present
from tfmultigpu.steps.assignments import noting_effects
from tfmultigpu.steps.other_states import OtherState
from tfmultigpu.steps.program import Key
from tfmultigpu.steps.retraces import Facts
from tfmultigpu.steps.runner import Runner
from tfmultigpu.steps.step import Looped, Step
from tfmultigpu.steps.tally import Tallies, Tally, logs_of_step
from tfmultigpu.steps.train import TrainStep
from tfmultigpu.steps.values import Batch, Call, Shards, Trace
from tfmultigpu.strategies.topology import describe
from tfmultigpu.types import KerasVariable, Tensor


def chain_steps(*steps: TrainStep, names: Sequence[str] | None = None) -> ChainedStep:
    """Makes one step of several train steps, which take each batch in turn.

    Each step sees the weights that the step before it has left. A step that raises an error has
    changed nothing, but the steps before it have trained on the batch.

    Args:
        *steps: Steps of ``make_train_step`` for the same strategy, such as the steps of a
            discriminator and a generator. Give a step several times if it takes each batch several
            times.
        names: A name for each step, which its logs begin with; None means the names of the
            models, or ``"step1"``, ``"step2"`` if these are not different.

    Returns:
        A step as from ``make_train_step``, also for ``fit`` and ``Checkpoints``. Its logs are the
        logs of each step, as ``"NAME_loss"``.

    Raises:
        TypeError: An argument is not a train step, there is no step, or the strategies differ.
        ValueError: There is not one name for each step, or a name is given twice.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> once = tmg.make_train_step(model, keras.optimizers.SGD(0.1), "mse")
        >>> step = tmg.chain_steps(once, once, names=("first", "second"))
        >>> logs = step((np.ones((5, 2)), np.zeros((5, 1))))
        >>> float(logs["first_loss"]) >= float(logs["second_loss"])
        True
    """
    strategies = {id(step.strategy) if isinstance(step, TrainStep) else None for step in steps}
    if len(strategies) != 1 or None in strategies:
        raise TypeError(
            "chain_steps takes steps of make_train_step, at least one, all for one strategy. "
            f"Received: {[type(step).__name__ for step in steps]} for {len(strategies)} "
            "strategies. Write tmg.chain_steps(d_step, g_step)."
        )
    numbered = tuple(f"step{number}" for number in range(1, len(steps) + 1))
    of_models = tuple(str(step.model.name) for step in steps)
    chosen = tuple(names or (of_models if len(set(of_models)) == len(of_models) else numbered))
    if not len(set(chosen)) == len(chosen) == len(steps):
        raise ValueError(
            "Each step needs a name of its own. Received: "
            f"names={brief(names)} for {len(steps)} step(s). Write names={numbered}."
        )
    return ChainedStep(dict(zip(chosen, steps, strict=True)))


class ChainedStep(Step, Looped):
    """Several train steps in turn on each batch; what ``chain_steps`` returns.

    Attributes:
        strategy: The strategy of all of them.
        steps: The steps by name, in order.
        names: Their names.
        metrics: The metrics of all steps, each once.
    """

    def __init__(self, steps: Mapping[str, TrainStep]) -> None:
        """Use ``chain_steps``, which checks what it is given."""
        self.steps, self.names = dict(steps), tuple(steps)
        self.strategy = next(iter(self.steps.values())).strategy
        metrics: list[Any] = []
        locks: list[RLock] = []
        for step in self.train_steps:
            metrics += step.metrics
            locks += step.runner.locks
        self.metrics = tuple(by_id(metrics).values())
        for step in self.train_steps:
            self.logical_replicas = step.logical_replicas or self.logical_replicas
        self.runner = Runner(self, locks)

    def __repr__(self) -> str:
        """Returns the steps in their order, and where they train."""
        count, where = len(self.steps), describe(self.strategy)
        return f"<ChainedStep of {count}: {', then '.join(self.names)}; {where}>"

    @property
    def train_steps(self) -> tuple[TrainStep, ...]:
        """The steps, each once."""
        return tuple(dict.fromkeys(self.steps.values()))

    @property
    def verification(self) -> dict[str, Any]:
        """The comparison of each step with one device, by its name."""
        return {name: step.verification for name, step in self.steps.items()}

    def changed_variables(self) -> list[KerasVariable]:
        """Returns the variables that the steps change."""
        changed: list[KerasVariable] = []
        for step in self.train_steps:
            changed += step.changed_variables()
        return changed

    def other_states(self) -> list[OtherState]:
        """Returns the state that the traces so far change, known to Keras or not."""
        states = list(self.runner.touched.states)
        for step in self.train_steps:
            states += step.other_states()
        return states

    def key(self) -> Key | None:
        """Returns the keys of the steps."""
        keys = present(step.key() for step in self.train_steps)
        if len(keys) < len(self.train_steps):
            return None
        versions, kinds = zip(*keys, strict=True)
        return Key(versions, kinds)

    def facts(self) -> Facts:
        """Returns the facts of each step, behind its name."""
        facts: dict[str, object] = {}
        for name, step in self.steps.items():
            facts |= {f"{name}: {fact}": value for fact, value in step.facts().items()}
        return facts

    def prepare(self, spec: Callable[[], Any]) -> None:
        """Prepares each step."""
        for step in self.train_steps:
            step.runner.settle(spec)

    def compute(self, shards: Shards, trace: Trace) -> tuple[dict[str, Tensor], Tallies]:
        """Runs the steps on a batch, each with a trace of its own; traced."""
        tallies: dict[str, Tally] = {}
        for name, step in self.steps.items():
            with noting_effects() as effects:
                why = "it is a step of a chain"
                trace_of_step = Trace(why_each=why, logs_last=trace.logs_last)
                tallies[name] = step.compute(shards, trace_of_step)[1][""]
            # Steps of other variables would run at the same time: if one failed, TensorFlow would
            # break off the update of the other. ``tf.control_dependencies`` does not reach the
            # threads of replicas, so the rows wait.
            local = [with_dependencies(effects, rows) for rows in shards.local]
            shards = shards._replace(local=local)
        return logs_of_step(tallies), tallies

    def around_call(self, call: Call) -> Call:
        """Returns a call of each step by itself, if one of them is to be verified."""
        if not any(step.runner.watches for step in self.train_steps):
            return call
        return self._one_by_one

    def _one_by_one(self, batch: Batch) -> tuple[dict[str, Tensor], Tallies]:
        tallies = {name: step.runner.call(batch)[1][""] for name, step in self.steps.items()}
        return logs_of_step(tallies), tallies
