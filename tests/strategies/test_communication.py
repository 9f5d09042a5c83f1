"""Ways to add are timed where they can work, count only with the right sum, and are timed once."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import one_device
import pytest
import tensorflow as tf
from each import each

import tfmultigpu as tmg
from tfmultigpu.clusters.process_state import process_state
from tfmultigpu.clusters.spec import Cluster
from tfmultigpu.errors import ClusterError, StrategyFallbackWarning, StrategyUnavailableError
from tfmultigpu.strategies import communication
from tfmultigpu.strategies.plan import MachineInfo, choose, measurable
from tfmultigpu.strategies.tpu import Tpu

# Where nothing has to be told apart by its time.
SMALL = {"num_bytes": 4096, "rounds": 2}


@pytest.fixture(autouse=True)
def _nothing_measured_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    process_state.forget()
    for name in ("TF_CONFIG", "TPU_NAME", "COLAB_TPU_ADDR"):
        monkeypatch.delenv(name, raising=False)


def machine(gpus: int = 0, cpus: int = 1, *, parts: int = 1, **facts: Any) -> MachineInfo:
    """So many logical CPUs and GPUs; `parts` logical GPUs on each physical one."""
    devices = {f"CPU:{index}": "CPU:0" for index in range(cpus)}
    devices |= {f"GPU:{index}": f"GPU:{index // parts}" for index in range(gpus)}
    return MachineInfo(devices, **facts)


def names(kind: str, count: int) -> tuple[str, ...]:
    return tuple(f"{kind}:{index}" for index in range(count))


class Clock:
    """Ways that take the times given, on a clock of their own, in place of real ones.

    Args:
        times: For each way what its calls take, over and over; an error is raised in its turn.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **times: list[float | Exception]) -> None:
        self.now, self.calls, self.prepared = 0.0, [], []
        self._times = {way: itertools.cycle(taken) for way, taken in times.items()}
        monkeypatch.setattr(communication, "mirrored_strategy", lambda devices, way: way)
        monkeypatch.setattr(communication, "_all_reduce", self._prepare)
        monkeypatch.setattr(communication, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def _prepare(self, way: Any, num_bytes: int) -> Callable[[], None]:
        self.prepared.append(way)

        def call() -> None:
            self.calls.append(way)
            taken = next(self._times[way])
            if isinstance(taken, Exception):
                raise taken
            self.now += taken

        return call


# What is tried ---------------------------------------------------------------------------------


@each(
    ("facts", "devices", "ways"),
    [
        (machine(1), names("GPU", 1), ["one_device"]),
        (machine(2), names("GPU", 2), ["nccl", "one_device", "hierarchical_copy"]),
        (machine(3), names("GPU", 3), ["nccl", "one_device"]),
        (machine(2, parts=2), names("GPU", 2), ["one_device", "hierarchical_copy"]),
        (machine(4, parts=2), ("GPU:0", "GPU:2"), ["nccl", "one_device", "hierarchical_copy"]),
        (machine(4, parts=2), ("GPU:1", "GPU:0"), ["one_device", "hierarchical_copy"]),
        (machine(3, parts=3), names("GPU", 3), ["one_device"]),
        (machine(2, nccl=False), names("GPU", 2), ["one_device", "hierarchical_copy"]),
        (machine(cpus=2), names("CPU", 2), ["one_device", "hierarchical_copy"]),
        (machine(cpus=3), names("CPU", 3), ["one_device"]),
        (
            machine(cpus=2, ring_over=("CPU:0", "CPU:1")),
            names("CPU", 2),
            ["one_device", "hierarchical_copy"],
        ),
    ],
)
def test_only_what_can_work_is_tried(facts: MachineInfo, devices: tuple[str, ...], ways: list[str]):
    tried, why = measurable(devices, facts)
    assert list(tried) == ways
    assert {*tried, *why} == {"nccl", "ring", "hierarchical_copy", "one_device"}
    assert all(why.values())
    assert not {*tried} & {*why}
    plan = choose(facts, "mirrored", list(devices), "measured")
    if len(devices) == 1:
        assert plan.communication == "none"
    elif len(ways) == 1:
        assert plan.communication == "one_device"
        assert plan.communication_reason.startswith("nothing to measure, as it is the only way")
    else:
        assert plan.communication == "measured"
        assert plan.communication_reason.startswith(
            f"{', '.join(ways)} are timed when the strategy is created; not "
        )
        assert "gradients are added by the fastest, to be measured: " in str(plan)
    assert plan.unmet == ()


@pytest.mark.parametrize(
    ("parts", "tried"),
    [(2, ["one_device", "hierarchical_copy"]), (1, ["nccl", "one_device", "hierarchical_copy"])],
)
def test_nccl_never_runs_over_two_parts_of_one_card(
    parts: int, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, nccl=[1.0], one_device=[2.0], hierarchical_copy=[3.0])
    facts = machine(2, parts=parts)
    monkeypatch.setattr(communication, "logical_to_physical", lambda: facts.devices)
    monkeypatch.setattr(communication, "built_with_nccl", lambda: True)
    times = tmg.strategies.measure_communication(rounds=1)
    assert times.devices == ("GPU:0", "GPU:1")
    assert clock.prepared == tried
    assert times.fastest == tried[0]
    assert ("parts of one physical GPU" in times.left_out.get("nccl", "")) is (parts == 2)


def test_several_workers_and_tpus_cannot_try() -> None:
    workers = machine(2, cluster=Cluster(("a:1", "b:1"), 1, "worker", 1))
    plan = choose(workers, communication="measured")
    assert (plan.kind, plan.communication) == ("multi_worker", "nccl")
    (unmet,) = plan.unmet
    assert unmet == (
        "communication='measured': with several workers nothing can be tried: TensorFlow joins a "
        "cluster once"
    )
    tpu = choose(machine(tpu=Tpu("grpc://a:1", "TPU_NAME", None)), communication="measured")
    assert (tpu.communication, len(tpu.unmet)) == ("tpu", 1)
    assert choose(machine(cpus=2), "mirrored").communication == "one_device"  # auto is a rule


def test_one_way_is_taken_without_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    one, three = tmg.strategies.measure_communication(1), tmg.strategies.measure_communication(3)
    assert clock.prepared == []
    assert (one.fastest, dict(one.seconds)) == ("one_device", {})
    assert one.left_out["hierarchical_copy"] == "one replica has nothing to add"
    assert (three.fastest, dict(three.seconds)) == ("one_device", {})
    assert "leaves out the gradients of the last" in three.left_out["hierarchical_copy"]
    assert str(three).splitlines()[0] == (
        "Nothing to measure over CPU:0, CPU:1, CPU:2: one_device is the only way."
    )
    monkeypatch.undo()
    for count in (1, 3):
        strategy = tmg.create_strategy(devices=count, communication="measured", fallback=False)
        assert strategy.num_replicas_in_sync == count
        assert tmg.strategies.communication_times(strategy) is None


# How it is timed -------------------------------------------------------------------------------


def test_the_ways_take_turns_and_the_first_turn_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(
        monkeypatch,
        one_device=[9.0, 0.002, 0.004, 0.9],
        hierarchical_copy=[0.001, 0.005, 0.005, 0.006],
    )
    times = tmg.strategies.measure_communication(2, num_bytes=2 * 1024**2, rounds=3)
    assert clock.calls == ["one_device", "hierarchical_copy"] * 4
    assert times.seconds == pytest.approx({"one_device": 0.004, "hierarchical_copy": 0.005})
    assert (times.fastest, times.num_bytes) == ("one_device", 2 * 1024**2)
    assert str(times).splitlines()[:3] == [
        "Adding 2 MiB over CPU:0, CPU:1:",
        "  one_device            4.000 ms   1.00 x",
        "  hierarchical_copy     5.000 ms   1.25 x",
    ]
    assert "  nccl               not: NCCL runs on GPUs only, and these are CPUs" in str(times)
    assert pickle.loads(pickle.dumps(times)) == times
    assert json.loads(json.dumps(dataclasses.asdict(times)))["fastest"] == "one_device"


@each(("other", "fastest"), [(0.96, "one_device"), (0.95, "hierarchical_copy")])
def test_what_is_as_fast_as_the_rule_is_no_reason_to_leave_it(
    other: float, fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, one_device=[1.0], hierarchical_copy=[other])
    assert tmg.strategies.measure_communication(2, rounds=1).fastest == fastest


def test_a_real_all_reduce_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def spy(*args: Any) -> Any:
        compiled.append(real(*args))
        return compiled[-1]

    real = communication._compiled
    monkeypatch.setattr(communication, "_compiled", spy)
    times = tmg.strategies.measure_communication(4, **SMALL)
    # What is captured is never given back: TensorFlow keeps graphs that replicas were traced in.
    assert [one.captured_inputs for one in compiled] == [[]] * 4
    assert set(times.seconds) == {"one_device", "hierarchical_copy"}
    assert all(taken > 0.0 for taken in times.seconds.values())
    assert times.seconds[times.fastest] <= 1.05 * min(times.seconds.values())
    # Fewer numbers than tensors.
    assert set(tmg.strategies.measure_communication(2, num_bytes=7, rounds=1).seconds) == set(
        times.seconds
    )


def test_a_wrong_sum_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow's hierarchical copy over an odd number of devices, which is declined otherwise."""
    ways = ("hierarchical_copy", "one_device")
    monkeypatch.setattr(communication, "measurable", lambda devices, facts: (ways, {}))
    times = tmg.strategies.measure_communication(3, **SMALL)
    assert list(times.seconds) == ["one_device"]
    assert times.fastest == "one_device"
    # The replicas give 1, 2 and 4 times 1, 2, ...; the last one is lost.
    assert times.left_out == {
        "hierarchical_copy": "wrong sum on replica 0: 64 of 64 numbers differ, 3 instead of 7"
    }
    monkeypatch.setattr(communication, "measurable", lambda devices, facts: (ways[:1] * 2, {}))
    with pytest.raises(StrategyUnavailableError) as caught:
        tmg.strategies.measure_communication(3, **SMALL)
    assert "No way to add over CPU:0, CPU:1, CPU:2 gives the right sum" in str(caught.value)
    assert "hierarchical_copy: wrong sum on replica 0" in str(caught.value)
    assert "tmg.create_strategy(devices=1)" in str(caught.value)


def test_a_sum_that_is_wrong_on_one_replica_alone_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    distribute: Any = tf.distribute

    class Forgetful(distribute.ReductionToOneDevice):
        """Adds one to the last number that replica 1 receives in the last tensor."""

        def batch_reduce_implementation(self, *args: Any) -> Any:
            results = super().batch_reduce_implementation(*args)
            first, second = results[-1].values
            wrong = tf.tensor_scatter_nd_add(second, [[second.shape[0] - 1]], [1.0])
            return [*results[:-1], type(results[-1])([first, wrong])]

    real = communication.mirrored_strategy
    monkeypatch.setattr(
        communication,
        "mirrored_strategy",
        lambda devices, way: (
            real(devices, way)
            if way == "hierarchical_copy"
            else distribute.MirroredStrategy([f"/device:{one}" for one in devices], Forgetful())
        ),
    )
    times = tmg.strategies.measure_communication(2, **SMALL)
    assert list(times.seconds) == ["hierarchical_copy"]
    assert "wrong sum on replica 1: 1 of 64 numbers differ" in times.left_out["one_device"]


def test_what_raises_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL on CPUs, which is never tried otherwise; and a way that fails later on."""
    ways = ("nccl", "one_device")
    with monkeypatch.context() as patch:
        patch.setattr(communication, "measurable", lambda devices, facts: (ways, {}))
        times = tmg.strategies.measure_communication(2, **SMALL)
    assert (times.fastest, list(times.seconds)) == ("one_device", ["one_device"])
    # It is only the kernel that is missing here: the graph is one that NCCL can run.
    assert times.left_out["nccl"].startswith("it fails here with InvalidArgumentError: ")
    assert "NcclAllReduce" in times.left_out["nccl"]

    lost = tf.errors.ResourceExhaustedError(None, None, "out of memory\nand much more")
    clock = Clock(monkeypatch, one_device=[1.0, 1.0, lost], hierarchical_copy=[5.0])
    times = tmg.strategies.measure_communication(2, rounds=3)
    assert clock.calls.count("one_device") == 3
    assert clock.calls.count("hierarchical_copy") == 4
    assert (times.fastest, dict(times.seconds)) == ("hierarchical_copy", {"hierarchical_copy": 5.0})
    assert times.left_out["one_device"] == (
        "it fails here with ResourceExhaustedError: out of memory"
    )


@each("replicas", [2, 3, 5, 8, 16])
def test_every_order_adds_to_the_same_and_no_replica_can_be_missing(replicas: int) -> None:
    given = communication._given(3001, replicas)
    assert sum(len(part) for part in given[0]) == 750
    rows = np.stack([np.concatenate(one) for one in given])
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows.sum(0), rows[::-1].astype(np.float64).sum(0))
    for lost, twice in itertools.product(range(replicas), repeat=2):
        wrong = rows.sum(0) - rows[lost] + rows[twice] * (twice != lost)
        assert (wrong != rows.sum(0)).all()


@each(
    ("arguments", "error", "message"),
    [
        ({"num_bytes": 3}, ValueError, r"num_bytes must be a whole number, at least 4\..*=3"),
        ({"num_bytes": 1.5}, TypeError, r"num_bytes must be a whole number.*=1\.5"),
        ({"rounds": 0}, ValueError, r"rounds must be a whole number, at least 1\..*rounds=0"),
        ({"rounds": True}, TypeError, r"rounds must be a whole number.*rounds=True"),
        ({"devices": 99}, ValueError, r"Asked for 99 devices, but only 8 exist"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tmg.strategies.measure_communication(**{"devices": 2, **arguments})


def test_a_cluster_that_is_no_json_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{worker: 1")
    with pytest.raises(ClusterError, match=r"TF_CONFIG is not JSON.*'\{worker: 1'.*Unset it"):
        tmg.strategies.measure_communication(2, **SMALL)


def test_inside_a_scope_or_a_function_nothing_can_be_tried() -> None:
    with (
        one_device.strategy_of(2).scope(),
        pytest.raises(StrategyUnavailableError, match=r"scope of a strategy\. Move the call"),
    ):
        tmg.create_strategy(devices=2, communication="measured")

    @tf.function(autograph=False)
    def inside() -> None:
        tmg.strategies.measure_communication(2, **SMALL)

    with pytest.raises(StrategyUnavailableError, match=r"inside a tf\.function\. Move the call"):
        inside()
    assert process_state._kept == {}


# Strategies ------------------------------------------------------------------------------------


def test_each_set_of_devices_is_measured_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = communication.mirrored_strategy
    clock = Clock(monkeypatch, one_device=[2.0], hierarchical_copy=[1.0])
    made: list[tuple[tuple[str, ...], str]] = []

    def mirrored(devices: tuple[str, ...], way: str) -> Any:
        made.append((devices, way))
        # The last one is kept; those before are only timed.
        return real(devices, way) if len(made) in (3, 4, 7) else way

    monkeypatch.setattr(communication, "mirrored_strategy", mirrored)
    with caplog.at_level(logging.INFO, "tfmultigpu"):
        first = tmg.create_strategy(devices=2, communication="measured", fallback=False)
        again = tmg.create_strategy(devices=2, communication="measured")
        other = tmg.create_strategy(devices=["CPU:1", "CPU:0"], communication="measured")
    kept = [made[2], made[3], made[6]]
    assert [way for _, way in kept] == ["hierarchical_copy"] * 3
    assert clock.prepared == ["one_device", "hierarchical_copy"] * 2
    times = tmg.strategies.communication_times(first)
    assert times is not None
    assert tmg.strategies.communication_times(again) is times
    assert (times.devices, times.fastest) == (("CPU:0", "CPU:1"), "hierarchical_copy")
    assert tmg.strategies.communication_times(other).devices == ("CPU:1", "CPU:0")
    logged = [record.getMessage() for record in caplog.records]
    assert logged[1] == f"Gradients are added by hierarchical_copy, the fastest. {times}"
    assert (
        logged[3] == "Gradients are added by hierarchical_copy, the fastest when measured before."
    )


def test_planning_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    plan = tmg.plan_strategy(devices=4, communication="measured")
    assert (plan.kind, plan.communication) == ("mirrored", "measured")
    assert clock.prepared == []
    assert process_state._kept == {}
    with (
        pytest.warns(StrategyFallbackWarning, match="added by the fastest, to be measured instead"),
        pytest.raises(StrategyUnavailableError, match="No way to add over CPU:0, CPU:1 gives"),
    ):
        tmg.create_strategy("multi_worker", 2, "measured")
    assert clock.prepared == ["one_device", "hierarchical_copy"]  # Each failed: there is no clock.


def sums(strategy: tf.distribute.Strategy) -> list[float]:
    """The ranks, from 1, added over the replicas in a loop of one's own."""

    @tf.function(autograph=False)
    def compiled() -> Any:
        def replica() -> Any:
            context: Any = tf.distribute.get_replica_context()
            rank = tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0
            return context.all_reduce(tf.distribute.ReduceOp.SUM, rank)

        return strategy.run(replica)

    return [float(one) for one in strategy.experimental_local_results(compiled())]


def build() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(6),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Activation("tanh"),
            keras.layers.Dense(1),
        ]
    )


@pytest.mark.parametrize("fastest", ["hierarchical_copy"])
def test_training_is_that_of_one_device(fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a layer that adds by the strategy itself in each step."""
    with monkeypatch.context() as patch:
        times = {"one_device": [2.0], "hierarchical_copy": [2.0]} | {fastest: [1.0]}
        real = communication.mirrored_strategy
        Clock(patch, **times)
        patch.setattr(communication, "mirrored_strategy", lambda devices, way: way)
        measured = tmg.strategies.measure_communication(2)
        process_state.keep(("communication times", ("CPU:0", "CPU:1")), lambda: measured)
        patch.setattr(communication, "mirrored_strategy", real)
        strategy = tmg.create_strategy(devices=2, communication="measured", fallback=False)
    assert tmg.strategies.communication_times(strategy).fastest == fastest
    assert sums(strategy) == [3.0, 3.0]
    generator = np.random.default_rng(3)
    arrays = [generator.normal(size=(12, size)).astype("float32") for size in (5, 1)]
    one_device.hold(
        strategy,  # type: ignore[arg-type]
        build,
        lambda: keras.optimizers.SGD(0.1),
        keras.losses.MeanSquaredError(),
        one_device.cut(arrays, [8, 7, 4]),
    )


def test_strategies_by_measurement_and_by_rule_stand_side_by_side() -> None:
    measured = tmg.create_strategy(devices=4, communication="measured", fallback=False)
    ruled = tmg.create_strategy(devices=2)
    times = tmg.strategies.measure_communication(["CPU:5", "CPU:2"], **SMALL)
    asked = tmg.create_strategy(devices=times.devices, communication=times.fastest, fallback=False)
    assert [sums(one) for one in (measured, ruled, asked, measured)] == [
        [10.0] * 4,
        [3.0] * 2,
        [3.0] * 2,
        [10.0] * 4,
    ]
    assert tmg.strategies.communication_times(ruled) is None
    # What was measured for a loop of one's own is not what create_strategy goes by.
    assert list(process_state._kept) == [("communication times", names("CPU", 4))]
