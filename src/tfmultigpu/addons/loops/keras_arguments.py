"""Arguments of ``keras.Model.fit`` that ``fit`` takes too."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
from typing_extensions import TypedDict

from tfmultigpu.addons.loops.inputs import check_steps
from tfmultigpu.arguments import check_count
from tfmultigpu.errors import DataError
from tfmultigpu.types import Verbose


class KerasArguments(TypedDict, total=False):
    """Arguments of ``keras.Model.fit`` beside the data; they mean what they mean there.

    Attributes:
        shuffle: Whether to reshuffle arrays in each pass. The order depends only on the seed of
            ``keras.utils.set_random_seed``, not on the number of replicas.
        verbose: 0, 1 (a progress bar), 2 (a line per epoch) or ``"auto"``, which is 1. Only the
            chief prints.
    """

    batch_size: int | None
    epochs: int
    verbose: Verbose
    callbacks: Any
    validation_split: float
    validation_data: Any
    shuffle: bool
    class_weight: Mapping[int, float] | None
    sample_weight: Any
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: int | Sequence[int]


def checked_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments, with the defaults of Keras, after a check of the numbers."""
    parameters = inspect.signature(keras.Model.fit).parameters
    defaults = {name: parameters[name].default for name in KerasArguments.__annotations__}
    if unknown := sorted(given.keys() - defaults.keys()):
        raise TypeError(
            f"fit has no such argument. Received: {unknown[0]}={given[unknown[0]]!r}. Those of "
            f"Keras are {', '.join(defaults)}."
        )
    arguments = {**defaults, **given}
    for name in ("steps_per_epoch", "validation_steps"):
        check_steps(arguments[name], name)
    for name in ("epochs", "initial_epoch"):
        check_count(name, arguments[name], 0)
    frequency = arguments["validation_freq"]
    if isinstance(frequency, str) or not isinstance(frequency, Collection):
        check_count("validation_freq", frequency, other="a list of epochs counted from 1")
    if not isinstance(arguments["shuffle"], bool):
        raise DataError(
            "shuffle must be True or False; the order within a batch changes nothing. Received: "
            f"shuffle={arguments['shuffle']!r}."
        )
    # A limit for debugging: Keras counts by it, and the steps must not run ahead of it.
    if most := getattr(keras.config, "max_steps_per_epoch", lambda: None)():
        arguments["steps_per_epoch"] = min(most, arguments["steps_per_epoch"] or most)
    return arguments
