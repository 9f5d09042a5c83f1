"""A step in one line: what it computes, where, by which options, and what its check found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfmultigpu.lists import names_of, present
from tfmultigpu.steps.objective import Forward
from tfmultigpu.steps.step import ModelStep
from tfmultigpu.strategies.topology import describe

_DEFAULTS = {"micro_batches": 1, "shard_update": "auto"}  # Of other options it is None.
_OPTIONS = ("micro_batches", "clip_norm", "loss_scale", "shard_update")
_OUTCOMES = {
    "same": "as on one device",
    "different": "not as on one device: print(step.verification)",
    "not verified": "not compared with one device: print(step.verification)",
}


def shown_step(
    step: ModelStep, model: str, strategy: tf.distribute.Strategy, does: Sequence[str]
) -> str:
    """Returns the line of a step of one model.

    Args:
        step: The step.
        model: The name of the model.
        strategy: Where it runs.
        does: What the step does with it, a few words each.
    """
    kind = type(step).__name__
    status = "not called yet" if step.verification is None else _OUTCOMES[step.verification.outcome]
    if step.verification is None and len(step.runner.programs):
        status = "not compared with one device"
    return f"<{kind} of {model!r}: {', '.join([*does, describe(strategy)])}; {status}>"


def shown_loss(forward: Forward) -> str:
    """Returns the name of the loss, or the names of several."""
    if forward.forward is not None:
        return getattr(forward.forward, "__name__", type(forward.forward).__name__)
    losses = present(tf.nest.flatten(forward.objective.loss))
    return " + ".join(names_of(losses)) or "no loss"


def shown_options(options: Mapping[str, object]) -> list[str]:
    """Returns the options of a train step that are not the default."""
    shown: list[str] = []
    for name in _OPTIONS:
        if options.get(name) != _DEFAULTS.get(name):
            shown.append(f"{name}={options[name]!r}")
    return shown
