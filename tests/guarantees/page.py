"""From the record of what was measured to the page that people read."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from guarantee import Outcome

PAGE = Path(__file__).resolve().parents[2] / "docs" / "contributing" / "guarantees.md"
RECORD = PAGE.with_suffix(".json")
COMMAND = "python tests/guarantees/measure.py"
REPOSITORIES = {
    "tf": "tensorflow/tensorflow",
    "k": "keras-team/keras",
    "tf-keras": "keras-team/tf-keras",
}
LONGEST = 150
# What is measured on a scale; everything else is counted.
SCALES = ("weights", "loss", "metric", "predictions", "outputs", "accuracy", "holds")

HEAD = """\
# Guarantees

<!-- Made by {command}. Do not edit: a test compares this page with guarantees.json. -->

{cases} cases are difficult on several devices. Each was **measured**, in plain TensorFlow and Keras
and with this library: is the result what one device gives on the same global batches?

| {cases} cases | {kinds} |
|---|{rule}|
| plain TensorFlow and Keras | {plain} |
| tfmultigpu | {ours} |

If this library warns or raises an error, the reason is below the table with the case. By subject,
this many cases give the result of one device:

| subject | cases | plain TensorFlow and Keras | tfmultigpu |
|---|---:|---:|---:|
{subjects}

## How to read it

Both columns were measured in the same run, with TensorFlow {tensorflow} and Keras {keras} on
virtual CPUs, on two replicas unless a line says otherwise. Nothing was written by hand.
`nox -s versions` measures both columns again, and `{command}` makes the page anew.

| the cell | means |
|---|---|
| same (number) | equal within the tolerance: 1e-6 in every weight, or the tolerance in the cell. \
The number is the largest difference that was measured |
| **number** | the distance from the right result, without an error: the largest difference of a \
weight on any replica after a few steps, or a count of what is wrong |

The right column is `make_train_step` over `distribute_dataset` unless the case names something
else.
"""

KIND_TITLES = {
    "same": "same",
    "different": "different, without a word",
    "warning": "different, with a warning",
    "error": "an error",
    "abort": "the process dies",
    "hang": "no answer",
}


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def write(record: dict[str, Any]) -> None:
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(render(record))


def render(record: dict[str, Any]) -> str:
    """The page, and nothing but what the record holds."""
    cases = list(record["cases"].values())
    counts = {side: Counter(case[side]["kind"] for case in cases) for side in ("plain", "ours")}
    page = HEAD.format(
        command=COMMAND,
        tensorflow=record["tensorflow"],
        keras=record["keras"],
        cases=len(cases),
        kinds=" | ".join(KIND_TITLES.values()),
        rule="|".join("---:" for _ in KIND_TITLES),
        subjects="\n".join(subject_row(section, cases) for section in sections(cases)),
        **{side: " | ".join(str(counts[side][kind]) for kind in KIND_TITLES) for side in counts},
    )
    for section in sections(cases):
        inside = [case for case in cases if case["section"] == section]
        page += f'\n## {section}\n\n<details markdown="1">\n'
        page += f"<summary>{len(inside)} cases</summary>\n\n"
        page += "| case | plain TensorFlow and Keras | tfmultigpu |\n|---|---|---|\n"
        for case in inside:
            plain, ours = (cell(Outcome.from_json(case[side])) for side in ("plain", "ours"))
            if case["tolerance"] > 1e-6:
                ours += f", tolerance {number(case['tolerance'])}"
            page += f"| {title(case)} | {plain} | {ours} |\n"
        page += f"{notes(inside)}\n</details>\n"
    return page


def sections(cases: list[dict[str, Any]]) -> list[str]:
    """The sections, in the order of their first case."""
    return list(dict.fromkeys(case["section"] for case in cases))


def subject_row(section: str, cases: list[dict[str, Any]]) -> str:
    """How many cases of a section have the result of one device."""
    inside = [case for case in cases if case["section"] == section]
    same = [sum(case[side]["kind"] == "same" for case in inside) for side in ("plain", "ours")]
    anchor = re.sub(r"[^a-z0-9 -]", "", section.lower()).replace(" ", "-")
    return f"| [{section}](#{anchor}) | {len(inside)} | {same[0]} | {same[1]} |"


def title(case: dict[str, Any]) -> str:
    return " ".join([case["title"].replace("|", "\\|"), *(link(one) for one in case["links"])])


def link(short: str) -> str:
    repository, issue = short.split("#")
    return f"[{short}](https://github.com/{REPOSITORIES[repository]}/issues/{issue})"


def notes(cases: list[dict[str, Any]]) -> str:
    """Why some lines do not say "same", or with another tolerance."""
    reasons: dict[str, list[str]] = {}
    for case in cases:
        if case["reason"]:
            reasons.setdefault(case["reason"], []).append(case["title"])
    if not reasons:
        return ""
    lines = [f"- {'; '.join(titles)}: *{reason}*." for reason, titles in reasons.items()]
    return "\nWhere the right column is not simply the same, and why:\n\n" + "\n".join(lines) + "\n"


def cell(outcome: Outcome) -> str:
    if outcome.kind == "same":
        return f"same ({number(outcome.difference)})" if outcome.difference else "same"
    if outcome.kind == "different":
        return amount(outcome)
    if outcome.kind == "error":
        return f"error: {code(outcome.message)}"
    if outcome.kind == "warning":
        return f"warning, {amount(outcome)}: {code(outcome.message)}"
    if outcome.kind == "abort":
        return f"**the process dies**: {code(outcome.message)}"
    return f"**no answer** in {outcome.seconds:.0f} s"


def amount(outcome: Outcome) -> str:
    assert outcome.difference is not None
    if any(scale in outcome.of for scale in SCALES):
        return f"**{number(outcome.difference)}** ({outcome.of})"
    return f"{outcome.of}: **{outcome.difference:.0f}**"


def number(value: float | None) -> str:
    """One significant digit: 3e-8, 0.4, 90."""
    assert value is not None
    if not math.isfinite(value):
        return "NaN"
    mantissa, exponent = f"{value:.0e}".split("e")
    if -2 <= int(exponent) <= 3:
        return f"{float(f'{value:.0e}'):g}"
    return f"{mantissa}e{int(exponent)}"


def code(text: str) -> str:
    if len(text) > LONGEST:
        text = text[: text.rfind(" ", 0, LONGEST)].rstrip(".,:;") + " ..."
    text = text.replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"
