"""Results in a notebook: tables whose texts cannot break the page."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from tfmultigpu.diagnostics.report import Finding, Report
from tfmultigpu.html_tables import html_table
from tfmultigpu.steps.verification import Verification
from tfmultigpu.steps.verification.outcome import Difference
from tfmultigpu.strategies.plan import MachineInfo, choose
from tfmultigpu.tuning.scaling import Scaling, ScalingPoint
from tfmultigpu.tuning.step_profile import StepProfile


class Page(HTMLParser):
    """Collects the texts of cells and paragraphs, and checks that every tag is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        assert tag in {"div", "p", "b", "table", "tr", "th", "td"}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


EVIL = "<script>alert('&')</script>"
PROFILE = StepProfile(
    steps=20,
    rows=64.0,
    seconds=0.01,
    input=0.001,
    compute=0.006,
    reduce=0.001,
    update=0.001,
    call=0.001,
    replicas=(0.004, 0.006),
    devices=("GPU:0", "GPU:1"),
    replicas_in_all=2,
    gradient_bytes=400,
    start=1.0,
)


def test_every_text_is_escaped() -> None:
    html = html_table(EVIL, [(EVIL, EVIL), ("rows", 64)], notes=[EVIL])
    assert "<script" not in html
    assert Page(html).texts == [EVIL, EVIL, EVIL, "rows", "64", EVIL]
    headed = Page(html_table("title", [(1, 2)], header=("a", EVIL)))
    assert headed.texts == ["title", "a", EVIL, "1", "2"]
    assert Page(html_table("title", [])).texts == ["title"]


def test_each_result_shows_its_facts() -> None:
    results: list[tuple[Any, list[str]]] = [
        (
            Report("title <1>", (Finding("note", "code", "what", "why", EVIL),), {"a": {"b": "c"}}),
            ["title <1>: 1 note (code)", "note", "code", "what", "why", EVIL, "a", "b", "c"],
        ),
        (
            choose(MachineInfo({"CPU:0": "CPU:0", "GPU:0": "GPU:0", "GPU:1": "GPU:1"})),
            ["Strategy plan: mirrored", "GPU:0, GPU:1", "replicas", "2", "not tpu"],
        ),
        (PROFILE, ["input", "1.00", "10%", "replica 1 (GPU:1)", "6.00"]),
        (
            Scaling((ScalingPoint(2, PROFILE, 6400.0, 1.5, 0.75, EVIL),), "a note"),
            ["replicas", "2", "6400", "1.50", "75%", EVIL, "note: a note"],
        ),
        (Verification("same", 8, 8), ["Verification: same", "rows compared", "8 of 8"]),
        (
            Verification("different", 8, 8, "", (Difference("loss", 1.0, 2.0),), EVIL, "advice"),
            ["Verification: different", "loss", "one device 1, as computed 2", EVIL, "advice"],
        ),
        (Verification("not verified", reason="too small"), ["because", "too small"]),
    ]
    for result, texts in results:
        html = result._repr_html_()
        shown = Page(html).texts
        assert [one for one in texts if one not in shown] == []
        assert "<script" not in html
