"""A clause of the law or a promise, broken in the source on purpose, and what must notice.

A mutation replaces texts that stand exactly once in a file. Where a text was rewritten, the
mutation fails and says so: find the new place, and keep the text short.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One clause of the law, broken.

    Attributes:
        name: What is done wrong, in a few words.
        file: The file of the package it is done in.
        changes: Texts that stand once in the file, and what is put in their place.
        tests: Tests all of which must fail, as pytest names them, below ``tests/``.
    """

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]

    def apply(self, package: Path) -> None:
        """Breaks a copy of the package."""
        path = package / self.file
        text = path.read_text()
        for old, new in self.changes:
            count = text.count(old)
            assert count == 1, (
                f"The mutation {self.name!r} changes a text that stands {count} times in "
                f"{self.file}, not once. Find where the code went: {old!r}"
            )
            text = text.replace(old, new)
        path.write_text(text)


def broken(
    name: str, file: str, old: str, new: str, *tests: str, also: tuple[tuple[str, str], ...] = ()
) -> Mutation:
    """Returns a mutation that promises catch: ``new`` in place of ``old``.

    Args:
        name: What is done wrong, in a few words.
        file: The file of the package it is done in.
        old: A text that stands once in the file.
        new: What is put in its place.
        tests: Promises that must fail, ``test_file.py::test_name``.
        also: More pairs of ``old`` and ``new`` in the same file.
    """
    promises = tuple(f"promises/{test}" for test in tests)
    return Mutation(name, file, ((old, new), *also), promises)
