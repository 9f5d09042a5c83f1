"""From the record to a page, and what is missed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["SPEED_TARGET", "missed", "not_run", "to_markdown"]

SPEED_TARGET = 0.99  # of the throughput of a plain step for one GPU, in every case of one GPU
FIT_TARGET = 1.0  # of the throughput of Keras' own fit
MEMORY_TARGET = 0.3  # of the activations, with eight micro-batches


def missed(record: dict[str, Any]) -> Iterator[str]:
    """Returns what failed and which targets were missed; a rehearsal has no targets."""
    for one in [*record["checks"], *record["benchmarks"]]:
        if one["status"] == "failed":
            lines = one["error"].strip().splitlines()
            yield f"{one['name']} failed: {lines[-1] if lines else 'without a word'}"
    if record["rehearsal"]:
        return
    for one in record["benchmarks"]:
        ratio = one.get("ratios", {}).get("ours") if one["kind"] == "speed" else None
        if ratio is not None and ratio < SPEED_TARGET:
            yield f"{one['name']}: ours / plain is {ratio:.3f}, the target is {SPEED_TARGET}"
        both = [one.get("per_second", {}).get(name) for name in ("ours", "fit")]
        of_fit = both[0] / both[1] if one["kind"] == "speed" and all(both) else FIT_TARGET
        if of_fit < FIT_TARGET:
            yield f"{one['name']}: ours / fit is {of_fit:.3f}, the target is {FIT_TARGET}"
        share = one.get("share_of_activations")
        if share is not None and share > MEMORY_TARGET:
            yield f"{one['name']}: {share:.2f} of the activations, the target is {MEMORY_TARGET}"


def not_run(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns what was not run, and why."""
    every = [*record["checks"], *record["benchmarks"]]
    return [(one["name"], one["error"]) for one in every if one["status"] == "not run"]


def to_markdown(record: dict[str, Any]) -> str:
    """Returns the report as a page."""
    where = "virtual CPUs (a rehearsal; no number here says anything about a GPU)"
    if not record["rehearsal"]:
        where = record["machine"].get("title", "a GPU")
    lines = [
        "# GPU report",
        "",
        f"{record['date']}, {where}, {record['seconds']} s, `{record['command']}`",
        "",
        *_machine(record["machine"]),
        "## Result",
        "",
        *_bullets([*missed(record)] or ["Nothing failed and no target was missed."]),
        "## Not run",
        "",
        *_bullets([f"{name}: {why}" for name, why in not_run(record)] or ["Nothing."]),
        "## Checks",
        "",
        "| check | | s | measured |",
        "|---|---|---|---|",
        *(
            f"| {one['name']} | {one['status']} | {one['seconds']} | {_facts(one['facts'])} |"
            for one in record["checks"]
        ),
        "",
        "## Speed",
        "",
        *_speed(record),
        "",
    ]
    return "\n".join(lines)


def _machine(machine: dict[str, Any]) -> list[str]:
    wanted = {
        "versions": ("tensorflow", "keras", "numpy", "python", "CUDA found", "NVIDIA driver"),
        "devices": ("GPU:0",),
    }
    rows = [
        f"| {name} | {_cell(machine[section][name])} |"
        for section, names in wanted.items()
        for name in names
        if name in machine.get(section, {})
    ]
    return ["| | |", "|---|---|", *rows, ""] if rows else []


def _speed(record: dict[str, Any]) -> list[str]:
    by_kind = {one["kind"]: one for one in record["benchmarks"]}
    peak = by_kind.get("peak", {}).get("flops_per_second")
    timed = [one for one in record["benchmarks"] if "per_second" in one]
    lines = []
    if peak:
        lines += [f"Measured bfloat16 peak of matrix products: {peak / 1e12:.1f} TFLOP/s.", ""]
    if timed:
        lines += [
            "| network | precision | XLA | rows | | plain | ours | fit | ours / plain "
            "| ours, of the bfloat16 peak |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
    for one in timed:
        each = [_rate(one["per_second"].get(name)) for name in ("plain", "ours", "fit")]
        ratio = one["ratios"].get("ours")
        share = one["per_second"].get("ours", 0) * one["flops_per_unit"] / peak if peak else None
        what = one["title"]
        if one["kind"] == "parts":
            what += ", 2 parts in shares 3:1"
        elif one["kind"] == "replicas":
            what += f", {one['parts']} parts"
        lines.append(
            f"| {what} | {one['precision']} | {'yes' if one['xla'] else 'no'} | {one['rows']} "
            f"| {one['unit']}/s | {' | '.join(each)} | {f'{ratio:.3f}' if ratio else '-'} "
            f"| {f'{share:.1%}' if share else '-'} |"
        )
    for one in record["benchmarks"]:
        if "share_of_activations" in one:
            lines += [
                "",
                f"Memory of activations with eight micro-batches ({one['network']}, {one['rows']} "
                f"rows): {one['share_of_activations']:.2f} of those with one.",
            ]
    for one in record["benchmarks"]:
        for name, found in one.get("profiles", {}).items():
            lines += [
                "",
                f"Profile of {one['network']}, {name}: the {found['track']} is busy for "
                f"{found['busy_share']:.1%} of {found['ms']} ms; the longest gaps are "
                f"{found['longest_gaps_ms']} ms. In `{found['folder']}`.",
            ]
    return lines or ["Nothing was timed."]


def _rate(per_second: float | None) -> str:
    return "-" if per_second is None else f"{per_second:,.0f}"


def _facts(facts: dict[str, Any]) -> str:
    return _cell(", ".join(f"{name}: {_short(value)}" for name, value in facts.items()))


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)[:120]


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _bullets(lines: list[str]) -> list[str]:
    return [*(f"- {_cell(line)}" for line in lines), ""]
