"""Writes the picture and the tables of docs/architecture.md from the imports of the package.

``python docs/extensions/architecture.py`` writes the page anew; ``tests/docs/test_architecture.py``
holds it to the code.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tfmultigpu"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- Drawn by python docs/extensions/architecture.py from the imports. -->\n"
END = "<!-- End of what is drawn. -->\n"
_ORDER = PAGE.read_text().partition("```text\n")[2].partition("```")[0]
# Behind "errors, _compat", which are no packages.
PACKAGES = tuple(name.strip() for name in _ORDER.split("->")[1:])


def imported_packages(package: str) -> set[str]:
    """Returns the packages that the modules of a package import from."""
    found = set()
    for path in (SOURCE / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tfmultigpu."):
                found.add(str(node.module).split(".")[1])
    return found & set(PACKAGES) - {package}


def arrows(imports: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Returns the imports that do not follow from others, as (imported, importing)."""

    def reach(package: str) -> set[str]:
        return imports[package].union(*(reach(one) for one in imports[package]))

    return [
        (one, package)
        for package in PACKAGES
        for one in sorted(imports[package], key=PACKAGES.index)
        if not any(one in reach(other) for other in imports[package] - {one})
    ]


def first_line(path: Path) -> str:
    """Returns the first line of the docstring of a file."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]


def drawn() -> str:
    """Returns the picture and the tables."""
    imports = {package: imported_packages(package) for package in PACKAGES}
    lines = ["```mermaid", "flowchart LR"]
    lines += [f"    {one} --> {other}" for one, other in arrows(imports)]
    lines += [
        "```",
        "",
        "An arrow leads to a package that imports; what follows from others is left out.",
        "",
    ]
    for package in PACKAGES:
        lines += [f"### {package}", "", first_line(SOURCE / package / "__init__.py"), ""]
        lines += ["| module | |", "|---|---|"]
        for path in sorted((SOURCE / package).rglob("*.py")):
            name = path.relative_to(SOURCE / package).with_suffix("").as_posix()
            if not name.endswith("__init__"):
                lines.append(f"| `{name}` | {first_line(path)} |".replace("||", "\\|\\|"))
        lines.append("")
    return "\n".join(lines)


def page(text: str) -> str:
    """Returns the text of the page with its drawn part made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{drawn()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
