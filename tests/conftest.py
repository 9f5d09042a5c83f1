"""Eight virtual CPUs in every test process, made before TensorFlow starts its devices."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import pytest

VIRTUAL_CPUS = 8


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("dsession"):
        return  # The process that only hands out the files needs no TensorFlow.
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(VIRTUAL_CPUS)]
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import tensorflow as tf

    if not tf.config.list_physical_devices("GPU"):
        skip = pytest.mark.skip(reason="needs a GPU that TensorFlow can see")
        for item in marked:
            item.add_marker(skip)


@pytest.fixture
def seed() -> int:
    """Seed Python, NumPy and Keras, and return the seed."""
    import keras

    keras.utils.set_random_seed(20)
    return 20
