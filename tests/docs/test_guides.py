"""The guides can be read and pasted: code of 80 columns that shows all set-up it needs.

That the programs run is held in ``test_documentation.py``.
"""

from __future__ import annotations

import re

import pytest
from test_documentation import PAGES, blocks_of, programs_of

GUIDES = [
    f"docs/{name}.md"
    for name in (
        "checkpoints",
        "coupled-losses",
        "data",
        "devices",
        "diagnostics",
        "law",
        "loops",
        "own-steps",
        "steps",
        "strategies",
        "testing",
        "unequal-gpus",
        "verification",
        "workers",
    )
]
WIDTH = 80
# A strategy of several devices, and the two calls that make them on a machine with one CPU.
SEVERAL = re.compile(r"devices=(?:[2-9]|\[.*,)|workers=[2-9]\)")
MAKES = re.compile(r"split_device\(|virtual_devices\(|run_workers\(")
# How a page says that its blocks continue those above them.
CONTINUED = (
    "The blocks of this page are one program",
    "The blocks from here on are one program",
    "Every block with imports on this page",
)


def setup_missing(program: str) -> str:
    """Returns the first line that needs several devices before the program has made them."""
    for line in program.splitlines():
        if MAKES.search(line):
            return ""
        if SEVERAL.search(line):
            return line
    return ""


@pytest.mark.parametrize("page", GUIDES)
def test_the_code_of_a_guide_fits_on_a_screen(page: str) -> None:
    wide = [
        line
        for block in blocks_of(PAGES[page].read_text())
        if block.language == "python"
        for line in block.code.splitlines()
        if len(line) > WIDTH
    ]
    assert wide == []


@pytest.mark.parametrize("page", GUIDES)
def test_a_program_makes_the_devices_it_asks_for(page: str) -> None:
    missing = [setup_missing(program) for program in programs_of(PAGES[page].read_text())]
    assert [line for line in missing if line] == []


@pytest.mark.parametrize("page", GUIDES)
def test_the_first_block_of_a_guide_starts_a_program(page: str) -> None:
    first = next(
        block for block in blocks_of(PAGES[page].read_text()) if block.language == "python"
    )
    assert re.search(r"^import tfmultigpu as tmg$", first.code, re.MULTILINE)


@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_says_that_its_blocks_continue_those_above(page: str) -> None:
    text = PAGES[page].read_text()
    blocks = [block for block in blocks_of(text) if block.language == "python"]
    if len(blocks) > len(programs_of(text)):
        assert any(sentence in text for sentence in CONTINUED)


def test_missing_set_up_is_found() -> None:
    needs = "strategy = tmg.create_strategy(devices=4)\n"
    assert setup_missing(needs) == needs.strip()
    assert setup_missing('tmg.split_device("CPU:0", parts=4)\n' + needs) == ""
    assert setup_missing("strategy = tmg.create_strategy()\n") == ""
