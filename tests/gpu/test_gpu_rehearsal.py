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


def test_a_step_that_is_not_skipped_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    make = tmg.make_train_step
    monkeypatch.setattr(
        tmg, "make_train_step", lambda *args, loss_scale=None, **options: make(*args, **options)
    )
    status, error = outcome(low_precision.float16_dynamic)
    assert status == "failed"
    assert "an infinite gradient on the last replica was applied" in error


def test_sharded_weights_are_judged_by_what_each_part_holds() -> None:
    memory.judge_sharded([750, 250], (12 * GIB, 4 * GIB), 1000)
    with pytest.raises(AssertionError, match="bytes for weights of"):
        memory.judge_sharded([1000, 1000], (12 * GIB, 4 * GIB), 1000)  # Mirrored.
    with pytest.raises(AssertionError, match="bytes on part 0"):
        memory.judge_sharded([500, 500], (12 * GIB, 4 * GIB), 1000)


def test_growth_is_judged_by_what_the_driver_says() -> None:
    memory.judge_growth(GIB, 2 * GIB, 6 * GIB, 4 * GIB)
    memory.judge_growth(GIB, 2 * GIB, 10 * GIB, 4 * GIB)  # regions double
    with pytest.raises(AssertionError, match="bytes taken at the start"):
        memory.judge_growth(0, 120 * GIB, 120 * GIB, 4 * GIB)  # TensorFlow without growth
    with pytest.raises(AssertionError, match="bytes more for a tensor"):
        memory.judge_growth(GIB, 2 * GIB, 2 * GIB, 4 * GIB)  # the wrong GPU was asked


def test_a_limit_is_judged_by_what_the_driver_says() -> None:
    memory.judge_limit(GIB, 6 * GIB, 6 * GIB, 4 * GIB, refused=True)
    with pytest.raises(AssertionError, match="larger than the limit of"):
        memory.judge_limit(GIB, 6 * GIB, 6 * GIB, 4 * GIB, refused=False)
    with pytest.raises(AssertionError, match="bytes taken, the limit is"):
        memory.judge_limit(GIB, 6 * GIB, 13 * GIB, 4 * GIB, refused=True)
    with pytest.raises(AssertionError, match="bytes taken for half of"):
        memory.judge_limit(GIB, GIB, GIB, 4 * GIB, refused=True)


def test_micro_batches_are_judged_by_the_activations() -> None:
    peaks = {"1, few": 100, "1, many": 900, "8, few": 100, "8, many": 220}
    assert memory.judge_micro_batches(peaks) == 120 / 800
    with pytest.raises(AssertionError, match=r"1\.00 of the activations with 8 micro-batches"):
        memory.judge_micro_batches(peaks | {"8, many": 900})


def test_what_needs_a_gpu_is_not_run_and_says_so() -> None:
    for check in (memory.growth, memory.limit, memory.micro_batches):
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
