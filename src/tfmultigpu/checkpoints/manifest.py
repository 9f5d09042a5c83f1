"""Validation of the manifest of a checkpoint, which somebody may have edited."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["find_problem"]


def find_problem(manifest: Mapping[str, Any]) -> str | None:
    """Returns the first invalid field of a manifest and its value, or None.

    Args:
        manifest: The parsed JSON, without the digest.
    """
    for name, (is_valid, required) in _FIELDS.items():
        if name not in manifest:
            if required:
                return f"{name} is missing"
        elif not is_valid(manifest[name]):
            return f"{name} is {manifest[name]!r:.80}"
    return None


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _fingerprints(value: Any) -> bool:
    return isinstance(value, list) and all(one is None or type(one) is int for one in value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _variables(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict)
        and _text(one.get("name"))
        and _text(one.get("dtype"))
        and isinstance(one.get("shape"), list)
        and all(map(_count, one["shape"]))
        and ("replicas" not in one or (_count(one["replicas"]) and _text(one.get("together"))))
        for one in value
    )


def _fit(value: Any) -> bool:
    if not isinstance(value, dict) or not _count(value.get("seen")):
        return False
    callbacks, epoch = value.get("callbacks"), value.get("epoch", 0)
    return (
        type(value.get("seed")) is int
        and _count(value.get("initial_epoch"))
        and _count(value.get("began"))
        and isinstance(value.get("stopped"), bool)
        and isinstance(value.get("data"), dict)
        and isinstance(callbacks, list)
        and all(_callback(one) for one in callbacks)
        and (
            epoch is None
            or (
                isinstance(epoch, dict)
                and isinstance(epoch.get("sums"), dict)
                and all(isinstance(one, (int, float)) for one in epoch["sums"].values())
                and _variables(epoch.get("metrics"))
            )
        )
    )


def _callback(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _text(value.get("name"))
        and _text(value.get("monitor"))
        and _count(value.get("number"))
        and isinstance(value.get("attributes", {}), dict)
        and _count(value.get("file_size", 0))
    )


def _optional(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_valid(value)


# A check for each field, and whether the field is required.
_FIELDS: dict[str, tuple[Callable[[Any], bool], bool]] = {
    "step": (_count, True),
    "arrays_sha256": (_text, True),
    "arrays_bytes": (_count, True),
    "epoch": (_count, False),
    "first_epoch": (_count, False),
    "step_in_epoch": (_count, False),
    "fingerprint": (_optional(lambda value: _fingerprints(value) and len(value) == 2), False),
    "past": (
        _optional(lambda value: _fingerprints(value) and len(value) == 3 and _count(value[0])),
        False,
    ),
    "variables": (_variables, False),
    "fit": (_fit, False),
}
