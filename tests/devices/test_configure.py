"""Listing and settings of devices, each group in a process where TensorFlow has not started yet.

Fake GPUs are planted where TensorFlow asks the driver for them, so that TensorFlow's own checks
decide what is refused. The lines run in one process in order: a refusal must change nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf
from law.processes import run_program

from tfmultigpu.devices import (
    list_devices,
    list_logical_devices,
    logical_to_physical,
)
from tfmultigpu.devices.names import parse_device_name

pytestmark = pytest.mark.slow

PRELUDE = """
import os
import pytest
import tensorflow as tf
from tfmultigpu.devices import *
from tfmultigpu.errors import *

GIB = 1024**3

def names(devices):
    return tuple(device.name for device in devices)

def refused(error, said, call):
    with pytest.raises(error) as caught:
        call()
    for part in [said] if isinstance(said, str) else said:
        assert part in str(caught.value), str(caught.value)
"""

FAKE_GPUS = """
from tensorflow.python.eager.context import pywrap_tfe
from tfmultigpu.devices import discovery
from tfmultigpu.devices.gpu_memory import NvmlGpu

COUNT = 3
DETAILS = {"device_name": "NVIDIA H200", "compute_capability": "9.0"}
pywrap_tfe.TF_ListPhysicalDevices = lambda: [b"/physical_device:CPU:0"] + [
    b"/physical_device:GPU:%d" % index for index in range(COUNT)
]
pywrap_tfe.TF_GetDeviceDetails = lambda index: dict(DETAILS) if index else {}
driver = []
discovery.read_gpus = lambda: tuple(driver)
GPUS = tf.config.list_physical_devices("GPU")
os.environ.pop("CUDA_VISIBLE_DEVICES")

def growth():
    return [tf.config.experimental.get_memory_growth(gpu) for gpu in GPUS]

def limits(index):
    parts = tf.config.get_logical_device_configuration(GPUS[index])
    return parts and [part.memory_limit for part in parts]
"""


Run = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a script in a process of its own, where its assertions are ours."""

    def call(script: str, *, gpus: bool = False, **environment: str) -> None:
        program = tmp_path / "program.py"
        program.write_text(PRELUDE + (FAKE_GPUS if gpus else "") + textwrap.dedent(script))
        run_program(program, **environment)

    return call


def test_what_the_error_names_does_start_the_devices(run: Run) -> None:
    for start in ("tf.config.list_logical_devices()", "keras.optimizers.SGD()"):
        run(
            f"""
            import keras
            {start}
            refused(DevicesInitializedError, "Move", lambda: split_device("CPU:0", parts=2))
            assert list_logical_devices() == ("CPU:0",)
            """
        )


HIDDEN = {
    "": ["CUDA_VISIBLE_DEVICES='' hides every GPU", "unset it before Python starts"],
    "-1": ["CUDA_VISIBLE_DEVICES='-1' hides every GPU", "unset it before Python starts"],
    "7": [
        "CUDA_VISIBLE_DEVICES='7' shows only",
        "unset it before Python starts",
        "tensorflow[and-cuda]",
    ],
    None: ["TensorFlow finds none", "tensorflow[and-cuda]"],
}


def test_the_variable_that_hides_gpus_and_its_cure_are_in_every_error(run: Run) -> None:
    for value, said in HIDDEN.items():
        run(
            f"""
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            if {value!r} is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = {value!r}
            refused(DeviceNotFoundError, {said}, lambda: split_device("GPU:0", parts=2))
            refused(DeviceNotFoundError, {said}, lambda: limit_memory({{"GPU:0": GIB}}))
            refused(DeviceNotFoundError, {said}, lambda: enable_memory_growth(["GPU:0"]))
            tf.test.is_built_with_gpu_support = lambda: False
            refused(DeviceNotFoundError, "built without GPU", lambda: split_device("GPU:0", 2))
            """
        )


def test_memory_growth_is_on_for_all_gpus_or_none(run: Run) -> None:
    run(
        """
        assert names(list_devices()) == ("CPU:0", "GPU:0", "GPU:1", "GPU:2")
        one = list_devices("GPU")[1]
        assert (one.kind, one.index, one.description) == ("GPU", 1, "NVIDIA H200")
        assert (one.compute_capability, one.memory_total, one.memory_free) == ((9, 0), None, None)

        left_out = ["leaves out GPU:2", "cannot differ", "Write enable_memory_growth() for all"]
        refused(TfMultiGpuError, left_out, lambda: enable_memory_growth(["GPU:0", "GPU:1"]))
        refused(DeviceNotFoundError, "Existing: GPU:0", lambda: enable_memory_growth(["CPU:0"]))
        assert growth() == [None] * 3
        assert names(enable_memory_growth()) == ("GPU:0", "GPU:1", "GPU:2")
        assert enable_memory_growth(["gpu:2", "gpu:1", "gpu:0"]) == list_devices("GPU")
        assert growth() == [True] * 3

        # TensorFlow would drop growth in silence as soon as any device is divided
        for call in (
            lambda: split_device("CPU:0", parts=2),
            lambda: split_device("GPU:0", parts=2, memory=GIB),
            lambda: limit_memory({"GPU:1": GIB}),
        ):
            refused(TfMultiGpuError, "drops memory growth of every GPU", call)
        assert list_logical_devices() == ("CPU:0", "GPU:0", "GPU:1", "GPU:2")
        assert split_device("CPU:0", parts=1) == ("CPU:0",)       # that divides nothing

        tf.constant(1.0)
        assert names(enable_memory_growth()) == ("GPU:0", "GPU:1", "GPU:2")
        """,
        gpus=True,
    )


def test_settings_after_the_start_are_refused(run: Run) -> None:
    run(
        """
        tf.constant(1.0)
        late = "enable_memory_growth() came after"
        refused(DevicesInitializedError, late, enable_memory_growth)
        assert growth() == [None] * 3
        two = {"GPU:0": GIB, "GPU:1": GIB}
        refused(DevicesInitializedError, "limit_memory", lambda: limit_memory(two))
        assert limits(0) is limits(1) is None
        """,
        gpus=True,
    )


def test_limits_and_parts_of_gpus(run: Run) -> None:
    run(
        """
        limit_memory({})
        limit_memory({"/gpu:0": 2 * GIB + 5})
        assert limits(0) == [2048]                                  # whole MiB
        limit_memory({"GPU:0": 3 * GIB, "GPU:2": GIB})
        assert (limits(0), limits(1), limits(2)) == ([3072], None, [1024])

        # all or none: the second entry is wrong, the first is not applied
        for wrong in (0, 8, 0.5, True, "8GB", -GIB):
            refused(
                ValueError,
                f"8 GiB is 8 * 1024**3. Received: {wrong!r}",
                lambda: limit_memory({"GPU:0": GIB, "GPU:1": wrong}),
            )
        for name in ("GPU:3", "CPU:0", "gpu:0"):
            refused(Exception, name.upper(), lambda: limit_memory({"GPU:0": GIB, name: GIB}))
        assert limits(0) == [3072]

        # parts are numbered over all GPUs
        assert split_device("GPU:1", parts=2, memory=GIB) == ("GPU:1", "GPU:2")
        assert split_device("GPU:0", parts=2, memory=[GIB, 2 * GIB]) == ("GPU:0", "GPU:1")
        assert split_device("GPU:1", parts=2, memory=GIB) == ("GPU:2", "GPU:3")
        assert (limits(0), limits(1)) == ([1024, 2048], [1024, 1024])
        assert list_logical_devices("gpu") == ("GPU:0", "GPU:1", "GPU:2", "GPU:3", "GPU:4")
        assert logical_to_physical() == {
            "CPU:0": "CPU:0", "GPU:0": "GPU:0", "GPU:1": "GPU:0", "GPU:2": "GPU:1",
            "GPU:3": "GPU:1", "GPU:4": "GPU:2",
        }
        assert names(list_devices("GPU")) == ("GPU:0", "GPU:1", "GPU:2")

        undo = ["GPU:0 into 2 parts", f'split_device("GPU:0", parts=2, memory={2 * GIB})']
        refused(TfMultiGpuError, undo, lambda: limit_memory({"GPU:0": 4 * GIB}))
        three = "3 memory limits for 2 parts"
        refused(ValueError, three, lambda: split_device("GPU:0", 2, memory=[GIB, GIB, GIB]))
        unknown = ["need a memory limit", "memory=4 * 1024**3", "pip install nvidia-ml-py"]
        refused(ValueError, unknown, lambda: split_device("GPU:0", parts=2))
        both = ["GPU:0, GPU:1, GPU:2 split or limited", "TF_FORCE_GPU_ALLOW_GROWTH"]
        refused(TfMultiGpuError, both, enable_memory_growth)
        assert growth() == [None] * 3 and limits(0) == [1024, 2048]

        # the driver knows the memory: a limit is derived, and one too large is refused
        driver[:] = [NvmlGpu(f"GPU-{i}", "NVIDIA H200", 100 * GIB, 80 * GIB) for i in range(3)]
        assert list_devices("GPU")[0].memory_free == 80 * GIB
        assert split_device("GPU:0", parts=4) == ("GPU:0", "GPU:1", "GPU:2", "GPU:3")
        assert limits(0) == [18 * 1024] * 4                          # nine tenths of what is free
        large = f"{120 * GIB} bytes, but GPU:1 has"
        refused(ValueError, large, lambda: split_device("GPU:1", parts=2, memory=60 * GIB))
        refused(ValueError, "GPU:2 has", lambda: limit_memory({"GPU:2": 101 * GIB}))
        assert (limits(1), limits(2)) == ([1024, 1024], [1024])
        """,
        gpus=True,
    )


def test_hidden_gpus_leave_no_gap_and_are_named(run: Run) -> None:
    run(
        """
        tf.config.set_visible_devices(GPUS[1:], "GPU")
        assert names(list_devices("GPU")) == ("GPU:0", "GPU:1", "GPU:2")
        assert logical_to_physical() == {"CPU:0": "CPU:0", "GPU:0": "GPU:1", "GPU:1": "GPU:2"}
        hidden = ["Existing: CPU:0, GPU:1, GPU:2", "set_visible_devices hides GPU:0; remove"]
        refused(DeviceNotFoundError, hidden, lambda: split_device("GPU:0", 2, memory=GIB))
        assert split_device("GPU:2", parts=2, memory=GIB) == ("GPU:1", "GPU:2")
        tf.config.set_visible_devices([], "GPU")
        assert list_logical_devices() == ("CPU:0",)
        assert enable_memory_growth() == ()
        """,
        gpus=True,
    )


def test_growth_forced_by_the_environment_goes_with_splits(run: Run) -> None:
    run(
        """
        assert split_device("CPU:0", parts=2) == ("CPU:0", "CPU:1")
        limit_memory({"GPU:0": GIB})
        assert names(enable_memory_growth()) == ("GPU:0", "GPU:1", "GPU:2")
        assert limits(0) == [1024] and growth() == [None, True, True]
        """,
        gpus=True,
        TF_FORCE_GPU_ALLOW_GROWTH="true",
    )


# In this process, after TensorFlow started ---------------------------------------------------


def test_names_equal_tensorflows_own() -> None:
    real = tuple(parse_device_name(device.name) for device in tf.config.list_logical_devices())
    assert list_logical_devices() == real
    assert list_logical_devices("cpu") == tuple(n for n in real if n.startswith("CPU:"))
    assert [device.name for device in list_devices("CPU")] == ["CPU:0"]  # Split, and yet one.
    assert set(logical_to_physical().values()) == {device.name for device in list_devices()}
