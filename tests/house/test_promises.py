"""Each row of the table of promises is proved by a file of tests/promises, in public names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROMISES = ROOT / "tests" / "promises"
# By how the first column of a row begins.
FILES = {
    "batches that N does not divide": "test_batches.py",
    "sample weights, masks, several outputs": "test_weights.py",
    "`clip_norm`, or clipping set": "test_clipping.py",
    "`micro_batches=k`": "test_batches.py",
    "dropout, noise": "test_draws.py",
    "[`logical_replicas=V`]": "test_same_bits.py",
    "`shares=(3, 1)`": "test_batches.py",
    "`shard_update`": "test_shard_update.py",
    "`fit`": "test_fit.py",
    "several steps on each batch": "test_chain.py",
    "a dataset of dicts": "test_datasets.py",
    "an inf or NaN on one replica": "test_overflow.py",
    "`step.run` when the data ends": "test_run.py",
    "a run killed and resumed": "test_resume.py",
    "code that mixes rows": "test_touching_rows.py",
    "a step that raises": "test_failing_step.py",
    "a device, an address or a worker": "test_workers.py",
    "a worker that dies": "test_workers.py",
    "[`plan_memory`]": "test_memory_before_a_run.py",
}


def test_each_row_of_the_page_has_a_file() -> None:
    table = (ROOT / "docs" / "law.md").read_text().partition("| with N replicas | you get |")[2]
    rows = re.findall(r"^\| (?!---)(.+?) \|", table.partition("\n\n")[0], re.MULTILINE)
    beginnings = [[start for start in FILES if row.startswith(start)] for row in rows]
    assert len(rows) > 10
    assert sorted(start for starts in beginnings for start in starts) == sorted(FILES)
    assert [len(starts) for starts in beginnings] == [1] * len(rows)
    missing = [file for file in FILES.values() if not (PROMISES / file).exists()]
    assert not missing


def modules_imported(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {*names, *(str(n.module) for n in nodes if isinstance(n, ast.ImportFrom))}


# The promises must outlive the modules that keep them.
def test_promises_know_no_module_of_the_library() -> None:
    files = [*PROMISES.glob("*.py"), *(ROOT / "tests" / "law").glob("*.py")]
    inside = {
        (file.name, module)
        for file in files
        for module in modules_imported(file)
        if module.startswith("tfmultigpu.")
    }
    private = [
        (file.name, node.attr)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "tmg"
        and node.attr.startswith("_")
    ]
    assert not inside
    assert not private


# The truth must not be computed by what is held to it.
def test_the_plain_loop_has_none_of_our_code() -> None:
    reference = ROOT / "src" / "tfmultigpu" / "addons" / "testing" / "reference.py"
    for file in (*(ROOT / "tests" / "law" / name for name in ("plain.py", "model.py")), reference):
        assert not {m for m in modules_imported(file) if m.startswith("tfmultigpu")}, file
