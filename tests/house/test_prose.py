"""The words of pages, docstrings and messages: what a reader would read twice is refused.

Each pattern is a habit that makes a sentence hard to read, with what to write instead.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lines.messages import VALUE, messages

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tfmultigpu"
# Pages that are made by a program, from texts that are held elsewhere.
MADE = {"docs/contributing/mutations.md", "docs/contributing/guarantees.md"}

TICS = {
    r"\b(?<!you )(?<!You )(?<!users )(?:is|are|was|were|be) told\b": "reported, warned about; who?",
    r"\btold (?:by|at|before|of|only|as)\b": "reported, warned about",
    r"\b[Tt](?:hat|hose) of\b(?! course)": "repeat the noun, or a possessive: one device's loss",
    r"(?<![Tt]here )\b(?:is|are|was) no\b(?! longer)": "is not a",
    r"(?<![Tt]here )\b(?:is|are) none\b(?! of)": "is None, is missing",
    r"\bcannot be had\b": "is not available",
    r"\b(?:go|goes|went|going) on\b": "resume, continue",
    r"\b[Ee]lsewhere is\b": "name the actor: Creating it anywhere else raises",
    r"\bwhoever\b|\b(?:for|by|to) who\b|: who drops\b|\bWho divides\b": "name the actor",
    r"\bof one's own\b": "your own",
    # One word for each thing: docs/glossary.md.
    r"\b[Aa]ccumulators?\b": "window",
    r"\bsharded (?:updates?|optimizers?)\b|\bshards? (?:the|an) update\b": "update by owners",
    r"\bshar(?:ed|ing) (?:of )?the update\b": "update by owners",
    r"\bsharded datasets?\b": "distributed dataset: a dataset is cut into shards",
    r"\b[Ss]hares? of (?:the |its |their )?(?:rows?|batch(?:es)?|examples?)\b": "shard",
    r"\b(?:its|their|each|smaller|larger) share\b": "shard, or fewer rows",
}


def without_code(page: str) -> str:
    """Returns a page without its blocks of code and its quoted code; lines stay where they are."""
    blank = re.sub(
        r"^( *)```.*\n(?:.*\n)*?\1```$", lambda m: "\n" * m[0].count("\n"), page, flags=re.MULTILINE
    )
    return re.sub(r"`[^`\n]*`", "`code`", blank)


def pages() -> Iterator[tuple[str, str]]:
    """Yields the name and the prose of each page."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        if name not in MADE:
            yield name, without_code(path.read_text())


def docstrings() -> Iterator[tuple[str, str]]:
    """Yields the place and the prose of each docstring, without its example."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                name = getattr(node, "name", "")
                text = re.sub(r"^ *(?:>>>|\.\.\.) .*$", "", text, flags=re.MULTILINE)
                yield f"{path.relative_to(ROOT).as_posix()} {name}", re.sub("``.*?``", "code", text)


def said() -> Iterator[tuple[str, str]]:
    """Yields the place and the text of each message, but for words that a promise holds."""
    for message in messages():
        text = message.text.replace(VALUE, "value")
        yield f"{message.file}:{message.line}", text.removeprefix("The accumulator was created")


def tics_in(texts: Iterator[tuple[str, str]]) -> list[str]:
    """Returns where a text has a habit, with what to write instead."""
    found = []
    for place, text in texts:
        flat = re.sub(r"\s+", " ", text)
        for pattern, write in TICS.items():
            for match in re.finditer(pattern, flat):
                around = flat[max(0, match.start() - 40) : match.end() + 30]
                found.append(f"{place}: ...{around}... ({write})")
    return found


# Fails if a page has a sentence that a test can tell is read twice.
def test_pages_are_plain() -> None:
    assert tics_in(pages()) == []


# Fails if the pages of users grow: what only a contributor needs stands in docs/contributing.
def test_users_read_fifteen_thousand_words_at_most() -> None:
    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "how-to").glob("*.md")]
    words = sum(len(path.read_text().split()) for path in (ROOT / "README.md", *files))
    assert words <= 15_000


# Fails if a docstring has one, or begins with "Takes": it says what the object is for.
def test_docstrings_are_plain() -> None:
    assert tics_in(docstrings()) == []
    assert [place for place, text in docstrings() if text.startswith("Takes ")] == []


# Fails if a message has one.
def test_messages_are_plain() -> None:
    assert tics_in(said()) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("You are told which one it is.", 0),
        ("A metric whose state is not a sum is told.", 1),
        ("its gradient is that\nof one device", 1),
        ("there is no `x`, there is none, and the device is no longer there", 0),
        ("A sum over replicas is no mean.", 1),
        ("Its loss is none.", 1),
        ("Create the accumulator; give it its share of the rows.", 3),
        ("A `GradientAccumulator` adds; `shares=` are numbers. The sharded update.", 1),
    ],
)
def test_habits_are_found(text: str, count: int) -> None:
    assert len(tics_in(iter([("here", text)]))) == count


def test_code_is_not_prose() -> None:
    page = "that of\n```python\nx = 'that of'\n```\n`that of` those of\n"
    assert without_code(page) == "that of\n\n\n\n`code` those of\n"
