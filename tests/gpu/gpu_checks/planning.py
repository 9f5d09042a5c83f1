"""What the library decides on a GPU in parts: names, communication, shares, the doctor."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

import tfmultigpu as tmg
from gpu_checks.place import Place


def names_of_parts(place: Place) -> dict[str, Any]:
    """The parts are numbered, all on one physical device, and TensorFlow starts just these."""
    expected = tuple(f"{place.kind}:{i}" for i in range(len(place.limits)))
    assert place.devices[: len(expected)] == expected, place.devices
    owners = tmg.devices.logical_to_physical()
    assert {owners[name] for name in expected} == {f"{place.kind}:0"}, owners
    import tensorflow as tf

    started = [one.name for one in tf.config.list_logical_devices(place.kind)]
    assert len(started) >= len(expected), started
    if not place.rehearsal:
        assert len(started) == len(expected), started
    return {"parts": list(expected)}


def communication(place: Place) -> dict[str, Any]:
    """NCCL cannot join two parts of one card: another way is chosen, and NCCL is refused."""
    plan = tmg.plan_strategy("mirrored", devices=list(place.devices))
    assert plan.kind == "mirrored", plan
    assert plan.communication in ("one_device", "hierarchical_copy"), (
        f"{plan.communication} was chosen for parts of one device: {plan}"
    )
    assert "NCCL" in plan.communication_reason, plan.communication_reason
    said = ""
    try:
        tmg.create_strategy(devices=list(place.devices), communication="nccl", fallback=False)
    except tmg.errors.StrategyUnavailableError as error:
        said = str(error)
    assert "NCCL" in said, f"NCCL over {place.devices} was not refused: {said!r}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = tmg.create_strategy(devices=list(place.devices), communication="nccl")
    assert any(issubclass(one.category, tmg.errors.StrategyFallbackWarning) for one in caught), (
        "NCCL was asked for and silently not used"
    )
    assert strategy.num_replicas_in_sync == len(place.devices)
    return {"communication": plan.communication, "reason": plan.communication_reason}


def shares_by_memory(place: Place) -> dict[str, Any]:
    """Shares go by the limits of the parts, after what every replica holds whole."""
    strategy = place.strategy()
    memory = None if not place.rehearsal else [float(one) for one in place.limits]
    capacities = tmg.memory_capacities(strategy, memory=memory)
    np.testing.assert_allclose(capacities, place.limits, rtol=0.01)
    shares = tmg.plan_shares(64, capacities)
    wanted = 64 * np.array(place.limits) / sum(place.limits)
    assert sum(shares) == 64
    assert np.max(np.abs(np.array(shares) - wanted)) < 1, f"{shares} for {place.limits}"
    return {"capacities": list(capacities), "shares_of_64": list(shares)}


def doctor(place: Place) -> dict[str, Any]:
    """The doctor sees the GPU, names it, and finds no error."""
    report = tmg.doctor()
    errors = [finding for finding in report.findings if finding.severity == "error"]
    if place.rehearsal:
        assert "GPU(s) in use" in report.title, report.title
        return {"title": report.title}
    assert not errors, str(report)
    (gpu, *_) = tmg.list_devices("GPU")
    said = report.facts["devices"]["GPU:0"]
    assert gpu.description, gpu
    assert gpu.description in said, said
    assert " 0 of" not in report.title, report.title
    return {"title": report.title, "GPU:0": said, "findings": list(report.codes)}
