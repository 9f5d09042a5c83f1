"""The plan of the house: who may import whom, and where private names may be touched."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "tfmultigpu"
PACKAGE = "tfmultigpu"
FILES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts): path
    for path in sorted(SOURCE.rglob("*.py"))
}
# A package imports only from those before it. Those in ALONE import nothing of the library; what is
# last is made of the public names.
LAYERS = (
    "errors",
    "types",
    "lists",
    "recorder",
    "arguments",
    "clusters",
    "_compat",
    "_patch",
    "_version",
    "user_code",
    "devices",
    "strategies",
    "data",
    "accumulation",
    "steps",
    "addons",
    "addons.checkpoints",
    "addons.diagnostics",
    "addons.loops",
    "addons.sharding",
    "addons.testing",
    "addons.tuning",
    "addons.verification",
    "addons.watching",
    "addons.workers",
    "__init__",
    "demo",
    "__main__",
)
ALONE = ("errors", "types", "lists", "recorder", "_patch", "_version")
# The core imports an add-on here alone, inside a function: only when it is asked for.
DOORS = {
    "steps.make -> addons.verification.__init__",
    "strategies.factory -> addons.watching.watches",
    "strategies.factory -> addons.workers.joining",
    "strategies.factory -> addons.workers.sources",
}
# The one pair of add-ons: both start worker processes, and end them.
PAIRS = {"addons.testing.workers -> addons.workers.processes"}
# Private names are in this room, and in the class of sharding that replaces some of a variable.
PRIVATE = "_compat"
PRIVATE_TOO = "addons.sharding._private"


def room(name: str) -> str:
    """The package of a module, or the module itself if it is in none; each add-on is a room."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first == "addons" and len(rest) > 1 else first


PACKAGES = sorted({room(name) for name in FILES if "." in name} - {"addons"})


def is_run(node: ast.AST) -> bool:
    """Whether a statement is run, not read by a type checker alone."""
    return not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")


def imported_modules(tree: ast.Module, files: set[str]) -> set[str]:
    """The modules of this package that the code imports, anywhere in the file."""
    found: set[str] = set()
    for node in [node for part in tree.body if is_run(part) for node in ast.walk(part)]:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are written in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package != PACKAGE:
                continue
            # A name from a module, a module, a package, or the public face.
            module = rest.rpartition(".")[0]
            candidates = [rest, f"{rest}.__init__", module, f"{module}.__init__", "__init__"]
            found.add(next(one for one in candidates if one in files))
    return found


@functools.cache
def graph() -> dict[str, set[str]]:
    trees = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
    return {name: imported_modules(tree, set(FILES)) - {name} for name, tree in trees.items()}


def wrong_imports(imports: dict[str, set[str]]) -> list[str]:
    """Imports of a module from a package that is not before its own."""
    return [
        f"{name} -> {other}"
        for name, others in sorted(imports.items())
        for other in sorted(others)
        if room(name) != room(other)
        # The public face loads its names when they are first used.
        and f"{name} -> {other}" not in DOORS | PAIRS
        and (
            LAYERS.index(room(other)) > LAYERS.index(room(name))
            or room(name) in ALONE
            or (room(name).startswith("addons.") and room(other).startswith("addons."))
        )
    ]


def in_order(imports: dict[str, set[str]]) -> list[str]:
    """Modules, each after those it imports; `__init__` files only hand names on.

    Raises:
        graphlib.CycleError: A module imports itself through others.
    """
    kept = {
        name: {other for other in others if not other.endswith("__init__")}
        for name, others in imports.items()
        if not name.endswith("__init__")
    }
    return list(graphlib.TopologicalSorter(kept).static_order())


def test_every_module_is_in_a_room_of_the_list() -> None:
    assert sorted({room(name) for name in FILES}) == sorted(LAYERS)


def test_no_import_runs_the_wrong_way() -> None:
    assert wrong_imports(graph()) == []


@pytest.mark.parametrize("door", sorted(DOORS), ids=str)
def test_the_core_imports_an_add_on_only_when_asked(door: str) -> None:
    name, _, other = door.partition(" -> ")
    tree = ast.parse(FILES[name].read_text())
    tree.body = [node for node in tree.body if not isinstance(node, ast.FunctionDef)]
    assert other in graph()[name]
    assert other not in imported_modules(tree, set(FILES))


def test_no_module_reaches_itself() -> None:
    assert in_order(graph())


def test_wrong_imports_and_cycles_are_found() -> None:
    imports = {
        "data.sources": {"strategies.topology"},
        "strategies.topology": {"data.sources"},
        "errors": {"devices.names"},
        "devices.names": set[str](),
        "addons.loops.fit": {"addons.checkpoints.files", "devices.names"},
        "addons.checkpoints.files": set[str](),
    }
    wrong = [
        "addons.loops.fit -> addons.checkpoints.files",
        "errors -> devices.names",
        "strategies.topology -> data.sources",
    ]
    assert wrong_imports(imports) == wrong
    with pytest.raises(graphlib.CycleError, match=r"data\.sources"):
        in_order(imports)


def what_else_it_does(package: str) -> list[str]:
    """Returns what the ``__init__`` of a package does besides handing names on."""
    name = f"{package}.__init__"
    docstring, *body = ast.parse(FILES[name].read_text()).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    assigned = [ast.unparse(node) for node in body if not isinstance(node, ast.ImportFrom)]
    handed_on = sorted(alias.name for node in imports for alias in node.names)
    found = [] if isinstance(docstring, ast.Expr) else [f"{name}: no docstring"]
    if assigned != [ast.unparse(ast.parse(f"__all__ = {handed_on}"))]:
        found.append(f"{name}: {assigned}")
    # Within its package a module imports modules, not the package, which is not complete yet.
    inside = [one for one in graph() if room(one) == package and name in graph()[one]]
    return found + [f"{one} imports {name}" for one in inside]


def test_a_package_only_hands_names_on() -> None:
    assert [one for package in PACKAGES for one in what_else_it_does(package)] == []


# An attribute of something else than this object, one that is named in a text, a private package.
# Named tuples have fields, and tensors marks of this library.
PRIVATE_NAME = re.compile(
    r"(?<![\w.])(?!(?:self|cls)\._|tfmultigpu\b)[\w.]+(?:\([^()]*\)|\[[^\]]*\])*\._(?!_|replace\b)(\w+)"
    r"|[\"']_(?!_|fields\b|tfmultigpu_)[a-z]\w*[\"']"
    r"|[gs]etattr\((?!self\b)[^\"'\n]*[\"']_(?!_)"
    r"|\btensorflow\.(?:python|__internal__)|\btf\.(?:python|__internal__)"
    r"|\bkeras\.src|\bfrom keras import src"
)


def private_accesses(code: str) -> list[str]:
    """Private attributes and private packages of TensorFlow or Keras that the code touches."""
    code = re.sub(r'(?s)""".*?"""', "", ast.unparse(ast.parse(code)))
    # `other._x`, where this file sets `self._x` too, is our own class's attribute.
    ours = set(re.findall(r"\b(?:self|cls)\._(\w+)", code))
    return [m.group() for m in PRIVATE_NAME.finditer(code) if m[1] not in ours]


def test_only_these_files_touch_private_attributes() -> None:
    found = {}
    for name, path in FILES.items():
        accesses = private_accesses(path.read_text())
        if accesses and room(name) != PRIVATE:
            found[name] = accesses
    assert list(found) == [PRIVATE_TOO], found


TOUCHES = {
    "optimizer._all_reduce_sum_gradients(g)": True,
    "strategy.extended._devices": True,
    "getattr(strategy.extended, '_collective_key_base')": True,
    "getattr(function, '__name__', None)": False,
    "from tensorflow.python.eager import context": True,
    "import keras.src.optimizers": True,
    "from keras import src": True,
    "from keras.src import backend": True,
    "tf.__internal__.x": True,
    "patching(layers, '_moments', moments)": True,
    "name.startswith('_self_')": True,
    "hasattr(batch, '_fields')": False,
    "tensor._tfmultigpu_mark": True,
    "setting(tensor, '_tfmultigpu_mark')": False,
    "self._mine = 1": False,
    "model.__class__.__name__": False,
    "class A:\n  def f(self, other):\n    self._x = 1\n    return other._x": False,
}


def test_the_search_for_private_attributes_finds_them() -> None:
    found = {code: bool(private_accesses(code)) for code in TOUCHES}
    assert found == TOUCHES


def test_names_of_files_say_what_is_inside() -> None:
    vague = {"util", "utils", "common", "helper", "helpers", "misc"}
    assert [name for name in FILES if set(re.split(r"[._]", name)) & vague] == []


def test_keras_is_imported_only_where_it_is_used() -> None:
    found = [
        f"{name}: {ast.unparse(node)}"
        for name, path in FILES.items()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        # Devices are set up before Keras is imported; steps and add-ons are of its models.
        and not name.startswith(("steps.", "addons.", "demo"))
        and ast.unparse(node).split()[1].partition(".")[0] == "keras"
    ]
    assert found == []


# Who asks where a variable lives and how it is updated, beside a step, which asks its Target.
ASKED = {
    "owner_of": "replicated",
    "how_taken": "replicated",
    "units_of": "one_device replicated train",
    "is_table": "accumulator lookups replicated state step",  # In ``state`` of hash tables.
    "is_sharded": "lookups program_report replicated row_parts update variables",
}


@pytest.mark.parametrize("question", ASKED)
def test_a_step_asks_the_target_of_a_variable(question: str) -> None:
    pattern = re.compile(rf"from [^)]*\b{question}\b")
    found = []
    for name, path in FILES.items():
        imports = ast.walk(ast.parse(path.read_text()))
        texts = [ast.unparse(node) for node in imports if isinstance(node, ast.ImportFrom)]
        if any(map(pattern.match, texts)):
            found.append(name.rpartition(".")[2])
    assert sorted(found) == ASKED[question].split()
