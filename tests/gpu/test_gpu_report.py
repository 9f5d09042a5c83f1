"""The one command for GPU machines: what it runs, what it writes, and what it says went wrong."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from each import each

ROOT = Path(__file__).parents[2]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("run_gpu")
    for name in [name for name in sys.modules if name.split(".")[0] in ("gpu", "run_gpu")]:
        del sys.modules[name]


def check(name: str = "limit.limit", **values: Any) -> dict[str, Any]:
    return {"name": name, "status": "passed", "seconds": 1.0, "facts": {}, "error": ""} | values


def timing(**values: Any) -> dict[str, Any]:
    return {
        "name": "resnet-bfloat16-256",
        "kind": "speed",
        "status": "passed",
        "network": "resnet",
        "title": "ResNet-50",
        "precision": "bfloat16",
        "rows": 256,
        "xla": False,
        "unit": "images",
        "per_second": {"plain": 2000.0, "ours": 1990.0},
        "flops_per_unit": 24.6e9,
        "ratios": {"ours": 0.995},
    } | values


def record(**values: Any) -> dict[str, Any]:
    return {
        "date": "2026-01-01T00:00:00+00:00",
        "command": "python benchmarks/run_gpu.py",
        "rehearsal": False,
        "machine": {"title": "tfmultigpu doctor: 1 of 1 GPU(s) in use by TensorFlow"},
        "checks": [check()],
        "benchmarks": [
            {"name": "peak", "kind": "peak", "status": "passed", "flops_per_second": 5e14},
            timing(),
        ],
        "seconds": 500,
    } | values


@pytest.mark.slow
def test_the_command_runs_in_a_rehearsal(runner: Any, tmp_path: Path) -> None:
    only = ["--only", "transformer-tf32-32", "memory-transformer-bfloat16-32"]
    one = runner.run_part("transformer-tf32-32", 500.0, True)
    assert [found["status"] for found in one] == ["passed"], one
    assert set(one[0]["per_second"]) == {"plain", "ours"}
    losses = one[0]["first_loss"]
    assert abs(losses["ours"] / losses["plain"] - 1) < 1e-5
    # The same results again, without their processes.
    other = [check("memory", kind="memory", status="not run", error="a GPU")]
    runner.run_part = lambda name, *_: one if name == only[1] else other
    assert runner.main(["--rehearse", *only, "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "gpu.json").read_text())
    # In the order of the runner, not in the one asked for.
    assert [found["status"] for found in written["benchmarks"]] == ["not run", "passed"]
    assert written["machine"]["versions"]["tensorflow"]
    page = (tmp_path / "gpu.md").read_text()
    assert "a rehearsal; no number here says anything about a GPU" in page
    assert "- memory: a GPU" in page


def test_without_a_gpu_nothing_is_run(
    runner: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.seen_gpus = lambda: (0, "Cannot dlopen some GPU libraries.")
    assert runner.main(["--out", str(tmp_path / "report")]) == 2
    said = capsys.readouterr().err
    assert "TensorFlow sees no GPU here, so nothing was run." in said
    assert said.endswith("TensorFlow said:\nCannot dlopen some GPU libraries.\n")
    assert not (tmp_path / "report").exists()


def test_a_process_that_dies_fails_what_it_did_not_come_to(runner: Any) -> None:
    expected = {"expected": ["limit.limit", "limit.largest_batch"]}
    done, other = check("limit.limit"), check("limit.largest_batch")
    found = runner.missing("limit", [expected, done], "failed", "ended with -9")
    assert found == [done, other | {"status": "failed", "seconds": 0.0, "error": "ended with -9"}]
    assert runner.missing("limit", [expected, done, other], "failed", "") == [done, other]
    (nothing,) = runner.missing("limit", [], "failed", "ended with 1: no tensorflow")
    assert (nothing["name"], nothing["status"]) == ("limit", "failed")


@each(
    ("values", "said"),
    [
        ({"checks": [check(status="failed", error="x\nAssertionError: 9")]}, "AssertionError: 9"),
        ({"benchmarks": [timing(ratios={"ours": 0.97})]}, "ours / plain is 0.970"),
        (
            {"benchmarks": [check("memory", kind="memory", share_of_activations=0.4)]},
            "0.40 of the activations, the target is 0.3",
        ),
    ],
)
def test_what_fails_or_is_too_slow_or_too_large_is_missed(
    runner: Any, values: dict[str, Any], said: str
) -> None:
    assert list(runner.missed(record())) == []
    (line,) = runner.missed(record(**values))
    assert said in line


def test_every_part_has_a_place_in_the_order(runner: Any) -> None:
    from gpu_checks.groups import GROUPS

    assert set(runner.GROUPS) == set(GROUPS)
    assert set(runner.ORDER) == {*GROUPS, *runner.CASES}
    assert runner.ORDER[:3] == ("two_parts", "growth", "peak")
    names = list(runner.CASES)
    assert names[:3] == ["peak", "transformer-bfloat16-32", "resnet-bfloat16-256"]
    resnets = [case for case in runner.CASES.values() if case.network == "resnet"]
    assert {case.rows for case in resnets} == {64, 128, 256}
    both = {(case.precision, case.xla) for case in resnets}
    assert both == {
        (precision, xla)
        for precision in ("float32", "tf32", "float16", "bfloat16")
        for xla in (True, False)
    }


def test_what_was_not_run_is_run_later_and_the_rest_is_kept(
    runner: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(name: str, seconds: float, rehearse: bool, log: Path) -> list[dict[str, Any]]:
        ran.append(name)
        if name == "limit":
            status = "passed" if len(ran) > 3 else "not run"
            return [check("limit.limit"), check("limit.largest_batch", status=status, error="time")]
        return [timing(name=name, kind="speed", machine={"title": "the GPU"})]

    runner.run_part = run
    order = ["resnet-tf32-256", "limit", "peak"]
    arguments = ["--rehearse", "--only", *order, "--out", str(tmp_path)]
    assert runner.main(arguments) == 0
    # In the order of the runner, not in the one asked for.
    assert ran == ["peak", "limit", "resnet-tf32-256"]
    assert runner.main([*arguments, "--resume"]) == 0
    assert ran[3:] == ["limit"]
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [one["name"] for one in written["benchmarks"]] == ["peak", "resnet-tf32-256"]
    assert [one["status"] for one in written["checks"]] == ["passed", "passed"]
    assert written["machine"] == {"title": "the GPU"}
    (tmp_path / "gpu.json").write_text("{")
    assert runner.main([*arguments, "--resume"]) == 0
    assert "There is nothing to resume: " in capsys.readouterr().err
    assert ran[4:] == ["peak", "limit", "resnet-tf32-256"]
