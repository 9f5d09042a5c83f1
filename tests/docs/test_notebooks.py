"""The pages of the notebooks show the notebooks of today; nothing is executed here."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.py"))
AGAIN = "run: nox -s notebooks"


def cells_of(text: str) -> list[tuple[str, str]]:
    """The cells of a notebook as jupytext writes it: their kind and their text."""
    cells = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            cells.append(("markdown", re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip()))
        else:
            cells.append(("code", body.strip()))
    return cells


def page_of(notebook: Path) -> Path:
    return FOLDER / f"{notebook.stem.replace('_', '-')}.md"


def test_there_are_three_notebooks_and_no_other_pages() -> None:
    assert len(NOTEBOOKS) == 3
    assert sorted(FOLDER.glob("*.md")) == sorted(map(page_of, NOTEBOOKS))


def test_the_page_has_every_cell_of_the_notebook() -> None:
    for notebook in NOTEBOOKS:
        page = page_of(notebook).read_text()
        cells = cells_of(notebook.read_text())
        for kind, text in cells:
            shown = text if kind == "markdown" else f"```python\n{text}\n```"
            assert all(part in page for part in shown.split("\n\n", 1)), AGAIN
        assert page.count("```python\n") == sum(kind == "code" for kind, _ in cells), AGAIN


def test_the_page_shows_pictures_and_what_was_printed() -> None:
    for notebook in NOTEBOOKS:
        page = page_of(notebook).read_text()
        figures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", page)
        drawn = sorted(path.name for path in FOLDER.glob(f"{page_of(notebook).stem}-*.svg"))
        assert len(figures) >= 2
        assert sorted(figures) == drawn
        assert "```text\n" in page
        assert "Traceback" not in page
