"""Device names: one short spelling, and checks that requested devices exist."""

from __future__ import annotations

import re
from collections.abc import Sequence
from numbers import Integral

from tfmultigpu.errors import DeviceNotFoundError

__all__ = ["listed", "parse_device_name", "resolve_devices"]

_NAME = re.compile(
    r"(?:/job:[^/:]+)?(?:/replica:\d+)?(?:/task:\d+)?"
    r"/?(?:(?:physical_)?device:)?(?P<kind>[A-Za-z][A-Za-z0-9_]*):(?P<index>\d+)"
)
_NOT_A_KIND = frozenset({"JOB", "REPLICA", "TASK", "DEVICE", "PHYSICAL_DEVICE"})


def parse_device_name(name: str) -> str:
    """Shortens a device name of TensorFlow to `"GPU:0"`.

    Drops job, replica and task: the result names a device of this process.

    Args:
        name: `"GPU:0"`, `"gpu:0"`, `"/gpu:0"`, `"/device:GPU:0"`, `"/physical_device:GPU:0"` or
            `"/job:localhost/replica:0/task:0/device:GPU:0"`.

    Returns:
        The kind in capitals, a colon and the index.

    Raises:
        TypeError: `name` is not a string.
        ValueError: `name` has no kind or no index.

    Example:
        >>> parse_device_name("/job:localhost/replica:0/task:0/device:GPU:1")
        'GPU:1'
    """
    if not isinstance(name, str):
        hint = f' Write "GPU:{name}".' if isinstance(name, int) else ' Write "GPU:0".'
        raise TypeError(f"A device name is a string.{hint} Received: name={name!r}")
    match = _NAME.fullmatch(name.strip())
    if match is None or match["kind"].upper() in _NOT_A_KIND:
        raise ValueError(
            "A device name has a kind and an index, such as 'GPU:0' or '/device:GPU:0'. "
            f"Received: name={name!r}"
        )
    return f"{match['kind'].upper()}:{int(match['index'])}"


def resolve_devices(
    asked: int | str | Sequence[str] | None, existing: Sequence[str]
) -> tuple[str, ...]:
    """Resolves a request for devices to names that exist.

    Args:
        asked: `None` for all of `existing`; a count for the first ones; one name; or a list of
            names, whose order is kept.
        existing: The usable names, in order; any spelling of `parse_device_name`.

    Returns:
        Short names, such as `("GPU:0", "GPU:1")`.

    Raises:
        DeviceNotFoundError: A name is not in `existing`, or the count is larger.
        TypeError: `asked` or one of its names has the wrong type.
        ValueError: The list is empty or names a device twice, or the count is below 1.

    Example:
        >>> resolve_devices(2, ("GPU:0", "GPU:1", "GPU:2"))
        ('GPU:0', 'GPU:1')
        >>> resolve_devices(["/gpu:2"], ("GPU:0", "GPU:1", "GPU:2"))
        ('GPU:2',)
    """
    here = tuple(parse_device_name(name) for name in existing)
    if asked is None:
        return here
    if isinstance(asked, bool):
        raise TypeError(
            f"devices is a count or a list of names, not a boolean. Received: devices={asked!r}"
        )
    if isinstance(asked, (int, Integral)):  # Integral: integers of NumPy.
        return _first_devices(int(asked), here)
    if isinstance(asked, (set, frozenset)):
        raise TypeError(
            "devices is a set, whose order is random, so the order of replicas would be too. "
            f"Received: devices={asked!r}. Write a list: devices={sorted(asked)!r}."
        )
    names = tuple(
        parse_device_name(name) for name in ([asked] if isinstance(asked, str) else asked)
    )
    if not names:
        raise ValueError(
            "devices is an empty list. TensorFlow would take every device, without a message. "
            f"Name at least one of {listed(here)}, or leave devices out to use all. "
            f"Received: devices={asked!r}"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"{listed(twice)} is named more than once. Two replicas cannot share one device. "
            f"Name each device once: devices={list(dict.fromkeys(names))!r}. "
            f"Received: devices={asked!r}"
        )
    missing = tuple(name for name in names if name not in here)
    if missing:
        raise _not_found(names, missing, here)
    return names


def _first_devices(count: int, here: tuple[str, ...]) -> tuple[str, ...]:
    if count < 1:
        raise ValueError(
            "The number of devices must be at least 1. Leave devices out to use all of "
            f"{listed(here)}. Received: devices={count}"
        )
    if count > len(here):
        raise DeviceNotFoundError(
            f"Asked for {count} devices, but only {len(here)} exist: {listed(here)}. "
            "TensorFlow would wait for the missing ones for ever. "
            + (
                f"Ask for at most {len(here)}: devices={len(here)}. "
                if here
                else "Leave devices out. "
            )
            + _split_instead(here, count)
            + f"Received: devices={count}"
        )
    return here[:count]


def _not_found(
    asked: Sequence[str], missing: Sequence[str], here: Sequence[str]
) -> DeviceNotFoundError:
    usable = [name for name in asked if name in here] or list(here[:1])
    kind = missing[0].partition(":")[0]
    same = [name for name in here if name.partition(":")[0] == kind]
    parts = 1 + max(int(name.partition(":")[2]) for name in missing)
    return DeviceNotFoundError(
        f"No such device here: {listed(missing)}. Asked for: {listed(asked)}. "
        f"Existing: {listed(here)}. TensorFlow would wait for a missing device for ever, or use "
        "the CPU without a message. "
        + (f"Change the line to devices={usable!r}" if usable else "Leave devices out")
        + ", or make the device visible before TensorFlow starts (CUDA_VISIBLE_DEVICES)."
        + f" {_split_instead(same, parts)}".rstrip()
    )


def _split_instead(here: Sequence[str], parts: int) -> str:
    """Returns the line that makes several devices of the only one; empty if there are others."""
    if len(here) != 1:
        return ""
    return (
        "To try several replicas on one device, which is no faster, write as the first line "
        f'tmg.split_device("{here[0]}", parts={parts}). '
    )


def listed(names: Sequence[str]) -> str:
    """Joins names for a message; `"none"` if there are none."""
    return ", ".join(names) if names else "none"
