"""What reports say of a plan of memory: a step that does not fit, and copies that can be spared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from tfmultigpu.addons.diagnostics.report import Finding

_MUCH = 0.1  # A part of what a device holds from which an option is worth a note.


class OfDevice(Protocol):
    """The bytes of a device, in a plan."""

    @property
    def together(self) -> int:
        """All that is exact."""


class OfOption(Protocol):
    """What another option would change, in a plan."""

    @property
    def write(self) -> str:
        """What to write."""

    @property
    def change(self) -> int:
        """The change of the fullest device in bytes."""


class OfPlan(Protocol):
    """A plan of memory, as ``plan_memory`` of the add-on for tuning returns it."""

    @property
    def problem(self) -> str:
        """Why the step runs out of memory for sure; "" if that is not known."""

    @property
    def fullest(self) -> OfDevice:
        """The device with the most bytes."""

    @property
    def options(self) -> Sequence[OfOption]:
        """What other options change, what saves most first."""

    def in_units(self, size: int) -> str:
        """Returns bytes for a person."""


def findings_of(plan: OfPlan | None) -> Iterator[Finding]:
    """Yields what a plan says of memory."""
    if plan is None:
        return
    if plan.problem:
        what, _, change = plan.problem.partition(". ")
        why = "The first step that needs so much memory ends with an OutOfMemoryError."
        yield Finding("error", "out-of-memory", f"{what}.", why, change)
    together = plan.fullest.together
    for option in plan.options:
        if option.write not in _LINES or -option.change < _MUCH * together:
            continue
        saved, whole = plan.in_units(-option.change), plan.in_units(together)
        what = f"{saved} of {whole} are copies that {option.write} saves."
        why = "Each device holds them, and one device for each would do."
        yield Finding("note", "copies", what, why, _LINES[option.write])


_LINES = {
    "sharded_variables": "with strategy.scope(), tmg.sharded_variables(): model = ...",
    "shard_update=True": "tmg.make_train_step(model, optimizer, loss, shard_update=True)",
}
