"""Two workers of two devices with sharded variables train as one device does."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import this_worker
from law import worker_functions
from law.model import batches_of, regression, small
from law.pair import Pair, Row
from problems import network
from tensorflow.python.distribute import collective_all_reduce_strategy

import tfmultigpu as tmg
from tfmultigpu.strategies.topology import is_sharded

pytestmark = pytest.mark.slow
LOCAL = 2
SIZES = [12, 7, 1, 2, 3, 12]  # Partial batches, one row, fewer rows than replicas.


def join_with_two_devices() -> int:
    """Joins with two CPUs of this worker; TensorFlow gives a worker one."""

    def devices(_: Any, __: Any, worker: str) -> Any:
        return tuple(f"{worker}/device:CPU:{i}" for i in range(LOCAL)), "CPU"

    tmg.split_device("CPU:0", parts=LOCAL)
    extended: Any = collective_all_reduce_strategy.CollectiveAllReduceExtended
    assert callable(extended._initialize_local_devices)
    extended._initialize_local_devices = devices
    return worker_functions.join()


@pytest.fixture(scope="module")
def both() -> Iterator[Callable[..., list[Any]]]:
    """Calls a function on two workers of two devices and returns what each returned."""
    yield from this_worker.pair_of(join_with_two_devices, replicas=2 * LOCAL)


def bytes_on_devices(variables: Any) -> dict[str, int]:
    on_each: dict[str, int] = {}
    for variable in variables:
        for local in this_worker.strategy().experimental_local_results(variable.value):
            name = local.device.split("device:")[-1]
            on_each[name] = on_each.get(name, 0) + local.shape.num_elements() * local.dtype.size
    return on_each


def place() -> dict[str, Any]:
    """Returns where variables are, and bytes of them and of the optimizer on each device."""
    strategy, worker = this_worker.strategy(), this_worker.index()

    def dense(memory: Any = None) -> Any:
        with strategy.scope(), tmg.sharded_variables(at_least=0, memory=memory):
            layer = keras.layers.Dense(32, use_bias=False)
            layer.build((None, 32))
        return layer

    keras.utils.set_random_seed(worker)  # They begin with the numbers that the first one draws.
    layers = [keras.layers.Dense(32, "tanh") for _ in range(5)]
    with strategy.scope():
        with tmg.sharded_variables(at_least=4 * 32 * 32):
            model = network(6, *layers, keras.layers.Dense(3))
        optimizer = keras.optimizers.Adam(0.01)
    begin = [float(np.sum(np.square(v.numpy()))) for v in model.variables]
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    step((np.ones((8, 6), "float32"), np.ones((8, 3), "float32")))
    large = [v for v in model.variables if is_sharded(v)]
    others = ("iteration", "learning_rate")
    slots = [v for v in optimizer.variables if v.path.split("/")[-1] not in others]
    # One worker still has a model that another has let go of, and their devices differ in memory.
    memory = {"CPU:0": 3e6, "CPU:1": 1e6} if worker == 0 else {"CPU:0": 1e6, "CPU:1": 4e6}
    kept = [dense() for _ in range(3)][worker:]
    gc.collect()
    later = [dense(memory) for _ in range(6)]
    assert kept
    return {
        "begin": begin,
        "later": [layer.kernel.value.device.split("device:")[-1] for layer in later],
        "devices": [variable.value.device.split("device:")[-1] for variable in large],
        "large": bytes_on_devices(large),
        "small": bytes_on_devices(v for v in model.variables if not is_sharded(v)),
        "slots": bytes_on_devices(slots),
        "trained": sum(4 * v.shape.num_elements() for v in model.trainable_variables),
    }


def test_each_worker_keeps_each_large_variable_once(both: Any) -> None:
    first, second = both(place)
    assert first["begin"] == second["begin"]
    assert first["devices"] == second["devices"]
    assert sorted(first["devices"]) == ["CPU:0"] * 2 + ["CPU:1"] * 2
    assert first["later"] == second["later"]
    assert set(first["later"]) == {"CPU:0", "CPU:1"}
    for placed in (first, second):
        assert placed["large"] == dict.fromkeys(("CPU:0", "CPU:1"), 2 * 4 * 32 * 32)
        assert len(set(placed["small"].values())) == 1
        assert sum(placed["slots"].values()) == 2 * placed["trained"]
        assert max(placed["slots"].values()) < 1.2 * placed["trained"]


def hold(every_feature: bool) -> None:
    """Holds steps to one device: those of every feature, or of micro-batches and Adam."""
    if every_feature:
        row = Row(4, norm=True, sharded=True, options=(("loss_scale", 1024.0),))
        pair, batches = row.pair(this_worker.strategy()), batches_of(SIZES, [0.0, 1.0, 3.0], [1])
    else:
        batches = regression(SIZES)

        def build() -> Any:
            return small(keras.optimizers.Adam(0.01), clip_norm=0.1)

        pair = Pair(build, batches[0], this_worker.strategy(), sharded=True, micro_batches=2)
    assert all(is_sharded(variable) for variable in pair.ours.model.trainable_variables)
    pair.hold(batches, 4)


@pytest.mark.parametrize("every_feature", [True, False])
def test_steps_are_those_of_one_device(both: Any, every_feature: bool) -> None:
    both(hold, every_feature)


def loops(folder: str) -> list[np.ndarray]:
    """Fits, evaluates, predicts and restores; of the variables the first kernel alone is large."""

    @contextlib.contextmanager
    def large_kernel() -> Iterator[None]:
        with this_worker.strategy().scope(), tmg.sharded_variables(at_least=100):
            yield

    return worker_functions.loops(folder, large_kernel())["weights"]


def test_loops_are_those_of_one_device_which_resumes_them(both: Any, tmp_path: Path) -> None:
    first, second = both(loops, str(tmp_path))
    training = small()
    assert tmg.Checkpoints(tmp_path, training.model, training.optimizer).restore() is not None
    for variable, *weights in zip(training.model.weights, first, second, strict=True):
        for weight in weights:
            np.testing.assert_array_equal(variable.numpy(), weight)


def create_differently() -> list[str]:
    """Returns what is said if the workers create other variables."""
    strategy, worker, told = this_worker.strategy(), this_worker.index(), []

    def create(at_least: int, *widths: int) -> None:
        with strategy.scope(), tmg.sharded_variables(at_least=at_least):
            layers = [keras.layers.Dense(width) for width in widths]
            model = network(6, *layers)
        tmg.make_train_step(model, keras.optimizers.SGD(0.1), "mse", strategy)

    for at_least, widths in ((0, [16 + worker]), (8 * worker, [16]), (0, [16, 3][: 1 + worker])):
        with pytest.raises(tmg.errors.ClusterError) as error:
            create(at_least, *widths)
        told.append(str(error.value))
    return told


def test_workers_that_create_other_variables_are_told(both: Any) -> None:
    for shape, limit, number in both(create_differently):
        assert "another shape on worker" in shape
        assert "at_least=[0, 8], by worker" in limit
        assert "do not call the same things in the same order" in number
