"""Lists that many places make of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def present(values: Iterable[T | None]) -> list[T]:
    """Returns the values that are not None."""
    return [value for value in values if value is not None]


def map_present(function: Callable[[T], R], values: Iterable[T | None]) -> list[R | None]:
    """Returns what a function gives for each value, and None for None."""
    return [None if value is None else function(value) for value in values]


def pick(values: Mapping[int, T] | Sequence[T], numbers: Iterable[int]) -> list[T]:
    """Returns the values with some numbers, in that order."""
    return [values[number] for number in numbers]


def of_type(values: Iterable[object], kind: type[T]) -> list[T]:
    """Returns the values of a type."""
    return [value for value in values if isinstance(value, kind)]


def names_of(objects: Iterable[Any]) -> list[str]:
    """Returns the names of objects."""
    return [each.name for each in objects]


def by_id(objects: Iterable[T]) -> dict[int, T]:
    """Returns objects by their ``id``, each once: variables and tensors compare by their values."""
    return {id(each): each for each in objects}
