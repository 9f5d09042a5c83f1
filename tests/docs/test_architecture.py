"""The picture of the house is the one that the imports draw."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from test_house import LAYERS, PACKAGES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def architecture() -> ModuleType:
    path = ROOT / "docs" / "extensions" / "architecture.py"
    spec = importlib.util.spec_from_file_location("architecture", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_drawn_from_the_imports_of_today(architecture: ModuleType) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert architecture.page(page) == page, "run: python docs/extensions/architecture.py"


def test_the_order_of_the_page_is_that_of_the_house(architecture: ModuleType) -> None:
    assert tuple(name for name in LAYERS if name in PACKAGES) == architecture.PACKAGES


def test_arrows_that_follow_from_others_are_left_out(architecture: ModuleType) -> None:
    imports = {name: set() for name in architecture.PACKAGES}
    imports |= {"clusters": {"devices"}, "strategies": {"devices", "clusters"}}
    assert architecture.arrows(imports) == [("devices", "clusters"), ("clusters", "strategies")]
