"""Every message that the pages of troubles quote is one that the library writes."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import tfmultigpu as tmg

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "troubleshooting.md", ROOT / "docs" / "contributing" / "messages.md"
PAGE = "\n".join(page.read_text() for page in PAGES)
QUOTED = re.findall(r"^\| `([^`]+)` \| (?!cause)", PAGE, re.MULTILINE)


def parsed(text: str) -> ast.AST:
    """Parses it, twice if CPython before 3.11.8 miscounts while other threads run (gh-106905)."""
    try:
        return ast.parse(text)
    except SystemError:
        return ast.parse(text)


@functools.cache
def messages() -> tuple[str, ...]:
    """The texts of the source; a value in an f-string is "..."."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(parsed(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if all(isinstance(part, (ast.Constant, ast.FormattedValue)) for part in parts):
                texts = [getattr(part, "value", "") for part in parts]
                found.append("".join(t if isinstance(t, str) else "..." for t in texts))
    return tuple(found)


def is_written(quoted: str) -> bool:
    return any(quoted in message for message in messages())


def test_every_quoted_message_is_one_of_the_library() -> None:
    assert len(QUOTED) >= 30
    assert [quoted for quoted in QUOTED if not is_written(quoted)] == []
    assert not is_written("The model is compiled too often")


def test_names_on_the_page_are_public() -> None:
    named = set(re.findall(r"tmg\.(\w+)", PAGE))
    assert len(named) > 6
    assert [name for name in named if not hasattr(tmg, name)] == []
