"""Reports: findings, the most serious first, and the facts behind them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["SEVERITIES", "Finding", "Report"]

SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        severity: ``"error"``: devices stay idle, or training fails or is wrong. ``"warning"``:
            training may be wrong, or is slower than necessary. ``"note"``: worth knowing.
        code: A name that stays the same from version to version, such as ``"model-scope"``.
        what: The problem, with the values found.
        why: The consequence.
        change: The line to change, or the action to take.
    """

    severity: str
    code: str
    what: str
    why: str
    change: str

    def __str__(self) -> str:
        """Formats the finding as three lines: what, why, change."""
        return (
            f"{self.severity} [{self.code}] {self.what}\n"
            f"    why: {self.why}\n"
            f"    change: {self.change}"
        )


@dataclass(frozen=True)
class Report:
    """The result of ``doctor`` and ``explain``; print it, or paste it into an issue.

    Attributes:
        title: The name of the report and its subject.
        findings: The findings, the most serious first.
        facts: The facts behind the findings, by section and name, for a person.
        values: The same facts for a program: numbers, booleans, texts, None, lists and dicts.
    """

    title: str
    findings: tuple[Finding, ...]
    facts: Mapping[str, Mapping[str, str]]
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the findings, the most serious first."""
        return tuple(finding.code for finding in self.findings)

    def __str__(self) -> str:
        """Formats a line that counts and names the findings, then each finding, then the facts."""
        lines = [f"{self.title}: {self._summary()}"]
        lines += [str(finding) for finding in self.findings]
        for section, facts in self.facts.items():
            width = max(map(len, facts), default=0)
            lines += ["", section]
            lines += [f"  {name:<{width}}  {value}" for name, value in facts.items()]
        return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines())

    __repr__ = __str__  # A notebook shows the text.

    def as_json(self) -> str:
        """Returns the report as JSON: ``title``, ``findings``, ``facts``, ``values``."""
        whole: dict[str, Any] = {
            "title": self.title,
            "findings": [asdict(finding) for finding in self.findings],
            "facts": {section: dict(facts) for section, facts in self.facts.items()},
            "values": dict(self.values),
        }
        return json.dumps(whole, indent=2)

    def _summary(self) -> str:
        counts = [(sum(f.severity == one for f in self.findings), one) for one in SEVERITIES]
        parts = [f"{count} {one}{'s' if count > 1 else ''}" for count, one in counts if count]
        serious = [f.code for f in self.findings if f.severity != "note"] or list(self.codes)
        if not parts:
            return "nothing wrong was found"
        return f"{', '.join(parts)} ({', '.join(dict.fromkeys(serious))})"


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sorts findings by severity; keeps the given order within each severity."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))
