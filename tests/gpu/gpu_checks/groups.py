"""Which checks share a process: TensorFlow divides a GPU once, when it starts."""

from __future__ import annotations

import dataclasses
import functools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpu_checks import low_precision, memory, planning, replicas
from gpu_checks.place import GIB, NeedsGpu, Place, grown, limited, split

Check = Callable[[Place], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Group:
    """Checks that share one setting of the GPU.

    Attributes:
        setting: Makes it, given ``"GPU"`` or ``"CPU"``; before TensorFlow starts.
        checks: Run one after the other; the first ones may need a process that has not started.
    """

    setting: Callable[[str], Place]
    checks: tuple[Check, ...]


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a check.

    Attributes:
        name: ``GROUP.CHECK``.
        status: ``"passed"``, ``"failed"`` or ``"not run"``.
        seconds: How long it took.
        facts: What it measured.
        error: Why it failed or was not run.
    """

    name: str
    status: str
    seconds: float = 0.0
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str = ""


GROUPS: dict[str, Group] = {
    "growth": Group(
        grown,
        (
            memory.growth,
            planning.doctor,
            memory.micro_batches,
            replicas.gpu_against_cpu,
        ),
    ),
    "limit": Group(limited, (memory.limit, memory.largest_batch)),
    "two_parts": Group(
        functools.partial(split, limits=(12 * GIB, 4 * GIB)),
        (
            planning.doctor,
            planning.names_of_parts,
            planning.communication,
            planning.shares_by_memory,
            replicas.exact_without_tf32,
            replicas.synchronized_batch_normalization,
            replicas.sharded_update,
            replicas.sharded_variables,
            replicas.dropout_draws,
            replicas.checkpoints_cross_over,
            low_precision.float16_dynamic,
            low_precision.bfloat16,
            memory.out_of_memory_report,
            memory.memory_of_sharded_variables,
            replicas.xla,
            # Last: what cuDNN chose for a shape it keeps, and may keep with TF32.
            replicas.exact_with_tf32,
        ),
    ),
    "four_parts": Group(
        functools.partial(split, limits=(6 * GIB, 4 * GIB, 4 * GIB, 2 * GIB)),
        (
            planning.names_of_parts,
            planning.shares_by_memory,
            replicas.four_parts,
            replicas.sharded_variables,
        ),
    ),
}


def names_of(group: str) -> list[str]:
    """Returns the names of the checks of a group."""
    return [f"{group}.{check.__name__}" for check in GROUPS[group].checks]


def run_group(
    group: str,
    kind: str,
    names: Sequence[str] | None = None,
    begin: Callable[[str], None] = lambda name: None,
) -> Iterator[Result]:
    """Runs the checks of a group in this process, which must not have started TensorFlow.

    Args:
        group: A key of ``GROUPS``.
        kind: ``"GPU"``, or ``"CPU"`` for a rehearsal.
        names: Those to run; all where None.
        begin: Called with the name of each before it runs.
    """
    wanted = names_of(group) if names is None else names
    try:
        place = GROUPS[group].setting(kind)
    except NeedsGpu as error:
        for name in wanted:
            yield Result(name, "not run", error=str(error))
        return
    except Exception:
        # Whatever it is, it is what the report says of every check of the group.
        for name in wanted:
            yield Result(name, "failed", error=traceback.format_exc(limit=-6))
        return
    for name, check in zip(names_of(group), GROUPS[group].checks, strict=True):
        if name in wanted:
            begin(name)
            yield run_check(check, place, group)


def run_check(check: Check, place: Place, group: str) -> Result:
    """Runs one check; whatever it raises is its result."""
    name = f"{group}.{check.__name__}"
    began = time.perf_counter()
    status, facts, error = "passed", {}, ""
    try:
        facts = check(place)
    except NeedsGpu as missing:
        status, error = "not run", str(missing)
    except Exception:
        status, error = "failed", traceback.format_exc(limit=-6)
    return Result(name, status, round(time.perf_counter() - began, 2), facts, error)
