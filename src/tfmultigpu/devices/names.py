"""Device names: one spelling for all of TensorFlow's; what was asked for against what exists."""

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
    """Write a device name the short way, `"GPU:0"`, whichever way TensorFlow spelled it.

    Job, replica and task are dropped: the result names a device of this process.

    Args:
        name: `"GPU:0"`, `"gpu:0"`, `"/gpu:0"`, `"/device:GPU:0"`, `"/physical_device:GPU:0"` or
            `"/job:localhost/replica:0/task:0/device:GPU:0"`.

    Returns:
        The kind in capitals, a colon and the index.

    Raises:
        TypeError: `name` is not a string.
        ValueError: `name` does not name one device by kind and index.

    Example:
        >>> parse_device_name("/job:localhost/replica:0/task:0/device:GPU:1")
        'GPU:1'
    """
    if not isinstance(name, str):
        hint = f' Write "GPU:{name}".' if isinstance(name, int) else ' Write "GPU:0".'
        raise TypeError(f"A device is named by kind and index.{hint} Received: name={name!r}")
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
    """Turn what was asked for into device names that exist.

    Args:
        asked: `None` for all of `existing`; a count for the first so many of them; one name, or
            a list of names in the order wanted.
        existing: the names that may be used, in order; any spelling of `parse_device_name`.

    Returns:
        Short names, such as `("GPU:0", "GPU:1")`.

    Raises:
        DeviceNotFoundError: a name is not among `existing`, or the count is larger than it.
        TypeError: `asked` or one of its names has the wrong type.
        ValueError: the list is empty or names a device twice, or the count is below 1.

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
            f"devices is a count or a list of names, not a yes or no. Received: devices={asked!r}"
        )
    if isinstance(asked, (int, Integral)):  # NumPy has integers of its own.
        return _first(int(asked), here)
    if isinstance(asked, (set, frozenset)):
        raise TypeError(
            "devices is a set, which has no order, so replicas would be numbered by chance. "
            f"Received: devices={asked!r}. Write a list: devices={sorted(asked)!r}."
        )
    names = tuple(
        parse_device_name(name) for name in ([asked] if isinstance(asked, str) else asked)
    )
    if not names:
        raise ValueError(
            "devices is an empty list; TensorFlow would quietly take every device instead. "
            f"Name at least one of {listed(here)}, or leave devices out to use all. "
            f"Received: devices={asked!r}"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"{listed(twice)} is named more than once; two replicas cannot share one device. "
            f"Name each device once: devices={list(dict.fromkeys(names))!r}. "
            f"Received: devices={asked!r}"
        )
    missing = tuple(name for name in names if name not in here)
    if missing:
        raise _not_found(names, missing, here)
    return names


def _first(count: int, here: tuple[str, ...]) -> tuple[str, ...]:
    if count < 1:
        raise ValueError(
            "The number of devices must be at least 1; leave devices out to use all of "
            f"{listed(here)}. Received: devices={count}"
        )
    if count > len(here):
        raise DeviceNotFoundError(
            f"Asked for {count} devices, but only {len(here)} exist: {listed(here)}. "
            "TensorFlow would wait for the missing ones for ever. "
            + (
                f"Ask for at most {len(here)}: devices={len(here)}. "
                if here
                else "Leave devices out to use what is there. "
            )
            + f"Received: devices={count}"
        )
    return here[:count]


def _not_found(
    asked: Sequence[str], missing: Sequence[str], here: Sequence[str]
) -> DeviceNotFoundError:
    usable = [name for name in asked if name in here] or list(here[:1])
    return DeviceNotFoundError(
        f"No such device here: {listed(missing)}. Asked for: {listed(asked)}. "
        f"Existing: {listed(here)}. TensorFlow would wait for a missing device for ever, or "
        "quietly use the CPU in its place. "
        + (f"Change the line to devices={usable!r}" if usable else "Leave devices out")
        + ", or make the device visible before TensorFlow starts (CUDA_VISIBLE_DEVICES)."
    )


def listed(names: Sequence[str]) -> str:
    """Join names for a message; `"none"` where there are none."""
    return ", ".join(names) if names else "none"
