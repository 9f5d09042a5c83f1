"""Eight virtual CPUs in every test process, made before TensorFlow starts its devices.

With ``TEST_DEVICES=GPU`` in the environment the promises are held on eight parts of one GPU.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import pytest

PARTS = 8
# Held of CPUs alone: their names and memory, that no GPU is here, sums in the same order each time.
OF_CPUS = (
    "test_no_read_of_a_weight_becomes_a_copy",
    "test_fallback_warns_or_raises", "test_hidden_gpus_are_named", "test_unknown_memory_is_told",
    "test_the_replica_the_batch_and_the_way_out_are_named", "test_they_are_saved_and_restored",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        return  # The process that only hands out the files needs no TensorFlow.
    import tensorflow as tf
    from hypothesis import settings

    # By default an example may take 0.2 seconds, which a slower machine would miss.
    settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
    settings.load_profile("repeatable")

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(PARTS)]
    )
    if os.environ.get("TEST_DEVICES") == "GPU":
        gpu = tf.config.list_physical_devices("GPU")[0]
        part = tf.config.LogicalDeviceConfiguration(memory_limit=448)  # MiB
        tf.config.set_logical_device_configuration(gpu, [part] * PARTS)
        tf.config.experimental.enable_tensor_float_32_execution(False)
    # Whoever drops an iterator waits for the thread that tunes it, now and then for a minute.
    untuned = tf.data.Options()
    untuned.autotune.enabled = False
    tf.data.Dataset._apply_debug_options = lambda dataset: dataset.with_options(untuned)


def pytest_collection_finish() -> None:
    """Leaves what has been imported out of the search for garbage, which takes a tenth then."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 5, 5)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TEST_DEVICES") == "GPU":
        items[:] = [item for item in items if not item.name.startswith(OF_CPUS)]
    # Files that start processes take longest: at the end, one of two cores would have no work left.
    items.sort(key=lambda item: "workers" not in f"{item.path.parent.name}/{item.path.name}")


@pytest.fixture(autouse=True)
def loops_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has loops compiled however long a step takes: beside other programs each takes long."""
    from tfmultigpu.steps import runner

    monkeypatch.setattr(runner, "LONG", math.inf)


@pytest.fixture(autouse=True)
def leaves_no_scope_behind() -> Iterator[None]:
    """Holds that a test, passed or failed, leaves the scopes of Keras and TensorFlow."""
    yield
    import keras
    import tensorflow as tf

    made = keras.Variable(1.0)  # An error in a scope that holds assignments.
    made.assign(2.0)
    assert float(made.numpy()) == 2.0
    assert not tf.distribute.has_strategy()
    assert tf.executing_eagerly()


@pytest.fixture(autouse=True, scope="module")
def forgets_strategies_of_other_files(request: pytest.FixtureRequest) -> None:
    """Has a file begin as a process does, with no strategy; promises know no module of ours."""
    if request.path.parent.name == "promises":
        return
    from tfmultigpu.strategies.process_state import process_state

    process_state.forget()
