"""The library may only shrink: a ratchet for the lines of each room, and of the tests.

``lines.json`` holds the largest number of lines each room may have. Lower a number when a room has
shrunk; never raise one. ``python tests/house/test_lines.py`` writes today's where they are lower.
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUMBERS = Path(__file__).with_name("lines.json")
SLACK = 100  # Lines a room may be below its number before the number has to follow.


def lines_of(folder: Path, pattern: str = "**/*") -> int:
    files = [path for path in folder.glob(pattern) if path.suffix in (".py", ".pyi")]
    return sum(len(path.read_text().splitlines()) for path in files)


def lines_now() -> dict[str, int]:
    """Returns the lines of each package of src, of its modules outside any, and of the tests."""
    package = ROOT / "src" / "tfmultigpu"
    rooms = {"src together": lines_of(package), "src/*": lines_of(package, "*")}
    for init in sorted(package.rglob("__init__.py")):
        folder = init.parent
        # A package inside a room counts with the room; each add-on is a room.
        if folder.parent == package or folder.parent.name == "addons":
            name = folder.relative_to(package).as_posix()
            rooms[f"src/{name}"] = lines_of(folder, "*" if name == "addons" else "**/*")
    return rooms | {"tests together": lines_of(ROOT / "tests")}


# Fails if a room has more lines than it had, or is new and has no number.
def test_no_room_grows() -> None:
    numbers, now = json.loads(NUMBERS.read_text()), lines_now()
    grown = {room: (lines, numbers.get(room)) for room, lines in now.items()
             if lines > numbers.get(room, 0)}  # fmt: skip
    assert not grown, f"(now, allowed): {grown}"


# Fails if a room has shrunk and could grow again unnoticed.
def test_numbers_follow_the_rooms() -> None:
    numbers, now = json.loads(NUMBERS.read_text()), lines_now()
    behind = {r: (now.get(r, 0), n) for r, n in numbers.items() if n - now.get(r, 0) > SLACK}
    gone = [room for room in numbers if room not in now]
    assert not behind, f"(now, allowed): {behind}. Run python tests/house/test_lines.py."
    assert not gone, f"rooms without code: {gone}. Run python tests/house/test_lines.py."


if __name__ == "__main__":
    before = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    lower = {room: min(lines, before.get(room, lines)) for room, lines in lines_now().items()}
    NUMBERS.write_text(json.dumps(lower, indent=2) + "\n")
