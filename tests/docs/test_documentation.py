"""The documentation is true: its programs run, its commands exist, every public name is in it.

A ``python`` block that imports tfmultigpu starts a program, the blocks after it continue that
program. A ``diff`` block is two programs: what it was, and what it becomes. Each program runs in a
process of its own, with one CPU and nothing before it. A ``text`` block directly below a ``python``
block is what it prints.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import itertools
import pkgutil
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from law.processes import run_program

import tfmultigpu as tmg
from tfmultigpu.__main__ import main

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
# Blocks that are shown and not run.
SHOWN = {"text", "console", "json", "mermaid", "diff"}
COMMANDS = {"sh"}


@dataclass(frozen=True)
class Block:
    language: str
    line: int
    code: str


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page; the line is that of the first line of code."""
    found = []
    for match in re.finditer(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", text, re.MULTILINE):
        line = text[: match.start(3)].count("\n") + 1
        code = "".join(row.removeprefix(match[1]) for row in match[3].splitlines(keepends=True))
        found.append(Block(match[2].split()[0] if match[2].strip() else "", line, code))
    return found


def programs_of(text: str) -> list[str]:
    """The programs of a page, padded so that line numbers are those of the page."""
    programs: list[str] = []
    for block in blocks_of(text):
        if block.language != "python":
            continue
        starts = re.search(r"^(import|from) tfmultigpu\b", block.code, re.MULTILINE)
        if starts or not programs:
            programs.append("")
        padding = block.line - 1 - programs[-1].count("\n")
        programs[-1] += "\n" * padding + block.code
    return programs


def sides_of(diff: str) -> tuple[str, str]:
    """The program before a change and the program after it."""
    lines = diff.splitlines(keepends=True)
    return tuple(
        "".join(line[1:] if line.strip() else line for line in lines if line[0] != other)
        for other in "+-"
    )


def all_programs_of(text: str) -> list[str]:
    """The programs of a page and both sides of its diffs, without those that need Horovod.

    A diff without imports continues the program above it.
    """
    programs = programs_of(text)
    for block in blocks_of(text):
        if block.language != "diff":
            continue
        above = ""
        if "import " not in block.code:
            above = programs_of("".join(text.splitlines(keepends=True)[: block.line - 2]))[-1]
        padding = "\n" * (block.line - 1 - above.count("\n"))
        for side in sides_of(block.code):
            if "import horovod" not in side:
                programs.append(above + padding + side)
    return programs


def test_a_diff_is_two_programs() -> None:
    page = "```diff\n import keras\n+import tfmultigpu\n\n-a = 1\n+a = 2\n```\n"
    before, after = all_programs_of(page)
    assert before == "\nimport keras\n\na = 1\n"
    assert after == "\nimport keras\nimport tfmultigpu\n\na = 2\n"


def test_a_diff_without_imports_continues_the_program_above_it() -> None:
    page = "```python\nimport tfmultigpu\n```\n\n```diff\n-a = 1\n+a = 2\n```\n"
    program, before, after = all_programs_of(page)
    assert program == "\nimport tfmultigpu\n"
    assert (before, after) == (f"{program}\n\n\na = 1\n", f"{program}\n\n\na = 2\n")


def test_blocks_become_programs_with_the_lines_of_the_page() -> None:
    page = (
        "```python\nimport tfmultigpu as tmg\n```\ntext\n```python\nprint(1)\n```\n"
        "```sh\nls\n```\n- item\n\n    ```python\n    import tfmultigpu\n    ```\n"
    )
    assert programs_of(page) == [
        "\nimport tfmultigpu as tmg\n\n\n\nprint(1)\n",
        "\n" * 13 + "import tfmultigpu\n",
    ]
    assert [block.language for block in blocks_of(page)] == ["python", "python", "sh", "python"]


EXAMPLE = """
import doctest, importlib
tests = doctest.DocTestFinder().find(importlib.import_module({module!r}))
(test,) = [test for test in tests if test.name == {name!r}]
assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0
"""


def examples() -> dict[str, str]:
    """A program for each example in a docstring."""
    programs = {}
    for found in pkgutil.walk_packages(tmg.__path__, "tfmultigpu."):
        for test in doctest.DocTestFinder().find(importlib.import_module(found.name)):
            if test.examples:
                programs[test.name] = EXAMPLE.format(module=found.name, name=test.name)
    return programs


def outputs_of(text: str) -> list[tuple[int, str]]:
    """Returns what a page says that its programs print, each with the number of the program."""
    lines = text.splitlines(keepends=True)
    outputs = []
    for above, block in itertools.pairwise(blocks_of(text)):
        end = above.line + above.code.count("\n")  # The line that closes the block.
        between = "".join(lines[end : block.line - 2])
        if (above.language, block.language) == ("python", "text") and not between.strip():
            outputs.append((len(programs_of("".join(lines[:end]))), block.code))
    return outputs


OF_TENSORFLOW = re.compile(
    r"[EIW]\d{4} \d\d:|[EIW]0000 00:|WARNING: All log|=== Source Location|external/xla"
)


def prints(printed: str, shown: str) -> bool:
    """Whether a program printed this; "..." stands for anything, and lines may break elsewhere."""
    parts = [re.escape(" ".join(part.split())) for part in shown.split("...")]
    # TensorFlow's own lines of a machine without a GPU come whenever they like.
    lines = [line for line in printed.splitlines() if not OF_TENSORFLOW.match(line)]
    return re.search(".*?".join(parts), " ".join(" ".join(lines).split())) is not None


def test_an_output_belongs_to_the_program_above_it() -> None:
    page = "```python\nimport tfmultigpu\n```\n\n```text\n1\n```\n"
    assert outputs_of(page + "words\n" + page.replace("1", "2")) == [(1, "1\n"), (2, "2\n")]
    assert outputs_of(page.replace("\n\n", "\n\nwords\n\n")) == []


def test_an_output_may_leave_out_digits_and_break_lines() -> None:
    assert prints("loss:\n 0.25431 same\n", "loss: 0.25... same")
    assert not prints("loss: 0.35431 same\n", "loss: 0.25... same")


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What each program and example has printed, once the fixture ``failures`` is there."""
    return {}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory, printed: dict[str, str]) -> dict[str, str]:
    """What the programs and examples that failed have printed, all of them run once."""
    # With one CPU, as on a machine without GPUs: what needs more devices makes them.
    programs: list[tuple[str, str]] = []
    for page, path in PAGES.items():
        for number, program in enumerate(all_programs_of(path.read_text()), 1):
            programs.append((f"{page} {number}", program))
    programs += examples().items()
    programs.append(("wrong", "assert 1 + 1 == 3"))
    found = {}
    for number, (name, source) in enumerate(programs):
        # TensorFlow compiles `for` in a tf.function from the source it finds in the file.
        file = tmp_path_factory.mktemp(f"program{number}") / "program.py"
        file.write_text(source)
        try:
            printed[name] = run_program(file)
        except AssertionError as error:
            found[name] = str(error)
    assert "AssertionError" in found.pop("wrong")
    return found


def listed(failed: dict[str, str]) -> str:
    return "\n".join(f"{name}: {text[-3000:]}" for name, text in failed.items())


@pytest.mark.slow
def test_the_programs_of_every_page_run(failures: dict[str, str]) -> None:
    failed = {name: text for name, text in failures.items() if name.split()[0] in PAGES}
    assert not failed, listed(failed)


@pytest.mark.slow
def test_the_programs_of_every_page_print_what_it_says(
    failures: dict[str, str], printed: dict[str, str]
) -> None:
    shown = {
        (f"{page} {number}", output)
        for page, path in PAGES.items()
        for number, output in outputs_of(path.read_text())
    }
    assert len(shown) > 10
    others = {
        name: f"{output}\nbut it printed\n{printed[name]}"
        for name, output in shown
        if name not in failures and not prints(printed[name], output)
    }
    assert not others, listed(others)


@pytest.mark.slow
def test_the_examples_in_the_docstrings_run(failures: dict[str, str]) -> None:
    names = examples()
    assert len(names) >= 20
    failed = {name: failures[name] for name in names if name in failures}
    assert not failed, listed(failed)


# Columns of code beside the two columns of the site, on a screen of 1280 px.
WIDEST = 80


def wide_lines(text: str) -> list[str]:
    """The lines of code that do not fit beside the two columns of the site."""
    return [
        f"{block.line + i}: {line}"
        for block in blocks_of(text)
        if block.language in {"python", "diff", "sh", "console"}
        for i, line in enumerate(block.code.splitlines())
        # The two commands of the README are one line each.
        if len(line) > WIDEST and not line.startswith("python3 -m venv .venv && ")
    ]


def test_code_is_not_wider_than_the_page() -> None:
    wide = {page: wide_lines(path.read_text()) for page, path in PAGES.items()}
    assert {page: lines for page, lines in wide.items() if lines} == {}


def test_a_wide_line_is_found_in_its_block_only() -> None:
    wide = "x" * 81
    assert wide_lines(f"{wide}\n```python\na\n{wide}\n```\n") == [f"4: {wide}"]


def test_every_block_says_what_it_is() -> None:
    languages = {"python", *SHOWN, *COMMANDS}
    unknown = [
        f"{page}:{block.line}: {block.language}"
        for page, path in PAGES.items()
        for block in blocks_of(path.read_text())
        if block.language not in languages
    ]
    assert unknown == []


def commands_of(page: str) -> list[str]:
    return [
        line
        for block in blocks_of(PAGES[page].read_text())
        if block.language in COMMANDS
        for line in block.code.splitlines()
        if line.strip() and not line.startswith("#")
    ]


def known(command: str) -> bool:
    """Whether one of the commands joined by ``&&`` does what this project can do."""
    words = shlex.split(command)
    program = words[0].removeprefix(".venv/bin/")
    if words == ["python3", "-m", "venv", ".venv"] or words[1:] in (
        ["install", "nox"],
        ["install", "nox[uv]"],
    ):
        return program in {"python3", "pip"}
    if program == "pip" and words[1] == "install":
        pyproject = (ROOT / "pyproject.toml").read_text()
        extra = re.fullmatch(r"(?:\.|tfmultigpu)(?:\[(\w+)\])?", words[2])
        return extra is not None and (not extra[1] or f"\n{extra[1]} = [" in pyproject)
    if program == "nox":
        declared = re.findall(r'name="([\w-]+)"|^def (\w+)\(session', noxfile(), re.MULTILINE)
        sessions = {name or function for name, function in declared}
        chosen = {word.partition("(")[0] for word in words[2:3]}
        return words[1:2] in ([], ["-l"]) or (words[1] == "-s" and chosen <= sessions)
    if program == "python" and words[1] == "-m" and words[2] == "tfmultigpu":
        with pytest.raises(SystemExit, match=r"^0$"):
            main([*words[3:], "--help"])
        return True
    return program == "python" and (ROOT / words[1]).is_file()


def noxfile() -> str:
    return (ROOT / "noxfile.py").read_text()


def test_every_command_is_one_that_works() -> None:
    commands = [(page, line) for page in PAGES for line in commands_of(page)]
    assert len(commands) > 5
    unknown = [
        f"{page}: {part}"
        for page, line in commands
        for part in line.split(" && ")
        if not known(part.strip())
    ]
    assert unknown == []


@pytest.mark.parametrize(
    "command",
    [
        "pip install 'tfmultigpu[gpus]'",
        "nox -s everything",
        "python examples/none.py",
        "rm -r build",
    ],
    ids=str,
)
def test_a_command_that_does_not_work_is_found(command: str) -> None:
    assert not known(command), command


def test_the_readme_has_the_two_commands_and_ci_runs_the_second() -> None:
    run, check = commands_of("README.md")
    assert run.endswith(".venv/bin/python -m tfmultigpu demo")
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert check in script
    assert script[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in script


def test_links_between_the_files_of_the_repository_lead_somewhere() -> None:
    broken = [
        f"{page}: {target}"
        for page, path in PAGES.items()
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert broken == []


PACKAGES = [
    page.stem
    for page in sorted((ROOT / "docs" / "reference").glob("*.md"))
    if inspect.ismodule(getattr(tmg, page.stem, None))
]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_documents_the_public_names_of_a_package(package: str) -> None:
    module = getattr(tmg, package)
    # mkdocstrings shows the names of `__all__`; a module of classes alone has none.
    classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
    page = (ROOT / "docs" / "reference" / f"{package}.md").read_text()
    assert f"\n::: {module.__name__}\n" in page
    for name in getattr(module, "__all__", classes):
        # A class without docstring would inherit that of its base: `__doc__` alone, not getdoc.
        documentation = getattr(module, name).__doc__ or ""
        assert inspect.cleandoc(documentation).partition("\n")[0].endswith("."), name
        assert not Path(str(module.__file__)).with_name(f"{name}.py").exists(), "not on the page"


def test_every_name_at_the_top_has_an_example_and_is_on_the_page_of_names() -> None:
    names = {name for name in tmg.__all__ if not inspect.ismodule(getattr(tmg, name))}
    assert set(tmg.__all__) - names <= set(PACKAGES)
    assert [name for name in sorted(names) if ">>> " not in getattr(tmg, name).__doc__] == []
    table = (ROOT / "docs/reference/index.md").read_text().partition("| for | names |")[2]
    assert set(re.findall(r"`(\w+)`", table.partition("\n\n")[0])) == names


@pytest.mark.parametrize(("page", "file"), [("slurm", "train.sbatch"), ("ray", "ray_train.py")])
def test_the_page_of_a_scheduler_shows_the_file_that_is_tested(page: str, file: str) -> None:
    shown = re.findall(r'--8<-- "([^":]+)', PAGES[f"docs/how-to/{page}.md"].read_text())
    assert shown == [f"examples/schedulers/{file}"]
    assert (ROOT / shown[0]).is_file()
