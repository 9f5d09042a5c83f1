"""Without a GPU: the checks run on virtual CPUs, and fail where what they check is broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gpu_checks import low_precision, memory, planning, replicas
from gpu_checks.groups import GROUPS, run_check, run_group
from gpu_checks.place import GIB, Place

import tfmultigpu as tmg

TWO = Place("CPU", ("CPU:0", "CPU:1"), (12 * GIB, 4 * GIB))


def outcome(check: Callable[[Place], dict[str, Any]], place: Place = TWO) -> tuple[str, str]:
    result = run_check(check, place, "rehearsal")
    return result.status, result.error


@pytest.mark.parametrize(
    "check",
    [
        planning.doctor,
        planning.names_of_parts,
        planning.communication,
        planning.shares_by_memory,
        memory.out_of_memory_report,
        low_precision.float16_dynamic,
        low_precision.bfloat16,
        replicas.sharded_variables,
    ],
)
def test_a_check_passes_on_virtual_cpus(check: Callable[[Place], dict[str, Any]]) -> None:
    assert outcome(check) == ("passed", "")


def test_the_largest_batch_is_found_in_a_rehearsal() -> None:
    one = Place("CPU", ("CPU:0",), (4 * GIB,))
    result = run_check(memory.largest_batch, one, "rehearsal")
    assert (result.status, result.facts["rows"]) == ("passed", 20)


def test_exactness_is_held_and_a_wrong_tolerance_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert outcome(replicas.exact_without_tf32)[0] == "passed"
    monkeypatch.setattr(replicas, "EXACT", 1e-12)
    status, error = outcome(replicas.exact_without_tf32)
    assert status == "failed"
    assert "Training on replicas differs from one device" in error


# The warning says it beforehand.
@pytest.mark.filterwarnings("ignore::tfmultigpu.errors.PrecisionWarning")
def test_a_step_that_is_not_skipped_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    make = tmg.make_train_step
    monkeypatch.setattr(
        tmg, "make_train_step", lambda *args, loss_scale=None, **options: make(*args, **options)
    )
    status, error = outcome(low_precision.float16_dynamic)
    assert status == "failed"
    assert "an infinite gradient on the last replica was applied" in error


PARTS = (12 * GIB, 4 * GIB)
PEAKS = {"1, few": 100, "1, many": 900, "8, few": 100, "8, many": 220}
JUDGED: list[tuple[Any, tuple[Any, ...], str]] = [
    (memory.judge_sharded, ([750, 250], PARTS, 1000), ""),
    (memory.judge_sharded, ([1000, 1000], PARTS, 1000), "bytes for weights of"),  # Mirrored.
    (memory.judge_sharded, ([500, 500], PARTS, 1000), "bytes on part 0"),
    (memory.judge_growth, (GIB, 2 * GIB, 6 * GIB, 4 * GIB), ""),
    (memory.judge_growth, (GIB, 2 * GIB, 10 * GIB, 4 * GIB), ""),  # Regions double.
    # TensorFlow without growth; the wrong GPU was asked.
    (memory.judge_growth, (0, 120 * GIB, 120 * GIB, 4 * GIB), "bytes taken at the start"),
    (memory.judge_growth, (GIB, 2 * GIB, 2 * GIB, 4 * GIB), "bytes more for a tensor"),
    (memory.judge_limit, (GIB, 6 * GIB, 6 * GIB, 4 * GIB, True), ""),
    (memory.judge_limit, (GIB, 6 * GIB, 6 * GIB, 4 * GIB, False), "larger than the limit of"),
    (memory.judge_limit, (GIB, 6 * GIB, 13 * GIB, 4 * GIB, True), "bytes taken, the limit is"),
    (memory.judge_limit, (GIB, GIB, GIB, 4 * GIB, True), "bytes taken for half of"),
    (memory.judge_micro_batches, (PEAKS,), ""),
    (
        memory.judge_micro_batches,
        (PEAKS | {"8, many": 900},),
        r"1\.00 of the activations with 8 micro-batches",
    ),
]


@pytest.mark.parametrize(("judge", "numbers", "wrong"), JUDGED)
def test_numbers_are_judged_by_what_the_driver_says(judge: Any, numbers: Any, wrong: str) -> None:
    if not wrong:
        judge(*numbers)
        return
    with pytest.raises(AssertionError, match=wrong):
        judge(*numbers)


@pytest.mark.parametrize(
    "check", [memory.growth, memory.limit, memory.micro_batches], ids=lambda check: check.__name__
)
def test_what_needs_a_gpu_is_not_run_and_says_so(check: Any) -> None:
    status, error = outcome(check)
    assert status == "not run"
    assert error.startswith("needs a GPU that TensorFlow can see: ")


def test_a_group_without_its_gpu_is_not_run() -> None:
    if tmg.list_devices("GPU"):
        pytest.skip("needs a machine without a GPU")
    found = list(run_group("two_parts", "GPU"))
    assert {one.status for one in found} == {"not run"}
    assert len(found) == len(GROUPS["two_parts"].checks)
    assert {one.error for one in found} == {"needs a GPU that TensorFlow can see"}
