"""The messages of the library, read from its source; and what an example of one is.

Imports no TensorFlow: ``tests/house`` holds that each message has an example or a reason.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "src" / "tfmultigpu"
HERE = Path(__file__).parent
CLASSES = ("error",)  # Variables that hold the class of an error.
VALUE = "\0"  # Stands for what a message fills in.
# Where a text is returned, and warned of by the caller.
RETURNED = {("addons/verification/compare.py", "The result depends on how the batch was cut")}
BUILTIN = {"ValueError", "TypeError", "ImportError", "RuntimeError", "AttributeError",
           "NotImplementedError", "FileExistsError"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        file: The file in the package.
        line: The line of its call.
        text: What it says, with ``VALUE`` for what is filled in.
    """

    file: str
    line: int
    text: str

    def says(self, said: str) -> bool:
        """Returns whether a text is this message with any values."""
        parts = [re.escape(part) for part in self.text.split(VALUE)]
        return re.search(".*".join(parts), said, re.DOTALL) is not None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text.replace(VALUE, '{}')[:90]}"


@functools.cache
def own_errors() -> frozenset[str]:
    """Returns the names of the exceptions and warnings that the package defines."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and re.search(r"(Error|Warning)$", node.name):
                names.add(node.name)
    return frozenset(names)


@dataclasses.dataclass(frozen=True)
class Made:
    """A place that makes an error or a warning.

    Attributes:
        file: The file in the package.
        line: The line of the call.
        kind: The name of the class, of ``warn``, or of the function that is called.
        fields: What each argument may be: one for a text, else what, received and write.
    """

    file: str
    line: int
    kind: str
    fields: tuple[tuple[str, ...], ...]


@functools.cache
def messages() -> tuple[Message, ...]:
    """Returns each message of the package."""
    found = []
    for place in made():
        for text in _joined(place.fields):
            if re.search(r"[a-z]{3}", text):
                found.append(Message(place.file, place.line, text))
    return tuple(dict.fromkeys(found))


@functools.cache
def made() -> tuple[Made, ...]:
    """Returns each place of the package that makes an error or a warning."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        file = path.relative_to(PACKAGE).as_posix()
        outer = _strings(tree.body)
        scopes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        for node in ast.walk(tree):
            kind, given = _arguments(node)
            if isinstance(node, ast.Return) and isinstance(node.value, ast.JoinedStr):
                starts = [start for of, start in RETURNED if of == file]
                if any(_texts(node.value, {})[0].startswith(start) for start in starts):
                    given = [node.value]
            if not given:
                continue
            around = [scope for scope in scopes if scope.lineno <= node.lineno <= scope.end_lineno]
            names = dict(outer)
            for scope in around:
                names |= _strings(list(ast.walk(scope)))
            fields = [tuple(_texts(field, names)) for field in given]
            for place, texts in enumerate(fields[1:], 1):
                if len(texts) > 1:  # One of several values, or of several lines to write.
                    fields[place] = (VALUE,)
            found.append(Made(file, node.lineno, kind, tuple(fields)))
    return tuple(found)


def _arguments(node: ast.AST) -> tuple[str, list[ast.expr]]:
    """Returns the kind and the text of a message, or its fields: what, received, write."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        name = _name(node.exc)
        # A function that makes the error of its first argument, or a class by another name.
        if name not in own_errors() | BUILTIN:
            return name, node.exc.args if name in CLASSES else node.exc.args[:1]
    if isinstance(node, ast.Call) and node.args:
        name = _name(node)
        if name in own_errors() | {"GraphMessage"}:
            return name, node.args
        if name in BUILTIN or name == "warn":
            return name, node.args[:1]
    return "", []


def _joined(fields: Sequence[Sequence[str]]) -> Sequence[str]:
    """Returns the texts of an error, of the texts that each of its fields may be."""
    if len(fields) == 1:
        return fields[0]
    texts = []
    for what, received, *rest in itertools.product(*fields):
        values = received.replace("{}", VALUE)  # Of a GraphMessage.
        said = f"Received: {values}." if values else ""
        texts.append(" ".join(part for part in (what, said, *rest) if part))
    return texts


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _strings(nodes: list[Any]) -> dict[str, list[ast.expr]]:
    """Returns what names are assigned to, by name."""
    names: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names.setdefault(node.targets[0].id, []).append(node.value)
    return names


def _texts(node: ast.expr, names: dict[str, list[ast.expr]]) -> list[str]:
    """Returns the texts that an expression may be."""
    if isinstance(node, ast.Constant):
        return [node.value if isinstance(node.value, str) else VALUE]
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body, names), *_texts(node.orelse, names)]
    if isinstance(node, ast.JoinedStr):
        parts = [
            str(value.value) if isinstance(value, ast.Constant) else VALUE for value in node.values
        ]
        return ["".join(parts)]
    if isinstance(node, ast.BinOp):
        both = _texts(node.left, names), _texts(node.right, names)
        return [left + right for left in both[0] for right in both[1]]
    if isinstance(node, ast.Name) and node.id in names:
        rest = {name: values for name, values in names.items() if name != node.id}
        return [text for value in names[node.id] for text in _texts(value, rest)]
    return [VALUE]


# Examples -----------------------------------------------------------------------------------------

Told = Callable[..., contextlib.AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class Example:
    """A function that makes a mistake in ``with told():`` and then does what the message says."""

    words: str
    run: Callable[[Told], None]

    def messages(self) -> list[Message]:
        return matching(self.words)


def matching(words: str) -> list[Message]:
    """Returns the messages that begin with these words, else those that have them.

    ``{}`` stands for what is filled in.
    """
    plain = words.replace("{}", VALUE)
    having = [message for message in messages() if plain in message.text]
    return [message for message in having if message.text.startswith(plain)] or having


EXAMPLES: list[Example] = []


def example(words: str) -> Callable[[Any], Any]:
    """Registers an example of the message whose text, in whatever file, has these words."""

    def note(run: Any) -> Any:
        EXAMPLES.append(Example(words, run))
        return run

    return note


@contextlib.contextmanager
def told(expected: list[Message], kind: Any = Exception, words: str = "") -> Iterator[None]:
    """Holds that what runs in it raises or warns one of these messages, and nothing else.

    Args:
        expected: The messages.
        kind: The class of the error, for a user to catch.
        words: A pattern of its text, such as the values received.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        raised: list[Exception] = []
        try:
            yield
        except Exception as error:
            raised.append(error)
    said = raised or [warning.message for warning in caught]
    right = [one for one in said if isinstance(one, kind) and re.search(words, str(one), re.DOTALL)]
    assert any(message.says(str(one)) for message in expected for one in right), (
        f"The mistake is told as {said or 'nothing'}, not as {[str(m) for m in expected]}"
        f" by {kind} with {words!r}"
    )


def registered() -> dict[str, ast.FunctionDef]:
    """Returns the function of each example by its words, without importing any."""
    found = {}
    for path in sorted(HERE.glob("of_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for decorator in getattr(node, "decorator_list", []):
                if isinstance(decorator, ast.Call) and _name(decorator) == "example":
                    found[ast.literal_eval(decorator.args[0])] = node
    return found
