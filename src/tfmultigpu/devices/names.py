"""Device names: one short spelling, and checks that requested devices exist."""

from __future__ import annotations

import re
from collections.abc import Sequence
from numbers import Real

from tfmultigpu.arguments import brief, check_count
from tfmultigpu.errors import DeviceNotFoundError

_NAME = re.compile(
    r"(?:/job:[^/:]+)?(?:/replica:\d+)?(?:/task:\d+)?"
    r"/?(?:(?:physical_)?device:)?(?P<kind>[A-Za-z][A-Za-z0-9_]*):(?P<index>\d+)"
)
_NOT_A_KIND = frozenset({"JOB", "REPLICA", "TASK", "DEVICE", "PHYSICAL_DEVICE"})


def parse_device_name(name: str) -> str:
    """Shortens a device name of TensorFlow to `"GPU:0"`, without job, replica and task."""
    if not isinstance(name, str):
        inside = getattr(name, "name", None)  # Of a Device, or TensorFlow's own.
        short = f"GPU:{name}"
        if isinstance(name, (list, tuple)) and name:
            inside = name[0]
        if isinstance(inside, str):
            short = parse_device_name(inside)
        raise TypeError(f'A device name is a string. Write "{short}". Received: name={brief(name)}')
    match = _NAME.fullmatch(name.strip())
    if match is None or match["kind"].upper() in _NOT_A_KIND:
        raise ValueError(
            "A device name has a kind and an index, such as 'GPU:0' or '/device:GPU:0'. "
            f"Received: name={name!r}"
        )
    return f"{match['kind'].upper()}:{int(match['index'])}"


def resolve_devices(
    asked: int | str | Sequence[str] | None,
    existing: Sequence[str],
    no_gpu: str | None = None,
    write: str = "",
) -> tuple[str, ...]:
    """Resolves a request for devices to short names that exist.

    Args:
        asked: The request.
        existing: What exists.
        no_gpu: Why there are no more GPUs.
        write: The line to write if one is missing; "" for names in place of those.
    """
    here = tuple(parse_device_name(name) for name in existing)
    if asked is None:
        return here
    if isinstance(asked, (int, Real)):
        count = check_count("devices", asked, other="a list of names")
        if count > len(here):
            kind = "GPU"
            if here:
                kind = here[0].split(":")[0]
            last = f"{kind}:{count - 1}"
            raise _not_found(f"{count} devices, but only {len(here)} exist", [last], here, no_gpu)
        return here[:count]
    if isinstance(asked, str):
        asked = [asked]
    elif isinstance(asked, (set, frozenset)):
        asked = sorted(asked)  # Sets have no order.
    names = tuple(map(parse_device_name, asked))
    if not names:
        raise ValueError(
            "devices is an empty list, for which TensorFlow would take every device. Leave "
            f"devices out, or name some of {listed(here)}. Received: devices={asked!r}"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"{listed(twice)} is named more than once, and two replicas cannot share a device. "
            f"Write devices={list(dict.fromkeys(names))!r}. Received: devices={asked!r}"
        )
    missing = [name for name in names if name not in here]
    if missing:
        text = f"{listed(names)}, but this machine does not have {listed(missing)}"
        if write:
            text = f"{listed(names)}, but this cannot be set for {listed(missing)} here"
        if not any(name.startswith("GPU:") for name in missing):
            no_gpu = None
        raise _not_found(text, missing, here, no_gpu, write)
    return names


def _not_found(
    asked: str, missing: Sequence[str], here: Sequence[str], no_gpu: str | None, write: str = ""
) -> DeviceNotFoundError:
    lines = ["Leave devices out."]
    if here:
        lines = [f"Write {list(here)!r}, or some of these."]
    if write:
        lines = [write]
    if no_gpu:
        lines.append(f"No more GPUs: {no_gpu}.")
    alike = [name for name in here if name.split(":")[0] == missing[0].split(":")[0]]
    if len(alike) == 1 and not write:
        parts = 1 + max(int(name.split(":")[1]) for name in missing)
        split = (
            "To try several replicas on one device, which is no faster, write directly after the "
            f'imports tmg.split_device("{alike[0]}", parts={parts}).'
        )
        # Who has nothing but a CPU has come to try.
        lines.insert(0 if here == ("CPU:0",) else len(lines), split)
    return DeviceNotFoundError(
        f"Asked for {asked}. Existing: {listed(here)}. TensorFlow would wait for a missing device "
        "for ever, or use the CPU without a message.",
        "",
        " ".join(lines),
    )


def listed(names: Sequence[str]) -> str:
    """Joins names for a message; `"none"` if there are none."""
    return ", ".join(names) or "none"
