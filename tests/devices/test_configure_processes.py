"""Settings of devices, each group of them in a process where TensorFlow has not started yet.

Fake GPUs are planted where TensorFlow asks the driver for them, so that TensorFlow's own checks
decide what is refused. The lines run in one process in order: a refusal must change nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

pytestmark = pytest.mark.slow

PRELUDE = """
import pytest
import tensorflow as tf
from tfmultigpu.devices.configure import *
from tfmultigpu.errors import *

GIB = 1024**3

def names(devices):
    return tuple(device.name for device in devices)

def logical(kind):
    return tuple(parse_device_name(one.name) for one in tf.config.list_logical_devices(kind))
"""

FAKE_GPUS = """
from tensorflow.python.eager.context import pywrap_tfe
from tfmultigpu.devices import discovery
from tfmultigpu.devices.nvml import NvmlGpu

COUNT = 3
DETAILS = {"device_name": "NVIDIA H200", "compute_capability": "9.0"}
pywrap_tfe.TF_ListPhysicalDevices = lambda: [b"/physical_device:CPU:0"] + [
    b"/physical_device:GPU:%d" % index for index in range(COUNT)
]
pywrap_tfe.TF_GetDeviceDetails = lambda index: dict(DETAILS) if index else {}
driver = []
discovery.read_gpus = lambda: tuple(driver)
GPUS = tf.config.list_physical_devices("GPU")

def growth():
    return [tf.config.experimental.get_memory_growth(gpu) for gpu in GPUS]

def limits(index):
    parts = tf.config.get_logical_device_configuration(GPUS[index])
    return parts and [part.memory_limit for part in parts]
"""


# TensorFlow is imported once, in seconds; each script runs in a copy of that process, made before
# any device starts. What fails is written to standard error, which goes to standard output.
COPIES = """
import json, os, sys, traceback
import keras, tensorflow
for line in sys.stdin:
    script, environment = json.loads(line)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        os.close(reader)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.environ.update(environment)
        try:
            exec(script, {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    os.close(writer)
    with open(reader) as file:
        said = file.read()
    print(json.dumps([os.waitpid(child, 0)[1], said]), flush=True)
"""

Run = Callable[..., str]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a script in a process of its own; returns what it printed, its assertions are ours."""
    # No warmth from the parent: neither its devices nor what it says about CUDA.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TF_FORCE")}
    with subprocess.Popen(
        [sys.executable, "-c", COPIES],
        env=inherited | {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as copies:
        assert copies.stdin is not None
        assert copies.stdout is not None
        requests, answers = copies.stdin, copies.stdout

        def call(script: str, *, gpus: bool = False, **environment: str) -> str:
            source = PRELUDE + (FAKE_GPUS if gpus else "") + textwrap.dedent(script)
            print(json.dumps([source, environment]), file=requests, flush=True)
            status, said = json.loads(answers.readline())
            assert status == 0, said[-3000:]
            return str(said)

        yield call
        requests.close()


def test_a_script_that_fails_is_a_failure(run: Run) -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run("1 / 0")


def test_listing_starts_nothing_and_splitting_works_after_it(run: Run) -> None:
    out = run(
        """
        assert names(list_devices()) == names(visible_devices()) == ("CPU:0",)
        assert list_logical_devices() == ("CPU:0",)
        assert enable_memory_growth() == ()          # no GPU: nothing to do
        assert split_device("/physical_device:CPU:0", parts=2) == ("CPU:0", "CPU:1")
        assert split_device("CPU:0", parts=1) == ("CPU:0",)       # the last split holds
        assert split_device("cpu:0", parts=4) == ("CPU:0", "CPU:1", "CPU:2", "CPU:3")
        list_devices(), visible_devices(), logical_to_physical()  # nothing is started by these
        assert restrict_devices([]) == ()
        assert split_device("CPU:0", parts=3) == list_logical_devices("CPU")

        strategy = tf.distribute.MirroredStrategy(list_logical_devices())
        assert strategy.num_replicas_in_sync == 3
        total = strategy.reduce("SUM", strategy.run(lambda: tf.constant(2.0)), axis=None)
        assert logical("CPU") == list_logical_devices() == ("CPU:0", "CPU:1", "CPU:2")
        assert split_device("CPU:0", parts=3) == ("CPU:0", "CPU:1", "CPU:2")
        with pytest.raises(DevicesInitializedError, match="parts=2, memory=None. came after"):
            split_device("CPU:0", parts=2)
        assert list_logical_devices() == ("CPU:0", "CPU:1", "CPU:2")
        assert enable_memory_growth() == ()
        print("total", float(total))
        """
    )
    assert out.split()[-2:] == ["total", "6.0"]


def test_what_the_error_names_does_start_the_devices(run: Run) -> None:
    for start in ("tf.config.list_logical_devices()", "keras.optimizers.SGD()"):
        run(
            f"""
            import keras
            {start}
            with pytest.raises(DevicesInitializedError, match="Move this line up"):
                split_device("CPU:0", parts=2)
            assert list_logical_devices() == logical("CPU") == ("CPU:0",)
            """
        )


def test_memory_growth_is_on_for_all_gpus_or_none(run: Run) -> None:
    run(
        """
        assert names(list_devices()) == ("CPU:0", "GPU:0", "GPU:1", "GPU:2")
        one = list_devices("GPU")[1]
        assert (one.description, one.compute_capability) == ("NVIDIA H200", (9, 0))
        assert (one.memory_total, one.memory_free) == (None, None)

        with pytest.raises(TfMultiGpuError, match="leaves out GPU:2") as caught:
            enable_memory_growth(["GPU:0", "GPU:1"])
        assert "cannot differ between GPUs. Call enable_memory_growth() for" in str(caught.value)
        assert "restrict_devices(['GPU:0', 'GPU:1'])" in str(caught.value)
        with pytest.raises(DeviceNotFoundError, match="Existing: GPU:0, GPU:1, GPU:2"):
            enable_memory_growth(["CPU:0"])
        assert growth() == [None] * 3

        # one GPU refuses: those before it go back to what they were
        real, tried = tf.config.experimental.set_memory_growth, []
        def refuse(gpu, enable):
            tried.append((gpu.name[-1], enable))
            if gpu == GPUS[2] and enable:
                raise ValueError("not this one")
            real(gpu, enable)
        tf.config.experimental.set_memory_growth = refuse
        with pytest.raises(TfMultiGpuError, match="refused: not this one. Memory growth is un"):
            enable_memory_growth()
        tf.config.experimental.set_memory_growth = real
        assert growth() == [None] * 3
        assert tried == [("0", True), ("1", True), ("2", True), ("0", None), ("1", None)]

        assert names(enable_memory_growth()) == ("GPU:0", "GPU:1", "GPU:2")
        assert enable_memory_growth(["gpu:2", "gpu:1", "gpu:0"]) == list_devices("GPU")
        assert growth() == [True] * 3

        # TensorFlow would drop growth in silence as soon as any device is divided
        for call in (
            lambda: split_device("CPU:0", parts=2),
            lambda: split_device("GPU:0", parts=2, memory=GIB),
            lambda: limit_memory({"GPU:1": GIB}),
        ):
            with pytest.raises(TfMultiGpuError, match="drops memory growth of every GPU"):
                call()
        assert list_logical_devices() == ("CPU:0", "GPU:0", "GPU:1", "GPU:2")
        assert split_device("CPU:0", parts=1) == ("CPU:0",)       # that divides nothing

        tf.constant(1.0)
        assert names(enable_memory_growth()) == ("GPU:0", "GPU:1", "GPU:2")
        """,
        gpus=True,
    )


def test_memory_growth_after_the_start_is_refused(run: Run) -> None:
    run(
        """
        tf.constant(1.0)
        with pytest.raises(DevicesInitializedError, match=r"enable_memory_growth\\(\\) came after"):
            enable_memory_growth()
        assert growth() == [None] * 3
        with pytest.raises(DevicesInitializedError, match="limit_memory.*came after"):
            limit_memory({"GPU:0": GIB, "GPU:1": GIB})
        assert limits(0) is limits(1) is None
        with pytest.raises(DevicesInitializedError, match=r"restrict_devices\\(\\['GPU:1'\\]"):
            restrict_devices(["GPU:1"])
        assert names(visible_devices("GPU")) == ("GPU:0", "GPU:1", "GPU:2")
        assert names(restrict_devices(3)) == ("GPU:0", "GPU:1", "GPU:2")   # already so
        """,
        gpus=True,
    )


def test_limits_and_parts_of_gpus(run: Run) -> None:
    run(
        """
        limit_memory({"/gpu:0": 2 * GIB + 5})
        assert limits(0) == [2048]                                  # whole MiB
        limit_memory({"GPU:0": 3 * GIB, "GPU:2": GIB})
        assert (limits(0), limits(1), limits(2)) == ([3072], None, [1024])

        # all or none: the second entry is wrong, the first is not applied
        for wrong in (0, 8, 0.5, True, "8GB", -GIB):
            with pytest.raises(ValueError, match=r"8 GiB is 8 \\* 1024\\*\\*3. Received: "):
                limit_memory({"GPU:0": GIB, "GPU:1": wrong})
        with pytest.raises(DeviceNotFoundError, match="GPU:3 does not exist"):
            limit_memory({"GPU:0": GIB, "GPU:3": GIB})
        with pytest.raises(TfMultiGpuError, match="not of CPU:0"):
            limit_memory({"GPU:0": GIB, "CPU:0": GIB})
        assert limits(0) == [3072]

        # parts are numbered over all GPUs
        assert split_device("GPU:1", parts=2, memory=GIB) == ("GPU:1", "GPU:2")
        assert split_device("GPU:0", parts=2, memory=[GIB, 2 * GIB]) == ("GPU:0", "GPU:1")
        assert split_device("GPU:1", parts=2, memory=GIB) == ("GPU:2", "GPU:3")
        assert (limits(0), limits(1)) == ([1024, 2048], [1024, 1024])
        assert list_logical_devices("GPU") == ("GPU:0", "GPU:1", "GPU:2", "GPU:3", "GPU:4")
        assert logical_to_physical() == {
            "CPU:0": "CPU:0", "GPU:0": "GPU:0", "GPU:1": "GPU:0", "GPU:2": "GPU:1",
            "GPU:3": "GPU:1", "GPU:4": "GPU:2",
        }
        assert names(list_devices("GPU")) == ("GPU:0", "GPU:1", "GPU:2")

        with pytest.raises(TfMultiGpuError, match="split into 2 parts") as caught:
            limit_memory({"GPU:0": 4 * GIB})
        assert f'split_device("GPU:0", parts=2, memory={2 * GIB})' in str(caught.value)
        with pytest.raises(ValueError, match="3 memory limits for 2 parts"):
            split_device("GPU:0", parts=2, memory=[GIB, GIB, GIB])
        with pytest.raises(ValueError, match="parts of a GPU need a memory limit") as caught:
            split_device("GPU:0", parts=2)
        assert "memory=4 * 1024**3" in str(caught.value)
        assert 'tfmultigpu[nvml]' in str(caught.value)
        with pytest.raises(TfMultiGpuError, match="after GPU:0, GPU:1, GPU:2 was split or lim"):
            enable_memory_growth()
        assert growth() == [None] * 3 and limits(0) == [1024, 2048]

        # the driver knows the memory: a limit is derived, and one too large is refused
        driver[:] = [NvmlGpu(f"GPU-{i}", "NVIDIA H200", 100 * GIB, 80 * GIB) for i in range(3)]
        import os
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        assert list_devices("GPU")[0].memory_free == 80 * GIB
        assert split_device("GPU:0", parts=4) == ("GPU:0", "GPU:1", "GPU:2", "GPU:3")
        assert limits(0) == [18 * 1024] * 4                          # nine tenths of what is free
        with pytest.raises(ValueError, match=f"{120 * GIB} bytes in all, but GPU:1 has"):
            split_device("GPU:1", parts=2, memory=60 * GIB)
        with pytest.raises(ValueError, match="bytes in all, but GPU:2 has"):
            limit_memory({"GPU:2": 101 * GIB})
        assert (limits(1), limits(2)) == ([1024, 1024], [1024])
        """,
        gpus=True,
    )


def test_hiding_gpus_numbers_the_rest_anew(run: Run) -> None:
    run(
        """
        assert names(restrict_devices(["GPU:2", "GPU:1"])) == ("GPU:1", "GPU:2")
        assert names(visible_devices()) == ("CPU:0", "GPU:1", "GPU:2")
        assert names(list_devices("GPU")) == ("GPU:0", "GPU:1", "GPU:2")
        assert logical_to_physical() == {"CPU:0": "CPU:0", "GPU:0": "GPU:1", "GPU:1": "GPU:2"}
        with pytest.raises(DeviceNotFoundError, match="GPU:0 is hidden from TensorFlow") as caught:
            split_device("GPU:0", parts=2, memory=GIB)
        assert "Existing: CPU:0, GPU:1, GPU:2" in str(caught.value)
        assert "first show GPU:0 with restrict_devices" in str(caught.value)
        assert split_device("GPU:2", parts=2, memory=GIB) == ("GPU:1", "GPU:2")
        with pytest.raises(DeviceNotFoundError, match="No such device here: GPU:3"):
            restrict_devices(["GPU:1", "GPU:3"])
        with pytest.raises(ValueError, match="GPU:1 is named more than once"):
            restrict_devices(["GPU:1", "gpu:1"])
        assert names(visible_devices("GPU")) == ("GPU:1", "GPU:2")
        assert names(restrict_devices(1)) == ("GPU:0",)              # a count: the first of all
        assert restrict_devices([]) == () and list_logical_devices() == ("CPU:0",)
        assert enable_memory_growth() == ()
        """,
        gpus=True,
    )


def test_growth_forced_by_the_environment_goes_with_splits(run: Run) -> None:
    run(
        """
        assert split_device("CPU:0", parts=2) == ("CPU:0", "CPU:1")
        assert names(enable_memory_growth()) == ("GPU:0", "GPU:1", "GPU:2")
        limit_memory({"GPU:0": GIB})
        assert limits(0) == [1024]
        """,
        gpus=True,
        TF_FORCE_GPU_ALLOW_GROWTH="true",
    )
