"""Everything that is checked, by name: ``nox`` runs the default sessions, ``nox -s NAME`` one.

TensorFlow takes 600 MB, so ``check`` and ``build`` do without it. With ``pip install 'nox[uv]'``
environments are made by uv, several times as fast as by pip, and kept for the next run.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.reuse_venv = "yes"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["check", "tests"]
# Tests start hundreds of processes. Where Python may not write bytecode, each would compile
# TensorFlow again, 10 s of 14 s; pip compiles what it installs, and uv if it is told to.
os.environ.setdefault("UV_COMPILE_BYTECODE", "1")

PROJECT = nox.project.load_toml("pyproject.toml")
LINTED = ("src", "tests", "benchmarks", "examples", "docs", "noxfile.py")
# One file, one worker process: a file's tests share TensorFlow's virtual devices and traces. After
# a process that crashed the run ends: pytest-xdist waits for its other tests for ever.
PYTEST = ("pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder",
          "--max-worker-restart", "0")  # fmt: skip
# Every promise once, and what guards the proof itself. `full` runs all that is not here, and the
# promises at more sizes.
PROOF = ("tests/promises", "tests/house", "tests/mutations")


def groups(*names: str) -> list[str]:
    """The requirements of these dependency groups."""
    return list(nox.project.dependency_groups(PROJECT, *names))


@nox.session
def check(session: nox.Session) -> None:
    """Format and lint rules (``-- --fix`` mends them), strict types, and the documentation."""
    session.install(*groups("lint", "types", "docs"))
    fix = "--fix" in session.posargs
    paths = [path for path in LINTED if Path(path).exists()]
    session.run("ruff", "check", *(["--fix"] if fix else []), *paths)
    session.run("ruff", "format", *([] if fix else ["--check"]), *paths)
    session.run("mypy")
    # Not `--quiet`: it hides the warnings from `--strict` too.
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def tests(session: nox.Session) -> None:
    """Every promise of the README, held to one device through public names alone."""
    session.install("-e", ".", *groups("test"))
    session.run(*PYTEST, "-m", "not more", *session.posargs)


@nox.session
def full(session: nox.Session) -> None:
    """All other tests: units, more layers and sizes, more processes, kills, every page."""
    session.install("-e", ".", *groups("test", "checkers", "foreign"))
    rest = [f"--ignore={folder}" for folder in PROOF]
    session.run(*PYTEST, "-m", "not versions", "tests", *rest, *session.posargs)
    session.run(*PYTEST, "-m", "more", "tests/promises")


@nox.session
def ray(session: nox.Session) -> None:
    """Lose and add nodes of a real Ray cluster on this machine."""
    session.install("-e", ".", *groups("test", "ray"))
    session.run("pytest", "tests/workers/test_ray.py", *session.posargs)


@nox.session
def versions(session: nox.Session) -> None:
    """Whether plain TensorFlow and Keras still do what the page of guarantees says of them."""
    session.install("-e", ".", *groups("test"))
    session.run(*PYTEST, "-m", "versions", "tests/guarantees", *session.posargs)


def python_of_the_oldest() -> str:
    """The Python to test the lowest TensorFlow with: its wheels end at Python 3.12."""
    if sys.version_info[:2] <= (3, 12):
        return f"{sys.version_info.major}.{sys.version_info.minor}"
    installed = (v for v in ("3.12", "3.11") if shutil.which(f"python{v}"))
    return next(installed, "3.12")


@nox.session(name="other-versions", python=python_of_the_oldest())
@nox.parametrize("which", ["oldest", "nightly"], ids=["oldest", "nightly"])
def other_versions(session: nox.Session, which: str) -> None:
    """The proof against the lowest TensorFlow and Keras of pyproject.toml, or tomorrow's."""
    dependencies = PROJECT["project"]["dependencies"]
    ours = [r for r in dependencies if r.startswith(("tensorflow", "keras"))]
    if which == "oldest":
        lowest = [re.sub(r">=([\d.]+)", r"==\1.*", requirement) for requirement in ours]
        session.install("-e", ".", *lowest, *groups("test"))
    else:
        # Both from the index, release candidates too. The package keras-nightly is the module
        # keras, so nothing may require the package keras beside it.
        others = [r for r in dependencies if r not in ours]
        session.install("--pre", ours[0], "keras-nightly", *others, *groups("test"))
        session.install("--no-deps", "-e", ".")
    session.run(*PYTEST, *session.posargs)


@nox.session
def mutations(session: nox.Session) -> None:
    """Break each clause of the law on purpose; a promise that its page names must fail."""
    session.install("-e", ".", *groups("test"))
    session.run("python", "tests/mutations/run.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure steps against loops by hand (``-- --only CNN --rounds 3``; ``-- --first``)."""
    session.install("-e", ".")
    session.run("python", "benchmarks/run.py", *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """Check and measure on a GPU, and write a report (``-- --rehearse``: on virtual CPUs)."""
    session.install("-e", ".[nvml]", "tensorflow[and-cuda]")
    session.run("python", "benchmarks/run_gpu.py", *session.posargs)


@nox.session(reuse_venv=False)
def build(session: nox.Session) -> None:
    """Build both archives, and run the proof with the wheel alone (``-- tag``: for a release)."""
    session.install(*groups("build"), "twine")
    if "tag" in session.posargs:
        version = version_to_release(session)
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build")  # The wheel is built from the source archive.
    session.run("twine", "check", "--strict", *map(str, Path("dist").iterdir()))
    (wheel,), (source,) = Path("dist").glob("*.whl"), Path("dist").glob("*.tar.gz")
    packed = set(zipfile.ZipFile(wheel).namelist())
    expected = {p.relative_to("src").as_posix() for p in Path("src").rglob("*.py")}
    missing = (expected | {"tfmultigpu/py.typed", "tfmultigpu/__init__.pyi"}) - packed
    if missing:
        session.error(f"the wheel lacks {sorted(missing)}")
    session.install(str(wheel), *groups("test"))
    unpacked = Path(session.create_tmp())
    shutil.unpack_archive(source, unpacked, filter="data")
    with session.chdir(unpacked / source.name.removesuffix(".tar.gz")):
        session.run(*PYTEST, "-m", "not more")
    if "tag" in session.posargs:
        session.run("git", "tag", "-a", f"v{version}", "-m", f"v{version}", external=True)
        session.log("to publish: git push --tags, then twine upload dist/*")


def version_to_release(session: nox.Session) -> str:
    """The version of the source, if everything that names it agrees and is committed."""
    version = re.search(r'__version__ = "(.+)"', Path("src/tfmultigpu/_version.py").read_text())
    if version is None:
        session.error("src/tfmultigpu/_version.py has no version")
    if session.run("git", "status", "--porcelain", external=True, silent=True):
        session.error("the working tree has changes: commit them first")
    if f"## [{version[1]}]" not in Path("CHANGELOG.md").read_text():
        session.error(f"CHANGELOG.md has no section '## [{version[1]}]'")
    if f"version: {version[1]}\n" not in Path("CITATION.cff").read_text():
        session.error(f"CITATION.cff does not say 'version: {version[1]}'")
    return version[1]
