"""Reports: findings, the most serious first, and the facts behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        severity: ``"error"``: devices stay idle, or training fails or is wrong. ``"warning"``:
            training may be wrong, or is slower than necessary. ``"note"``: worth knowing.
        code: A name that stays the same from version to version, such as ``"model-scope"``.
        what: The problem, with the values received.
        why: The consequence.
        change: The line to write, or the action to take.
    """

    severity: str
    code: str
    what: str
    why: str
    change: str

    def __str__(self) -> str:
        """Formats the finding as three lines."""
        first = f"{self.severity} [{self.code}] {self.what}"
        return f"{first}\n    why: {self.why}\n    change: {self.change}"


@dataclass(frozen=True)
class Report:
    """The result of ``doctor`` and ``explain``; print it, or paste it into an issue.

    Attributes:
        title: The name of the report and its subject.
        findings: The findings, the most serious first.
        facts: The facts behind the findings, by section and name.
    """

    title: str
    findings: tuple[Finding, ...]
    facts: Mapping[str, Mapping[str, str]]

    def __post_init__(self) -> None:
        """Sorts the findings by severity."""
        ranked = sorted(self.findings, key=lambda finding: _SEVERITIES.index(finding.severity))
        object.__setattr__(self, "findings", tuple(ranked))

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the findings, the most serious first."""
        return tuple(finding.code for finding in self.findings)

    def __str__(self) -> str:
        """Formats a line that counts and names the findings, then each finding, then the facts."""
        counts = [(sum(f.severity == one for f in self.findings), one) for one in _SEVERITIES]
        parts = [f"{count} {one}{'s' if count > 1 else ''}" for count, one in counts if count]
        serious = [f.code for f in self.findings if f.severity != "note"] or self.codes
        lines = [f"{self.title}: {', '.join(parts)} ({', '.join(dict.fromkeys(serious))})"]
        lines += map(str, self.findings)
        for section, facts in self.facts.items():
            width = max(map(len, facts), default=0)
            lines += ["", section, *[f"  {name:<{width}}  {facts[name]}" for name in facts]]
        return "\n".join(lines)

    __repr__ = __str__  # A notebook shows the text.
