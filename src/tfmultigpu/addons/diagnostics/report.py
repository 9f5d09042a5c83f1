"""Reports that users paste into public issues: findings, the facts behind them, nothing secret."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tfmultigpu.strategies.factory import known_schedulers

_SEVERITIES = ("error", "warning", "note")
# These describe a TPU, as those of a scheduler a cluster: a report says only that they are set.
_SECRET = ("COLAB_TPU_ADDR", "TPU_NAME")
_RELEVANT = re.compile(r"(CUDA|KERAS|NCCL|NVIDIA_VISIBLE|TF|XLA)_\w+|LD_LIBRARY_PATH")
_PLAIN = re.compile(r"[A-Za-z_]{0,24}[0-9]{0,6}|-?[0-9]{1,3}(, ?-?[0-9]{1,3})*")
_HOST_PORT = r"(?<![\w.-])(?![CGT]PU:)(?:[\w-]+(?:\.[\w-]+)*|\[[0-9a-fA-F:.]+\]):\d{2,5}\b"
_PATH = r"(?<![\w.:/])(?:/[\w.@+-]+){2,}"
# An element of a list in JSON that may be cut off: an address in TF_CONFIG.
_LISTED = re.compile(r'[\[,]\s*"([^"]+)"(?=\s*[,\]])')


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
        counts = Counter(finding.severity for finding in self.findings)
        parts = []
        for severity in _SEVERITIES:
            if counts[severity] == 1:
                parts.append(f"1 {severity}")
            elif counts[severity]:
                parts.append(f"{counts[severity]} {severity}s")
        serious = [finding.code for finding in self.findings if finding.severity != "note"]
        codes = dict.fromkeys(serious or self.codes)
        lines = [f"{self.title}: {', '.join(parts)} ({', '.join(codes)})"]
        lines += map(str, self.findings)
        for section, facts in self.facts.items():
            width = max(map(len, facts), default=0)
            lines += ["", section]
            for name, fact in facts.items():
                lines.append(f"  {name:<{width}}  {fact}")
        return "\n".join(lines)

    __repr__ = __str__  # A notebook shows the text.


def shown_value(value: str) -> str:
    """Returns a value in quotes if it is a word or a list of numbers; hides any other."""
    if _PLAIN.fullmatch(value):
        return repr(value)
    return "set (not shown)"


def describe_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that matter, safe to publish."""
    secret = _secret()
    shown: set[str] = set()
    for scheduler in known_schedulers():
        shown.update(scheduler.shown)
    described = {}
    for name, value in sorted(environ.items()):
        if name in secret:
            described[name] = shown_value("/")
        elif name in shown or _RELEVANT.fullmatch(name):
            described[name] = shown_value(value)
    return described


def _secret() -> set[str]:
    """Returns the variables that describe a cluster or a TPU."""
    names = set(_SECRET)
    for scheduler in known_schedulers():
        names.update(scheduler.secret)
    return names


def redact(text: str, environ: Mapping[str, str]) -> str:
    """Hides addresses, paths, and what describes a cluster or a TPU, in a message."""
    secrets = set()
    for name in _secret():
        value = environ.get(name)
        if value:
            secrets.update([value, *_LISTED.findall(value)])
    for secret in list(secrets):
        if ":" in secret:
            secrets.add(secret.rpartition(":")[0])
    for secret in sorted(secrets, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(secret)}(?![\w-])", "<not shown>", text)
    return re.sub(f"{_HOST_PORT}|{_PATH}", "<not shown>", text)
