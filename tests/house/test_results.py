"""The result of a check is used: it is the number that was asked for, as a whole number."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "tfmultigpu"


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def names_of_checks() -> set[str]:
    """Returns the functions that check an argument and return it."""
    names = set()
    for _, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not node.name.lstrip("_").startswith(
                "check_"
            ):
                continue
            returns_nothing = isinstance(node.returns, ast.Constant) and node.returns.value is None
            if not returns_nothing:
                names.add(node.name)
    return names


def test_no_result_of_a_check_is_dropped() -> None:
    checks = names_of_checks()
    assert {"check_count", "check_positive", "check_steps"} <= checks
    dropped = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
                continue
            function = node.value.func
            name = getattr(function, "id", None) or getattr(function, "attr", "")
            if name in checks:
                dropped.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {name}")
    assert dropped == []
