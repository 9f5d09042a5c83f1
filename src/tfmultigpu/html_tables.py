"""Tables of facts in HTML, which a notebook shows in place of the text of a result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["html_table"]

# A notebook aligns the text of cells to the right.
_CELL = "text-align:left;vertical-align:top"


def html_table(
    title: str,
    rows: Iterable[Sequence[object]],
    *,
    header: Sequence[str] = (),
    notes: Iterable[str] = (),
) -> str:
    """Returns a table as HTML; all texts are escaped.

    Args:
        title: The line above the table.
        rows: The cells of each row. Without a header the first cell of a row is its name.
        header: The names of the columns.
        notes: Paragraphs below the table; line breaks in them are kept.

    Example:
        >>> html_table("a < b", [("rows", 64)])[:40]
        '<div><p><b>a &lt; b</b></p><div style="o'
    """
    lines = [f"<tr>{''.join(_cell(one, 'th') for one in header)}</tr>"] if header else []
    for first, *others in rows:
        cells = [_cell(first, "td" if header else "th"), *[_cell(one, "td") for one in others]]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    table = f'<div style="overflow-x:auto"><table>{"".join(lines)}</table></div>' if lines else ""
    below = "".join(f'<p style="white-space:pre-wrap">{escape(one)}</p>' for one in notes)
    return f"<div><p><b>{escape(title)}</b></p>{table}{below}</div>"


def _cell(content: object, tag: str) -> str:
    return f'<{tag} style="{_CELL}">{escape(str(content))}</{tag}>'
