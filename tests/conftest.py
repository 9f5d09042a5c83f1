"""Eight virtual CPUs in every test process, made before TensorFlow starts its devices."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import pytest

VIRTUAL_CPUS = 8


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("dsession"):
        return  # The process that only hands out the files needs no TensorFlow.
    import tensorflow as tf
    from hypothesis import settings

    # By default an example may take 0.2 seconds, which a slower machine would miss.
    settings.register_profile("no clock", deadline=None)
    settings.load_profile("no clock")

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(VIRTUAL_CPUS)]
    )


def pytest_collection_finish() -> None:
    """What has been imported stays, and looking through it for garbage takes a tenth of the time.

    Tests that hold that something is let go call ``gc.collect``, which finds what they made.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 5, 5)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files that start processes take longest: at the end, one of two cores would have no work left.
    items.sort(key=lambda item: "workers" not in f"{item.path.parent.name}/{item.path.name}")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import tensorflow as tf

    if not tf.config.list_physical_devices("GPU"):
        skip = pytest.mark.skip(reason="needs a GPU that TensorFlow can see")
        for item in marked:
            item.add_marker(skip)


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
    """Has a file begin as a process does: with no strategy of several replicas.

    Except in tests/promises, which know no module of the library.
    """
    if request.path.parent.name == "promises":
        return
    from tfmultigpu.strategies.process_state import process_state

    process_state.forget()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Makes SIGINT a ``KeyboardInterrupt``, even if the tests run in the background.

    A shell starts background processes with SIGINT ignored, and Python leaves that so.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def seed() -> int:
    """Seed Python, NumPy and Keras, and return the seed."""
    import keras

    keras.utils.set_random_seed(20)
    return 20
