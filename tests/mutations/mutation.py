"""A clause of the law or a promise, broken in the source on purpose, and what must notice.

A mutation replaces texts that stand exactly once in the package. Where a text was rewritten, the
mutation fails and says so: find the new place, and keep the text short.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tfmultigpu"


@functools.cache
def sources() -> dict[str, str]:
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One clause of the law, broken.

    Attributes:
        name: What is done wrong, in a few words.
        changes: Texts that stand once in the package, and what is put in their place.
        tests: Tests all of which must fail, as pytest names them, below ``tests/``.
    """

    name: str
    changes: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]

    def changed(self) -> dict[str, str]:
        """Returns the new texts of the files that it changes."""
        changed: dict[str, str] = {}
        for old, new in self.changes:
            files = [file for file, text in sources().items() for _ in range(text.count(old))]
            assert len(files) == 1, (
                f"The mutation {self.name!r} changes a text that stands {len(files)} times in the "
                f"package, not once. Find where the code went: {old!r}"
            )
            text = changed.get(files[0], sources()[files[0]])
            changed[files[0]] = text.replace(old, new)
        return changed

    def apply(self, package: Path) -> None:
        """Breaks a copy of the package."""
        for file, text in self.changed().items():
            (package / file).write_text(text)


def broken(
    name: str, old: str, new: str, *tests: str, also: tuple[tuple[str, str], ...] = ()
) -> Mutation:
    """Returns a mutation that promises catch: ``new`` in place of ``old``.

    Args:
        name: What is done wrong, in a few words.
        old: A text that stands once in the package.
        new: What is put in its place.
        tests: Promises that must fail, ``test_file.py::test_name``.
        also: More pairs of ``old`` and ``new``.
    """
    return Mutation(name, ((old, new), *also), tuple(f"promises/{test}" for test in tests))
