"""What a reader holds in the head: the lines of each room, and how dense they are.

A room has a budget of about a tenth above what it needs. A change that needs more raises it in the
same commit, which says why; lower it where a room has shrunk for good. The bounds of density only
fall: by them one line asks no more of a reader than a line of Optax or Fabric does.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tfmultigpu"

# Lines, blank ones included.
BUDGETS = {
    "src together": 33_640,
    "src/*": 1_460,
    "src/_compat": 1_010,
    "src/accumulation": 3_170,
    "src/addons": 10,
    "src/addons/checkpoints": 1_370,
    "src/addons/diagnostics": 1_280,
    "src/addons/loops": 3_350,
    "src/addons/sharding": 1_450,
    "src/addons/testing": 910,
    "src/addons/tuning": 2_150,
    "src/addons/verification": 2_050,
    "src/addons/watching": 920,
    "src/addons/workers": 1_570,
    "src/data": 2_450,
    "src/devices": 700,
    "src/steps": 8_060,
    "src/strategies": 2_290,
    "tests together": 44_500,
}

# The most that src may have; where it is per 1,000 lines, lines that are not blank.
DENSITY = {
    "comprehensions per 1,000 lines": 25,
    "comprehensions inside others": 3,
    "conditional expressions per 1,000 lines": 12.7,
    "aliases of Any": 8,
    "objects made without their constructor": 1,
    "attributes set from outside their object": 20,
    "fmt: skip": 4,
}

COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp
WITHOUT_INIT = r"object\.__new__|__dict__\.update"
OWN = ("self", "cls")


def lines_of(folder: Path, pattern: str = "**/*") -> int:
    files = [path for path in folder.glob(pattern) if path.suffix in (".py", ".pyi")]
    return sum(len(path.read_text().splitlines()) for path in files)


def lines_now() -> dict[str, int]:
    """Returns the lines of each package of src, of its modules outside any, and of the tests."""
    rooms = {"src together": lines_of(PACKAGE), "src/*": lines_of(PACKAGE, "*")}
    for init in sorted(PACKAGE.rglob("__init__.py")):
        folder = init.parent
        # A package inside a room counts with the room; each add-on is a room.
        if folder.parent == PACKAGE or folder.parent.name == "addons":
            name = folder.relative_to(PACKAGE).as_posix()
            rooms[f"src/{name}"] = lines_of(folder, "*" if name == "addons" else "**/*")
    return rooms | {"tests together": lines_of(ROOT / "tests")}


def density(texts: list[str]) -> dict[str, float]:
    """Returns what ``DENSITY`` bounds, of these source texts together."""
    found = dict.fromkeys(DENSITY, 0.0)
    for text in texts:
        found["objects made without their constructor"] += len(re.findall(WITHOUT_INIT, text))
        found["fmt: skip"] += text.count("# fmt: skip")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, COMPREHENSIONS):
                inside = [one for one in ast.walk(node) if isinstance(one, COMPREHENSIONS)]
                found["comprehensions per 1,000 lines"] += 1
                found["comprehensions inside others"] += len(inside) > 1
            elif isinstance(node, ast.IfExp):
                found["conditional expressions per 1,000 lines"] += 1
            elif isinstance(node, ast.AnnAssign) and ast.unparse(node).endswith("TypeAlias = Any"):
                found["aliases of Any"] += 1
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                outside = not (isinstance(node.value, ast.Name) and node.value.id in OWN)
                found["attributes set from outside their object"] += outside
    lines = sum(bool(line.strip()) for text in texts for line in text.splitlines())
    for name in found:
        if name.endswith("per 1,000 lines"):
            found[name] *= 1000 / lines
    return found


# Fails if a room outgrows its budget, or is new and has none.
def test_each_room_is_within_its_budget() -> None:
    now = lines_now()
    over = {room: (n, BUDGETS.get(room)) for room, n in now.items() if n > BUDGETS.get(room, 0)}
    assert not over, f"(now, allowed): {over}. Raise the budget in the commit that explains it."
    assert not BUDGETS.keys() - now.keys(), "rooms without code"


# Fails if src asks more of a reader than before.
def test_src_is_not_denser() -> None:
    now = density([path.read_text() for path in sorted(PACKAGE.rglob("*.py"))])
    over = {name: (n, DENSITY[name]) for name, n in now.items() if n > DENSITY[name]}
    assert not over, f"(now, allowed): {over}. Write a loop, a record or a name."


# Fails if what density counts is not counted.
def test_density_counts() -> None:
    text = (
        "x = [[b for b in a] for a in c if (a if a else b)]  # fmt: skip\n"
        "self.x, other.y = 1, 2\nother.z += 1\nself.other.w: Any = object.__new__(T)\n\n"
        "T: TypeAlias = Any\n"
    )
    expected = (400, 1, 200, 1, 1, 3, 1)
    assert density([text]) == dict(zip(DENSITY, expected, strict=True))
