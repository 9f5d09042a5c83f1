"""A clause of the law or a promise, broken in the source on purpose, and what must notice.

A mutation names a function and what it breaks there, ``old => new``. ``old`` is compared as a
syntax tree, so neither formatting nor comments matter, and it must be there exactly once.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tfmultigpu"
_parse = functools.cache(ast.parse)


@functools.cache
def sources() -> dict[str, str]:
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}


@functools.cache
def changed(text: str, place: str, code: str) -> str:
    """Returns the text of a file with a change in it, for which see ``broken``."""
    old, _, new = [textwrap.dedent(part).strip() for part in code.partition("=>")]
    wanted = _nodes(old)
    runs = list(_equal_runs(_definition(_parse(text), place), wanted))
    assert len(runs) == 1, (
        f"{place} has {old!r} {len(runs)} times, not once: in lines "
        f"{[run[0].lineno for run in runs]}. Find where the code went."
    )
    is_expression = isinstance(wanted[0], ast.expr)
    new = new.replace("...", f"({old})" if is_expression else old)
    if is_expression and isinstance(_nodes(new)[0], ast.expr):
        new = f"({new})"

    # The columns of a tree count bytes.
    first, last = runs[0][0], runs[0][-1]
    lines = text.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: first.lineno - 1])) + first.col_offset
    end = sum(map(len, lines[: last.end_lineno - 1])) + last.end_col_offset
    indented = textwrap.indent(new, " " * first.col_offset).lstrip()
    return (text.encode()[:start] + indented.encode() + text.encode()[end:]).decode()


def _nodes(code: str) -> list[ast.AST]:
    """Returns the statements of code, or the expression that it is."""
    statements = ast.parse(code).body
    alone = statements[0]
    return [alone.value] if len(statements) == 1 and isinstance(alone, ast.Expr) else [*statements]


def _definition(tree: ast.AST, place: str) -> ast.AST:
    """Returns the module, class or function of a place; the last one of overloads."""
    for name in place.partition(":")[2].split("."):
        named = [node for node in _definitions(tree) if node.name == name]
        assert named or not name, f"There is no {name!r} in {place}. Find where the code went."
        tree = named[-1] if name else tree
    return tree


def _definitions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node
        else:
            yield from _definitions(node)


def _equal_runs(tree: ast.AST, wanted: list[ast.AST]) -> Iterator[list[ast.AST]]:
    """Yields the nodes that follow each other in a field of a node and are equal to these."""
    kinds, dumps = list(map(type, wanted)), list(map(ast.dump, wanted))
    for node in ast.walk(tree):
        for _, field in ast.iter_fields(node):
            nodes = field if isinstance(field, list) else [field]
            for start in range(len(nodes) - len(wanted) + 1):
                run = nodes[start : start + len(wanted)]
                if list(map(type, run)) == kinds and list(map(ast.dump, run)) == dumps:
                    yield run


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One clause of the law, broken.

    Attributes:
        name: What is done wrong, in a few words.
        changes: Where, and what is put in the place of what; as ``broken`` takes them.
        tests: Tests all of which must fail, as pytest names them, below ``tests/``.
    """

    name: str
    changes: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]

    def changed(self) -> dict[str, str]:
        """Returns the new texts of the files that it changes."""
        texts: dict[str, str] = {}
        for place, code in self.changes:
            file = place.partition(":")[0]
            texts[file] = changed(texts.get(file, sources()[file]), place, code)
        return texts

    def apply(self, package: Path) -> None:
        """Breaks a copy of the package."""
        for file, text in self.changed().items():
            (package / file).write_text(text)


def broken(
    name: str, place: str, code: str, *tests: str, also: tuple[tuple[str, str], ...] = ()
) -> Mutation:
    """Returns a mutation that promises catch: in a place, new code instead of old.

    Args:
        name: What is done wrong, in a few words.
        place: ``room/file.py:Class.method``, or ``room/file.py`` for a whole module.
        code: ``old => new``, both an expression or statements. ``...`` in ``new`` is ``old``.
        tests: Promises that must fail, ``test_file.py::test_name``.
        also: More places, each with its code.
    """
    return Mutation(name, ((place, code), *also), tuple(f"promises/{test}" for test in tests))
