"""What is here: the devices of this machine, their names, and the settings made before they start.

Two lists must not be confused. *Physical* devices are what the machine has (`list_devices`).
*Logical* devices are what programs run on (`existing_logical_names`): one for each visible
physical device, or several where `split_device` has cut one into parts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.errors import DeviceNotFoundError

__all__ = ["existing_logical_names", "parse_device_name", "resolve_devices"]

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
    if isinstance(asked, int):
        return _first(asked, here)
    names = tuple(parse_device_name(name) for name in ([asked] if isinstance(asked, str) else asked))
    if not names:
        raise ValueError(
            "devices is an empty list; TensorFlow would quietly take every device instead. "
            f"Name at least one of {_listed(here)}, or leave devices out to use all. "
            f"Received: devices={asked!r}"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"{_listed(twice)} is named more than once; two replicas cannot share one device. "
            f"Name each device once: devices={list(dict.fromkeys(names))!r}. "
            f"Received: devices={asked!r}"
        )
    missing = tuple(name for name in names if name not in here)
    if missing:
        raise _not_found(names, missing, here)
    return names


def existing_logical_names(kind: str | None = None) -> tuple[str, ...]:
    """Name the devices that strategies and `tf.device` may use, without starting any.

    Before TensorFlow starts its devices the names follow from the visible physical devices and
    from how they were split; from then on neither can change any more.

    Args:
        kind: `"CPU"`, `"GPU"`, `"TPU"`, or `None` for all.

    Returns:
        Short names; for each kind the indices count from 0 over all its devices and their parts.

    Example:
        >>> split_device("CPU:0", parts=2)  # doctest: +SKIP
        >>> existing_logical_names("CPU")  # doctest: +SKIP
        ('CPU:0', 'CPU:1')
    """
    config: Any = tf.config
    parts: dict[str, int] = {}
    for device in config.get_visible_devices():
        split = config.get_logical_device_configuration(device)
        parts[device.device_type] = parts.get(device.device_type, 0) + len(split or (None,))
    return tuple(
        f"{name}:{index}"
        for name, count in parts.items()
        if kind is None or name == kind.upper()
        for index in range(count)
    )


def _first(count: int, here: tuple[str, ...]) -> tuple[str, ...]:
    if count < 1:
        raise ValueError(
            "The number of devices must be at least 1; leave devices out to use all of "
            f"{_listed(here)}. Received: devices={count}"
        )
    if count > len(here):
        raise DeviceNotFoundError(
            f"Asked for {count} devices, but only {len(here)} exist: {_listed(here)}. "
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
        f"No such device here: {_listed(missing)}. Asked for: {_listed(asked)}. "
        f"Existing: {_listed(here)}. TensorFlow would wait for a missing device for ever, or "
        "quietly use the CPU in its place. "
        + (f"Change the line to devices={usable!r}" if usable else "Leave devices out")
        + ", or make the device visible before TensorFlow starts (CUDA_VISIBLE_DEVICES)."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"
