"""The guides can be read and pasted: their code shows all set-up it needs.

That the programs run and fit on a screen is held in ``test_documentation.py``.
"""

from __future__ import annotations

import re

from test_documentation import PAGES, blocks_of, programs_of

GUIDES = [
    f"docs/{name}.md"
    for name in (
        "by-hand",
        "checkpoints",
        "coupled-losses",
        "data",
        "devices",
        "law",
        "loops",
        "modules",
        "own-features",
        "own-steps",
        "speed",
        "start",
        "steps",
        "testing",
        "troubleshooting",
        "unequal-gpus",
        "verification",
        "workers",
    )
]
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


def faults_of(page: str) -> list[str]:
    """Returns where a guide does not say, or does not show, what its programs need."""
    text = PAGES[page].read_text()
    programs = programs_of(text)
    blocks = [block for block in blocks_of(text) if block.language == "python"]
    found = [f"makes no devices for {line}" for line in map(setup_missing, programs) if line]
    if not re.search(r"^import tfmultigpu as tmg$", blocks[0].code, re.MULTILINE):
        found.append("the first block does not start a program")
    if len(blocks) > len(programs) and not any(sentence in text for sentence in CONTINUED):
        found.append("does not say that its blocks continue those above")
    return [f"{page}: {one}" for one in found]


def test_a_guide_shows_what_its_programs_need() -> None:
    assert [one for page in GUIDES for one in faults_of(page)] == []


def test_missing_set_up_is_found() -> None:
    needs = "strategy = tmg.create_strategy(devices=4)\n"
    assert setup_missing(needs) == needs.strip()
    assert setup_missing('tmg.split_device("CPU:0", parts=4)\n' + needs) == ""
    assert setup_missing("strategy = tmg.create_strategy()\n") == ""
