"""Eight virtual CPUs in every test process, made before TensorFlow starts its devices."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import pytest
from promises import KEPT, PROMISES, UNITS

VIRTUAL_CPUS = 8
# Files that take longest, those that start processes before the others: with them at the end, one
# of the two processes of `nox -s tests` would have nothing left to do.
LONGEST = (
    "test_workers.py",
    "test_launch_resume.py",
    "test_sharded_variables.py",
    "test_guarantees_optimizers.py",
    "test_guarantees_losses.py",
    "test_gpu_rehearsal.py",
    "test_documentation.py",
    "test_connection.py",
    "test_touching_rows.py",
    "test_added_losses.py",
    "test_atomic.py",
    "test_multi_worker_start.py",
    "test_lost_workers.py",
    "test_guarantees_input.py",
    "test_guarantees_layers.py",
    "test_guarantees_workers.py",
    "test_guarantees_devices.py",
    "test_capacities_workers.py",
    "test_checkpoints_workers.py",
    "test_killed.py",
    "test_storage.py",
    "test_communication.py",
    "test_data_files.py",
    "test_data_workers.py",
    "test_configure_processes.py",
    "test_examples.py",
    "test_fit_workers.py",
    "test_launcher.py",
    "test_loops_workers.py",
    "test_failures.py",
    "test_steps_workers.py",
    "test_invariance.py",
    "test_evaluate_and_predict.py",
    "test_loss_reductions.py",
    "test_random_draws.py",
    "test_optimizers.py",
    "test_sparse_gradients.py",
    "test_sample_weights.py",
    "test_metric_results.py",
    "test_sharded.py",
    "test_row_gathering.py",
    "test_metrics_in_forward.py",
    "test_verification.py",
    "test_fit.py",
    "test_metric_checks.py",
    "test_features.py",
)


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


def values_of(item: pytest.Item) -> set[Any]:
    """Returns each value of each parameter that a test is run with."""
    call = getattr(item, "callspec", None)
    function = item.nodeid.partition("[")[0]
    return set() if call is None else {(function, n, repr(v)) for n, v in call.params.items()}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    quick = set(PROMISES.values())
    covered: set[Any] = set()
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        values = values_of(item)
        if values and values <= covered and name not in quick | KEPT:
            item.add_marker(pytest.mark.product)
        covered |= values
        if name in quick or name.partition("::")[0] in UNITS:
            item.add_marker(pytest.mark.quick)
    places = {name: place for place, name in enumerate(LONGEST)}
    # Stable: the order within a file, and of the other files, stays.
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
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
def forgets_strategies_of_other_files() -> None:
    """Has a file begin as a process does: with no strategy of several replicas."""
    from tfmultigpu.clusters.process_state import process_state

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
