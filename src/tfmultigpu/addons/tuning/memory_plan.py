"""What ``plan_memory`` returns: bytes for each device, and what the options change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfmultigpu.addons.tuning.memory_probe import MemoryPeak

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# In the order of the table. What is kept between steps comes first.
_KEPT = ("parameters", "optimizer_state")
_IN_STEP = ("gradients", "windows", "tables", "copies")


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The bytes of a step on one device; all but ``at_least`` and ``memory`` are exact.

    Attributes:
        device: The name, such as ``"GPU:0"``.
        parameters: All weights, trained or not, and the states of metrics.
        optimizer_state: What the optimizer keeps.
        gradients: One sum of the gradients, which is there until the update.
        windows: Further sums of gradients, which micro-batches and logical replicas need.
        tables: Gradients of embeddings: one row for each id.
        copies: The largest weight that the device reads from another one, or receives.
        at_least: What the step needs at some moment, with its activations: it may need more. 0 for
            an option, which nobody has traced.
        memory: The memory of the device; None if it is unknown, as for CPUs.
    """

    device: str
    parameters: int = 0
    optimizer_state: int = 0
    gradients: int = 0
    windows: int = 0
    tables: int = 0
    copies: int = 0
    at_least: int = 0
    memory: int | None = None

    @property
    def kept(self) -> int:
        """What is there between steps."""
        return self.parameters + self.optimizer_state

    @property
    def together(self) -> int:
        """All that is exact."""
        return self.kept + self.gradients + self.windows + self.tables + self.copies

    @property
    def whatever_the_batch(self) -> int:
        """What a step needs for sure, however few its rows are."""
        return self.kept + self.gradients

    @property
    def is_too_small(self) -> bool:
        """Whether the memory is known, and the step does not fit for sure."""
        return self.memory is not None and self.at_least > self.memory


@dataclasses.dataclass(frozen=True)
class MemoryOption:
    """What another option would change.

    Attributes:
        write: What to write, such as ``"shard_update=True"``.
        change: The change of the fullest device in bytes; less than 0 saves.
        devices: The bytes of each device then.
        why: What becomes larger or smaller, in words.
    """

    write: str
    change: int
    devices: tuple[DeviceMemory, ...]
    why: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """The memory of a train step; ``print`` it.

    Attributes:
        name: What the step is.
        rows: The rows of the global batch.
        rows_at_once: The rows that a device computes at one time, at most.
        devices: The bytes of each device.
        options: What other options change, what saves most first.
        most_rows: A larger global batch does not fit for sure: 0 if none does, whatever the batch;
            None if that is unknown.
        peak: What a probe has measured; None without one.
    """

    name: str
    rows: int
    rows_at_once: int
    devices: tuple[DeviceMemory, ...]
    options: tuple[MemoryOption, ...]
    most_rows: int | None = None
    peak: MemoryPeak | None = None

    @property
    def fullest(self) -> DeviceMemory:
        """The device with the most bytes."""
        return fullest_of(self.devices)

    @property
    def too_small(self) -> tuple[DeviceMemory, ...]:
        """The devices on which the step does not fit for sure; of others nothing is known."""
        return tuple(device for device in self.devices if device.is_too_small)

    @property
    def helping(self) -> tuple[MemoryOption, ...]:
        """The options with which weights, state and gradients fit, what saves most first."""
        helping: list[MemoryOption] = []
        for option in self.options:
            known = [device for device in option.devices if device.memory is not None]
            fits = all(each.whatever_the_batch <= (each.memory or 0) for each in known)
            if option.change < 0 and fits:
                helping.append(option)
        return tuple(helping)

    @property
    def problem(self) -> str:
        """Why the step runs out of memory for sure, and what helps; "" if that is not known."""
        if not self.too_small:
            return ""
        worst = max(self.too_small, key=lambda device: device.at_least - (device.memory or 0))
        memory = in_units(worst.memory)
        if self.most_rows == 0:
            helps = ", ".join(f"{one.write} ({in_units(-one.change)} less)" for one in self.helping)
            needs = f"and gradients are {in_units(worst.whatever_the_batch)} of {memory}"
            if worst.whatever_the_batch <= (worst.memory or 0):
                needs = f"and one row need more than {memory}"
            return (
                f"The step does not fit on {worst.device} whatever the batch: parameters, "
                f"optimizer state {needs}. "
                f"What helps: {helps or 'a smaller model, or more devices'}."
            )
        return (
            f"The step will run out of memory at this batch: {self.rows_at_once} rows at once need "
            f"at least {in_units(worst.at_least)} of {memory} on {worst.device}. Take fewer rows, "
            "more micro_batches, or keras.remat."
        )

    def in_units(self, size: int) -> str:
        """Returns bytes for a person, such as ``"1.5 GiB"``."""
        return in_units(size)

    def option(self, write: str) -> MemoryOption:
        """Returns one of the options.

        Args:
            write: As its attribute, such as ``"shard_update=True"``.

        Raises:
            ValueError: The plan has no such option.
        """
        by_write = {option.write: option for option in self.options}
        if write not in by_write:
            raise ValueError(
                f"The plan has no such option. Write one of {list(by_write)}. Received: {write!r}."
            )
        return by_write[write]

    def __str__(self) -> str:
        """Formats a table of bytes by device, then the options."""
        lines = [
            f"Memory of {self.name}: {self.rows} rows, at most {self.rows_at_once} at once on a "
            "device",
            _line("", [each.device for each in self.devices]),
        ]
        for field in (*_KEPT, *_IN_STEP, "together", "at_least"):
            values = [getattr(each, field) for each in self.devices]
            lines.append(_line(field.replace("_", " "), map(in_units, values)))
        if any(each.memory is not None for each in self.devices):
            known = [in_units(each.memory) for each in self.devices]
            lines.append(_line("memory", known))
        else:
            lines.append("  Whether it fits is not known: give memory=, the bytes of a device.")
        if self.peak is not None:
            expected = in_units(self.peak.of(self.rows_at_once))
            lines.append(f"  Expected peak by a probe: {expected} on the fullest device.")
            if self.peak.fits is not None:
                least, most = self.peak.fits
                lines.append(f"  The largest batch that fits has {least} to {most} rows.")
        if self.problem:
            lines.append(self.problem)
        elif self.fullest.memory:
            part = self.fullest.at_least / self.fullest.memory
            lines.append(f"  It may fit: at least {part:.2f} of the memory of the fullest device.")
        lines.append("Other options, on the fullest device:")
        width = max(len(option.write) for option in self.options)
        for option in self.options:
            change = f"{'-' if option.change < 0 else '+'}{in_units(abs(option.change))}"
            if not option.change:
                change = "not counted"
            lines.append(f"  {option.write:<{width}} {change:>11}  {option.why}")
        return "\n".join(lines)

    __repr__ = __str__  # A notebook shows the table.


def fullest_of(devices: Sequence[DeviceMemory]) -> DeviceMemory:
    """Returns the device with the most bytes."""
    return max(devices, key=lambda device: device.together)


def in_units(size: int | None) -> str:
    """Returns bytes for a person."""
    if size is None:
        return "unknown"
    value, number = float(size), 0
    while value >= 1024 and number < len(_UNITS) - 1:
        value, number = value / 1024, number + 1
    return f"{value:.1f} {_UNITS[number]}" if number else f"{size} B"


def _line(title: str, values: Sequence[str] | map[str]) -> str:
    return f"  {title:<16}" + "".join(f"{value:>12}" for value in values)
