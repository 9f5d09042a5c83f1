"""What a diagnosis is: findings, most serious first, and the facts they were drawn from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["SEVERITIES", "Finding", "Report"]

SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        severity: ``"error"``: devices stay idle, or training fails or is wrong. ``"warning"``: it
            may be, or is slower than it need be. ``"note"``: worth knowing.
        code: A name that stays the same from version to version, such as ``"model-scope"``.
        what: What is wrong, with the values found.
        why: Why it matters.
        change: The line to change, or what to do.
    """

    severity: str
    code: str
    what: str
    why: str
    change: str

    def __str__(self) -> str:
        """Three lines: what, why, and the change."""
        return (
            f"{self.severity} [{self.code}] {self.what}\n"
            f"    why: {self.why}\n"
            f"    change: {self.change}"
        )


@dataclass(frozen=True)
class Report:
    """What ``doctor`` and ``explain`` return; ``print`` it, or paste it into an issue.

    Attributes:
        title: Who reports, and the answer in a few words.
        findings: What was found, the most serious first.
        facts: By section and name, what the findings were drawn from.
    """

    title: str
    findings: tuple[Finding, ...]
    facts: Mapping[str, Mapping[str, str]]

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the findings, the most serious first."""
        return tuple(finding.code for finding in self.findings)

    def __str__(self) -> str:
        """The answer first: a line that counts and names the findings, then each, then facts."""
        lines = [f"{self.title}: {self._summary()}"]
        lines += [str(finding) for finding in self.findings]
        for section, facts in self.facts.items():
            width = max(map(len, facts), default=0)
            lines += ["", section]
            lines += [f"  {name:<{width}}  {value}" for name, value in facts.items()]
        return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines())

    def as_json(self) -> str:
        """Returns the same as JSON: ``title``, ``findings``, ``facts``."""
        whole: dict[str, Any] = {
            "title": self.title,
            "findings": [asdict(finding) for finding in self.findings],
            "facts": {section: dict(facts) for section, facts in self.facts.items()},
        }
        return json.dumps(whole, indent=2)

    def _summary(self) -> str:
        counts = [(sum(f.severity == one for f in self.findings), one) for one in SEVERITIES]
        said = [f"{count} {one}{'s' if count > 1 else ''}" for count, one in counts if count]
        serious = [f.code for f in self.findings if f.severity != "note"] or list(self.codes)
        if not said:
            return "nothing wrong was found"
        return f"{', '.join(said)} ({', '.join(dict.fromkeys(serious))})"


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Puts errors before warnings before notes, each kind in the order given."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))
