"""The options of a train step: which there are, what they may be, and what is asked for by them.

Their defaults and words are in ``make_train_step``, where a user looks for them, and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TypedDict

from tfmultigpu.arguments import brief, check_count
from tfmultigpu.types import Function, LossScaling, Options, ShardUpdate


class StepOptions(TypedDict, total=False):
    """Options that ``fit`` hands on to ``make_train_step``, and that a step is shown with."""

    micro_batches: int | Sequence[int]
    clip_norm: float | None
    loss_scale: LossScaling
    logical_replicas: int | None
    shard_update: ShardUpdate


def all_options(make: Function, given: Mapping[str, object]) -> Options:
    """Returns each of ``StepOptions`` as it is given, or else the default of ``make``."""
    parameters = inspect.signature(make).parameters
    return {name: given.get(name, parameters[name].default) for name in StepOptions.__annotations__}


def asked_for(make: Function, options: Mapping[str, object]) -> Options:
    """Returns the options that are not the default of ``make``."""
    parameters = inspect.signature(make).parameters
    return {name: v for name, v in options.items() if v != parameters[name].default}


def check_verify(verify: object) -> None:
    """Checks the option ``verify``."""
    if not isinstance(verify, bool) and verify not in ("first", "gradients"):
        raise ValueError(
            f"verify is 'first', True, False or 'gradients'. Received: verify={brief(verify)}."
        )


def check_options(options: StepOptions) -> int:
    """Checks options, and returns how many parts of a shard ``micro_batches`` asks for."""
    shard_update = options["shard_update"]
    if not isinstance(shard_update, bool) and shard_update != "auto":
        raise ValueError(
            f"shard_update is True, False or 'auto'. Received: shard_update={brief(shard_update)}."
        )
    parts = options["micro_batches"]
    counts = parts if isinstance(parts, (list, tuple)) else [parts]
    return max(check_count("micro_batches", count, error=ValueError) for count in counts)
