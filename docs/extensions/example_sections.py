"""For the reference: an ``Example:`` section is shown as code, like an ``Examples:`` section."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Renames the section, because only the plural is read as doctest."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Runs for every module, class and function."""
        if obj.docstring is not None:
            value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = value
