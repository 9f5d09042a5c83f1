"""The plan of the house: who may import whom, and where private names may be touched."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "tfmultigpu"
# A package in the house counts as one module; its files are looked at one by one all the same.
FILES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts): path
    for path in sorted(SOURCE.rglob("*.py"))
}
MODULES = {name.split(".")[0] for name in FILES}
PACKAGE = "tfmultigpu"

# Data flows one way: devices -> strategy -> data -> step -> loop. Each room of a corridor may use
# (directly or through smaller modules) only the rooms before it. The two corridors do not meet
# before `loops`.
WORLD = ("devices", "clusters", "strategies", "shares", "data")
LAW = (("losses", "accumulation", "precision"), ("steps",), ("loops",))
# These stand on top: nothing in the house imports them.
TOP = (
    "checkpoints",
    "batch_size",
    "pipelines",
    "diagnostics",
    "launch",
    "testing",
    "demo",
    "__main__",
    "__init__",
)
# `rows` cuts a batch into ranges of rows: the lowest module, of use to both corridors.
LOWEST = {"errors": set(), "_bridge": {"errors"}, "rows": {"errors"}}
MAY_IMPORT_TOP = {"__init__", "__main__"}


def imported_modules(tree: ast.AST, modules: set[str]) -> set[str]:
    """The modules of this package that the code imports, anywhere in the file."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = PACKAGE if node.level and not node.module else node.module or ""
            base = f"{PACKAGE}.{base}" if node.level and node.module else base
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        parts = [name.split(".") for name in names]
        found |= {p[1] for p in parts if p[0] == PACKAGE and len(p) > 1 and p[1] in modules}
        if any(p == [PACKAGE] for p in parts) and isinstance(node, ast.Import):
            found.add("__init__")
    return found


@functools.cache
def graph() -> dict[str, set[str]]:
    imports: dict[str, set[str]] = {name: set() for name in MODULES}
    for file, path in FILES.items():
        module = file.split(".")[0]
        imports[module] |= imported_modules(ast.parse(path.read_text()), MODULES) - {module}
    return imports


def reach(name: str, imports: dict[str, set[str]]) -> set[str]:
    """Every module that importing ``name`` brings in, itself left out."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        for module in imports.get(waiting.pop(), ()):
            if module not in seen:
                seen.add(module)
                waiting.append(module)
    return seen


def allowed_rooms(name: str) -> set[str]:
    """The named rooms that a named room may use."""
    if name in WORLD:
        return set(WORLD[: WORLD.index(name)])
    level = next(i for i, rooms in enumerate(LAW) if name in rooms)
    allowed = {room for rooms in LAW[:level] for room in rooms}
    return allowed | set(WORLD) if name == "loops" else allowed


ROOMS = {*WORLD, *(room for rooms in LAW for room in rooms)}


def test_there_is_a_house() -> None:
    assert {"errors", "devices", "_bridge", "rows", "testing"} <= MODULES


@pytest.mark.parametrize("name", sorted(ROOMS & MODULES))
def test_a_room_uses_only_the_rooms_before_it(name: str) -> None:
    beyond = (reach(name, graph()) & ROOMS) - allowed_rooms(name)
    assert not beyond, f"{name}.py reaches {sorted(beyond)}; it may use {allowed_rooms(name)}"


@pytest.mark.parametrize("name", sorted(LOWEST))
def test_the_lowest_modules_stand_on_errors_alone(name: str) -> None:
    assert graph()[name] <= LOWEST[name]


@pytest.mark.parametrize("name", sorted(MODULES - MAY_IMPORT_TOP))
def test_nothing_imports_what_stands_on_top(name: str) -> None:
    if name in TOP:
        # A program on top runs the library as its user does: through the public face.
        assert not graph()[name] & (set(TOP) - {"__init__"})
    else:
        assert not graph()[name] & set(TOP)


def test_no_module_reaches_itself() -> None:
    imports = {name: found for name, found in graph().items() if name != "__init__"}
    assert [name for name in imports if name in reach(name, imports)] == []


def private_accesses(tree: ast.AST) -> list[str]:
    """Private attributes and private packages of TensorFlow or Keras that the code touches."""
    found = []
    ours = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in {"self", "cls"}
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            private = node.attr.startswith("_") and not node.attr.endswith("__")
            own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            # `other._x`, where this file sets `self._x` too, is our own class's attribute.
            if private and not own and node.attr not in ours:
                found.append(f"{node.lineno}: {dotted}")
            if dotted in {"tensorflow.python", "keras.src", "tf.python", "tf.__internal__"}:
                found.append(f"{node.lineno}: {dotted}")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            module = getattr(node, "module", None) or ""
            for name in [module, *(f"{module}.{n}" if module else n for n in names)]:
                if name.startswith(("tensorflow.python", "keras.src", "tensorflow.__internal__")):
                    found.append(f"{node.lineno}: import {name}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "setattr"}:
            name = node.args[1] if len(node.args) > 1 else None
            if (
                isinstance(name, ast.Constant)
                and isinstance(name.value, str)
                and name.value.startswith("_")
                and not name.value.endswith("__")
                and not (isinstance(node.args[0], ast.Name) and node.args[0].id == "self")
            ):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("name", sorted(set(FILES) - {"_bridge"}))
def test_only_the_bridge_touches_private_attributes(name: str) -> None:
    assert private_accesses(ast.parse(FILES[name].read_text())) == []


@pytest.mark.parametrize(
    ("code", "touches"),
    [
        ("optimizer._all_reduce_sum_gradients(g)", True),
        ("strategy.extended._devices", True),
        ("getattr(strategy.extended, '_collective_key_base')", True),
        ("getattr(function, '__name__', None)", False),
        ("from tensorflow.python.eager import context", True),
        ("import keras.src.optimizers", True),
        ("from keras import src", True),
        ("from keras.src import backend", True),
        ("tf.__internal__.x", True),
        ("self._mine = 1", False),
        ("model.__class__.__name__", False),
        ("class A:\n  def f(self, other):\n    self._x = 1\n    return other._x", False),
    ],
)
def test_the_search_for_private_attributes_finds_them(code: str, touches: bool) -> None:
    assert bool(private_accesses(ast.parse(code))) is touches


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_holds_one_idea(name: str) -> None:
    lines = len(FILES[name].read_text().splitlines())
    assert lines <= 400, f"{name}.py has {lines} lines; over 400 it holds more than one idea"
    assert not set(re.split(r"[._]", name)) & {"util", "utils", "common", "helper", "helpers"}


@pytest.mark.parametrize("name", sorted(FILES))
def test_keras_is_imported_only_where_it_is_used(name: str) -> None:
    top = ast.Module(
        [
            node
            for node in ast.parse(FILES[name].read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
        ],
        [],
    )
    names = [ast.unparse(node) for node in top.body]
    assert not [line for line in names if line.split()[1].split(".")[0] == "keras"]
