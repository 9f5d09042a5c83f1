"""The cost model of a step: what it was made of is found again, and it predicts the rest."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import keras
import numpy as np
import pytest
from each import each
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu.tuning import (
    CostModel,
    Network,
    StepProfile,
    fit_costs,
    fit_network,
    measure_scaling,
)
from tfmultigpu.tuning.scaling import compare, predict_scaling

TERMS = {
    "input": (1e-4, 2e-6),
    "forward and backward": (1e-3, 5e-5),
    "all-reduce": (2e-4, 0.0, 3e-4),
    "update": (4e-4, 1e-4),
    "call": (3e-4, 2e-4),
    "start": (0.5, 0.4),
}


def profile_of(model: CostModel, replicas: int, rows: float, workers: int = 1) -> StepProfile:
    """The profile that a step with exactly these costs would have."""
    step = model.predict(replicas, rows, workers)
    parts = step.parts
    return StepProfile(
        10,
        rows,
        step.seconds,
        parts["input"],
        parts["forward and backward"],
        parts["all-reduce"],
        parts["update"],
        parts["call"],
        (parts["forward and backward"],) * (replicas // workers),
        ("A",) * (replicas // workers),
        replicas,
        model.gradient_bytes,
        step.start,
    )


@each("grows", [False, True])
@each("at_once", [math.inf, 1.0, 2.0])
def test_a_model_fitted_to_few_replicas_predicts_more(at_once: float, grows: bool) -> None:
    true = CostModel(TERMS, at_once, 0.9, 4000, Network())

    def rows(replicas: int) -> float:
        return 64.0 * (replicas if grows else 4)

    profiles = [profile_of(true, n, rows(n)) for n in (1, 2, 3, 4)]
    found = fit_costs(profiles, own_devices=math.isinf(at_once))
    for count in (1, 2, 4, 8, 16):
        wanted, got = true.predict(count, rows(count)), found.predict(count, rows(count))
        assert got.seconds == pytest.approx(wanted.seconds, rel=0.05)
        assert got.start == pytest.approx(wanted.start, rel=0.05)


def test_more_workers_cost_what_a_ring_costs_and_read_the_whole_batch() -> None:
    network = Network(latency=1e-3, bandwidth=1e6)
    model = CostModel(TERMS, math.inf, 1.0, 4000, network)
    one, many = model.predict(4, 256), model.predict(64, 16 * 256, workers=16)
    ring = 2 * 15 * 1e-3 + 2 * 15 / 16 * 4000 / 1e6
    assert many.parts["all-reduce"] - one.parts["all-reduce"] == pytest.approx(ring)
    assert many.parts["input"] - one.parts["input"] == pytest.approx(15 * 256 * 2e-6)
    for same in ("forward and backward", "update", "call"):
        assert many.parts[same] == pytest.approx(one.parts[same])
    assert network.seconds(1, 4000) == 0.0


def test_latency_and_bandwidth_are_told_apart_by_two_sizes() -> None:
    network = Network(latency=2e-4, bandwidth=5e8)
    profiles = []
    workers = [2, 4, 2, 4]
    for number, num_bytes in zip(workers, [4_000, 4_000, 40_000_000, 40_000_000], strict=True):
        model = CostModel({**TERMS, "all-reduce": (0, 0, 0)}, 1.0, 1.0, num_bytes, network)
        profiles.append(profile_of(model, number, 64.0, number))
    found = fit_network(profiles, workers)
    assert found.latency == pytest.approx(2e-4, rel=1e-3)
    assert found.bandwidth == pytest.approx(5e8, rel=1e-3)


def test_constants_are_never_negative() -> None:
    noise = np.random.default_rng(0)
    true = CostModel(TERMS, 1.0, 1.0, 4000, Network())
    for _ in range(20):
        profiles = []
        for count in (1, 2, 4):
            wrong = {n: tuple(c * noise.uniform(0.3, 3) for c in v) for n, v in TERMS.items()}
            profiles.append(profile_of(CostModel(wrong, 1.0, 1.0, 4000, Network()), count, 64.0))
        found = fit_costs(profiles, own_devices=False)
        assert all(one >= 0 for constants in found.terms.values() for one in constants)
        assert found.predict(1024, true.gradient_bytes, 256).seconds > 0


@each(
    ("terms", "network", "cause"),
    [
        ({"input": (0.0, 1e-3)}, Network(), "the input pipeline"),
        ({}, Network(latency=1e-2), "the all-reduce"),
    ],
)
def test_a_prediction_says_what_limits_it(terms: Any, network: Network, cause: str) -> None:
    model = CostModel({**TERMS, **terms}, math.inf, 1.0, 4000, network)
    profiles = [profile_of(model, n, 64.0 * n) for n in (1, 2)]
    points = compare((1, 2), profiles)
    first, far = predict_scaling(model, points, (2, 1024))
    assert first.speedup == pytest.approx(points[1].speedup)
    assert far.step.rows == 64 * 1024
    assert far.step.workers == 512
    assert far.cause.startswith(cause)


def test_a_batch_of_fewer_rows_than_replicas_is_whole_on_each() -> None:
    terms = {name: (0.0,) * len(one) for name, one in TERMS.items()}
    model = CostModel(
        {**terms, "forward and backward": (0.0, 1.0)}, math.inf, 1.0, 0, Network(latency=0.0)
    )
    assert model.predict(4, 4).seconds == pytest.approx(1.0)
    assert model.predict(64, 4).seconds == pytest.approx(4.0)


@each(("counts", "grows"), [((2, 3), True), ((4, 5), True), ((2, 3), False)])
def test_batches_that_grow_with_replicas_keep_growing(counts: Any, grows: bool) -> None:
    model = CostModel(TERMS, math.inf, 1.0, 4000, Network())
    profiles = [profile_of(model, n, 32.0 * (n if grows else 1)) for n in counts]
    (far,) = predict_scaling(model, compare(counts, profiles), (counts[-1] * 10,))
    assert far.step.rows == 32 * (counts[-1] * 10 if grows else 1)


def test_overlap_within_a_worker_does_not_hide_the_network() -> None:
    network = Network(latency=1e-3)
    model = CostModel(TERMS, math.inf, 0.1, 4000, network)
    one, two = model.predict(1, 64), model.predict(2, 64, workers=2)
    assert two.seconds - one.seconds > 0.9 * network.seconds(2, 4000)


@each("given", [{"latency": -1}, {"bandwidth": -1e9}, {"bandwidth": 0}, {"bandwidth": math.nan}])
def test_a_network_that_cannot_be(given: Any) -> None:
    with pytest.raises(ValueError, match=r"above 0\. Received: latency=.*\. Write tmg\.tuning"):
        Network(**given)


def test_what_cannot_be_fitted_is_an_error_before_anything_runs() -> None:
    nothing = profile_of(CostModel(TERMS, 1.0, 1.0, 4000, Network()), 1, 64.0)
    nothing = dataclasses.replace(nothing, input=0, compute=0, reduce=0, update=0, call=0)
    with pytest.raises(ValueError, match="no times to fit"):
        fit_costs([nothing], own_devices=True)
    with pytest.raises(ValueError, match="two or more workers"):
        fit_network([nothing], [1])

    def build_step(strategy: Any) -> Any:
        raise AssertionError("was called")

    with pytest.raises(TypeError, match="network must be a Network"):
        measure_scaling(build_step, (1, 2), predict=(4,), network=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Measure two or more: replicas=\(1, 2\)"):
        measure_scaling(build_step, (1,), predict=(4,))


def test_scaling_prints_what_more_replicas_would_do() -> None:
    x = np.random.default_rng(0).normal(size=(12, 5)).astype("float32")

    def build_step(strategy: Any) -> Any:
        with strategy.scope():
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
            optimizer = keras.optimizers.SGD(0.1)
        step = tmg.make_train_step(model, optimizer, "mse", strategy)
        data = tmg.distribute_dataset((x, x[:, :1]), strategy, batch_size=6)
        return step, data

    strategy_of(2)
    scaling = measure_scaling(build_step, (1, 2), steps=3, predict=(64, 1024))
    assert scaling.model is not None
    assert scaling.model.gradient_bytes == 4 * (5 + 1)
    assert [one.replicas for one in scaling.predicted] == [64, 1024]
    assert [one.step.rows for one in scaling.predicted] == [6, 6]
    lines = str(scaling).splitlines()
    assert lines[3].startswith(
        "predicted: 2 replica(s) a worker, 1.25 GB/s and 50 us a hop between workers; the model is "
    )
    assert [line.split()[0] for line in lines[4:6]] == ["64", "1024"]
    assert "<td " in scaling._repr_html_()
    assert "1024 (predicted)" in scaling._repr_html_()
    with pytest.raises(ValueError, match=r"with 2 measured\. Write predict=\(64, 4\)\."):
        measure_scaling(build_step, (1, 2), predict=(64, 3))
