"""Shows README.md as the first page of the site, and the version under each page.

Pages may link README.md and the examples, as they are on GitHub.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Runs first: says for which version the site was built."""
    source = Path("src/tfmultigpu/_version.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"', source, re.MULTILINE)
    config["copyright"] = f"tfmultigpu {version}"
    return config


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Runs for every page: replaces the text of the first one, and links that GitHub alone has."""
    if page.file.src_uri == "index.md":
        markdown = Path("README.md").read_text(encoding="utf-8").replace("](docs/", "](")
        # Files beside the folder of pages are not on the site.
        return re.sub(r"\[([^]]+)\]\(([A-Z]+\.md)\)", r"\1 (`\2`)", markdown)
    markdown = re.sub(r"\[(`[^`]+`)\]\((?:\.\./)+examples/[^)]+\)", r"\1", markdown)
    return re.sub(r"\]\(\.\./((?:\.\./)*)README\.md", r"](\1index.md", markdown)
