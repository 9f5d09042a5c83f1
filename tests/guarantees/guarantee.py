"""What a case is, and what can come out of it."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

KINDS = ("same", "different", "error", "warning", "abort", "hang")
SIDES = ("plain", "ours")


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a result is from the right one.

    Attributes:
        value: The largest absolute difference, or a count of what is wrong; NaN is possible.
        of: What differs: ``"weights"``, ``"rows"``, ...
        warned: The text of a warning that came with it, where the library is held to warn.
    """

    value: float
    of: str = "weights"
    warned: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What happened.

    Attributes:
        kind: One of ``KINDS``. ``"same"`` is a difference within the tolerance of the case,
            ``"abort"`` the death of the process, ``"hang"`` no answer within ``seconds``.
        difference: The difference, where there is a result; infinite for NaN.
        of: What differs.
        message: Type and line of the error or warning, or how the process died.
        seconds: How long was waited for an answer, for ``"hang"``.
    """

    kind: str
    difference: float | None = None
    of: str = ""
    message: str = ""
    seconds: float | None = None

    def as_json(self) -> dict[str, Any]:
        found = {k: v for k, v in dataclasses.asdict(self).items() if v not in (None, "")}
        if self.difference is not None and not math.isfinite(self.difference):
            found["difference"] = "NaN"
        return found

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Outcome:
        found = dict(found)
        if found.get("difference") == "NaN":
            found["difference"] = math.inf
        return cls(**found)


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        name: The identifier.
        section: The heading it stands under.
        title: One line that a user recognises.
        plain: The code most people would write; returns a ``Difference`` or raises.
        ours: The same with this library.
        tolerance: Up to which difference results are the same.
        reason: Why the tolerance is looser than 1e-6, or why ``ours`` is not the same.
        links: Public issues, as ``"tf#123"``, ``"k#123"`` (Keras) or ``"tf-keras#123"``.
        ours_kind: What this library is held to.
        ours_says: Text of its error or warning.
        plain_says: Text that finds the telling line of a long error message.
        patience: Seconds after which no answer of plain code is a hang; ours has five times that.
    """

    name: str
    section: str
    title: str
    plain: Callable[[], Difference]
    ours: Callable[[], Difference]
    _: dataclasses.KW_ONLY
    tolerance: float = 1e-6
    reason: str = ""
    links: tuple[str, ...] = ()
    ours_kind: str = "same"
    ours_says: str = ""
    plain_says: str = ""
    patience: float = 180.0

    def __post_init__(self) -> None:
        explained = self.ours_kind == "same" and self.tolerance <= 1e-6
        assert explained or self.reason, f"{self.name}: say why"

    def described(self) -> dict[str, Any]:
        """What the page says about the case besides what was measured."""
        keys = ("section", "title", "links", "tolerance", "reason")
        return {key: getattr(self, key) for key in keys} | {"links": list(self.links)}

    def fault(self, outcome: Outcome) -> str:
        """Returns how an outcome of this library is not what it is held to, or nothing."""
        right = outcome.kind == self.ours_kind and self.ours_says in outcome.message
        return "" if right else f"held to {self.ours_kind} {self.ours_says!r}, and is {outcome}"

    def measure(self, side: str) -> Outcome:
        """Runs one side, here and now."""
        says = self.ours_says if side == "ours" else self.plain_says
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = getattr(self, side)()
        except Exception as error:
            return Outcome("error", message=telling_line(error, says))
        value = float(found.value) if math.isfinite(found.value) else math.inf
        if found.warned:
            return Outcome("warning", value, found.of, found.warned)
        return Outcome("same" if value <= self.tolerance else "different", value, found.of)


# What changes from run to run: addresses of objects, numbers of nodes, ports.
_VOLATILE = (
    (r"\x1b\[\d+m", ""),
    (r"^\(0\) [A-Z_]+: ", ""),
    (r"0x[0-9a-f]+", "0x..."),
    (r" \([0-9a-f]{12}\)", ""),
    (r"(keras_tensor|Placeholder|sequential|conv[12]d)_\d+", r"\1"),
    (r"__inference_\w+", "..."),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r"\b(port|grep) \d+", r"\1 PORT"),
    (r"\{\{function_node [^}]*\}\} ?", ""),
    (r"\{\{node (?:[^}]*/)?([^}/]*)\}\}", r"\1"),
    (r"\s+", " "),
)
_HEADINGS = ("Graph execution error:", "in user code:")


def telling_line(error: BaseException, says: str = "") -> str:
    """The type of an error and the line of its message that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else "(no text)"
    if line.startswith("Exception encountered when calling") and len(lines) > 1:
        line = lines[1]
    elif line.startswith(_HEADINGS):
        told = [one for one in lines if not one.startswith(("[[", "0 derived", "0 successful"))]
        line = next((one for one in told if one.startswith("(0)")), told[-1])
    if says:
        line = next((one for one in lines if says.split(": ")[-1] in one), line)
    for pattern, replacement in _VOLATILE:
        line = re.sub(pattern, replacement, line)
    return f"{type(error).__name__}: {line.strip()}"
