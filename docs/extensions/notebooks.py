"""Executes the notebooks and writes them as pages of the site.

``python docs/extensions/notebooks.py`` executes each ``docs/notebooks/*.py`` from top to bottom and
writes its page and figures beside it; with names it executes only these. Pages are kept in the
repository, so that the site is built without TensorFlow. Standard error and TensorFlow's INFO lines
are not shown.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "notebooks"
# In front of the notebook: figures as small SVG files, whose names of parts do not change.
SETTINGS = """\
%config InlineBackend.figure_formats = ["svg"]
import matplotlib
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tfmultigpu"})
matplotlib.rcParams["font.size"] = 12
"""


def run(path: Path) -> Any:
    """Returns the notebook with its outputs; raises the error of a cell that fails."""
    import jupytext
    import nbclient
    import nbformat

    notebook = jupytext.read(path)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SETTINGS))
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3")
    client.execute(cwd=str(path.parent))
    del notebook.cells[0]
    return notebook


def page_of(notebook: Any, name: str) -> tuple[str, dict[str, str]]:
    """Returns the page of an executed notebook, and its figures by the names of their files."""
    parts: list[str] = []
    figures: dict[str, str] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            shown = output_of(output, name, figures)
            if shown:
                parts.append(shown)
    first, *rest = parts
    written = f"<!-- Written by python docs/extensions/notebooks.py from {name}.py. -->"
    # The page takes its name from the heading, so that comes first.
    title, _, text = first.partition("\n")
    link = f"To run it: `jupytext --to ipynb docs/notebooks/{name}.py`, and open what that makes."
    return "\n\n".join([title, written, text.strip(), link, *rest]) + "\n", figures


def output_of(output: Any, name: str, figures: dict[str, str]) -> str:
    """Returns an output of a cell as Markdown, "" if it is not shown; adds to the figures."""
    if output.output_type == "stream":
        lines = output.text.splitlines() if output.name == "stdout" else []
        shown = "\n".join(line for line in lines if not line.startswith("INFO:tensorflow:"))
        return f"```text\n{shown}\n```" if shown.strip() else ""
    data = output.get("data", {})
    if "image/svg+xml" in data:
        file = f"{name.replace('_', '-')}-{len(figures) + 1}.svg"
        svg = re.sub(r"<metadata>.*?</metadata>", "", data["image/svg+xml"], flags=re.DOTALL)
        figures[file] = re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)
        return f"![Figure {len(figures)}]({file})"
    if "text/html" in data:
        return f'<div class="output">\n{data["text/html"]}\n</div>'
    return f"```text\n{data['text/plain']}\n```" if "text/plain" in data else ""


def main(names: list[str]) -> None:
    """Executes and writes the notebooks with these names, or all."""
    for path in sorted(FOLDER.glob("*.py")):
        if names and path.stem not in names:
            continue
        page, figures = page_of(run(path), path.stem)
        stem = path.stem.replace("_", "-")
        for old in FOLDER.glob(f"{stem}-*.svg"):
            old.unlink()
        for file, svg in figures.items():
            (FOLDER / file).write_text(svg)
        (FOLDER / f"{stem}.md").write_text(page)
        print(f"{path.stem}: {len(figures)} figures")


if __name__ == "__main__":
    main(sys.argv[1:])
