"""Names, discovery and numbering of devices: truth tables on fake machines, no GPU needed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tfmultigpu.devices import configure as D
from tfmultigpu.devices.discovery import describe_devices, logical_names
from tfmultigpu.devices.names import parse_device_name, resolve_devices
from tfmultigpu.devices.nvml import NvmlGpu, match_gpus, read_gpus, visible_gpus
from tfmultigpu.errors import DeviceNotFoundError, DevicesInitializedError, TfMultiGpuError

GIB = 1024**3
H200, A100, T4 = "NVIDIA H200", "NVIDIA A100-SXM4-40GB", "Tesla T4"


def machine(*models: str) -> tuple[NvmlGpu, ...]:
    """GPUs in PCI order; each has another amount of memory, so that a mix-up shows."""
    return tuple(
        NvmlGpu(f"GPU-{index:08x}-aaaa", model, 16 * GIB + index, 8 * GIB + index)
        for index, model in enumerate(models)
    )


def gpu_names(count: int) -> tuple[str, ...]:
    return tuple(f"GPU:{index}" for index in range(count))


# --- names -----------------------------------------------------------------------------------


SPELLINGS: list[tuple[str, str]] = [
    ("GPU:0", "GPU:0"),
    ("gpu:0", "GPU:0"),
    ("/gpu:12", "GPU:12"),
    (" GPU:1 ", "GPU:1"),
    ("device:cpu:07", "CPU:7"),
    ("/device:GPU:3", "GPU:3"),
    ("/physical_device:GPU:0", "GPU:0"),
    ("/job:localhost/replica:0/task:0/device:GPU:5", "GPU:5"),
    ("/job:worker/replica:0/task:3/device:TPU:1", "TPU:1"),
    ("/device:XLA_GPU:0", "XLA_GPU:0"),
]


def test_every_spelling_becomes_the_short_one() -> None:
    found = {spelled: parse_device_name(spelled) for spelled, _ in SPELLINGS}
    assert found == dict(SPELLINGS)
    assert [name for _, name in SPELLINGS if parse_device_name(name) != name] == []


def test_what_names_no_device_is_refused() -> None:
    for name in [
        "",
        "GPU",
        "GPU:",
        ":0",
        "0",
        "GPU:-1",
        "GPU:*",
        "GPU:0,1",
        "cuda0",
        "/task:0",
        "job:1",
    ]:
        with pytest.raises(ValueError, match=r"kind and an index, such as 'GPU:0'") as caught:
            parse_device_name(name)
        assert f"name={name!r}" in str(caught.value)


def test_a_number_is_answered_with_the_name_to_write() -> None:
    with pytest.raises(TypeError, match=r'Write "GPU:3"\. Received: name=3'):
        parse_device_name(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Received: name=None"):
        parse_device_name(None)  # type: ignore[arg-type]


# --- asked for against existing --------------------------------------------------------------


def test_counts_take_the_first_and_stop_at_what_exists() -> None:
    for count in (1, 2, 8, 16):
        here = gpu_names(count)
        assert resolve_devices(None, here) == here
        for asked in range(1, count + 1):
            assert resolve_devices(asked, here) == here[:asked]
        with pytest.raises(DeviceNotFoundError) as caught:
            resolve_devices(count + 1, here)
        text = str(caught.value)
        assert f"Asked for {count + 1} devices, but only {count} exist: GPU:0" in text
        assert f"Ask for at most {count}: devices={count}" in text
    assert resolve_devices(None, ()) == ()


def test_a_count_where_nothing_exists() -> None:
    with pytest.raises(DeviceNotFoundError, match=r"only 0 exist: none.*Leave devices out"):
        resolve_devices(1, ())


def test_the_only_device_can_be_split() -> None:
    asks: list[tuple[Any, int]] = [(4, 4), (["CPU:0", "CPU:2"], 3)]
    for asked, parts in asks:
        line = rf'tmg\.split_device\("CPU:0", parts={parts}\)'
        with pytest.raises(DeviceNotFoundError, match=line):
            resolve_devices(asked, ["CPU:0"])
        with pytest.raises(DeviceNotFoundError) as caught:
            resolve_devices(asked, ["CPU:0", "CPU:1"])
        assert "split_device" not in str(caught.value)
    # Splitting the CPU does not make a GPU.
    with pytest.raises(DeviceNotFoundError) as caught:
        resolve_devices(["GPU:1"], ["CPU:0"])
    assert "split_device" not in str(caught.value)


def test_arguments_of_another_kind_are_answered_with_the_line() -> None:
    with pytest.raises(TypeError, match=r'Received: limits=4\. Write tmg\.limit_memory\(\{"GPU:0"'):
        D.limit_memory(4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Received: kind=4\. Write tmg\.list_devices"):
        D.list_devices(4)  # type: ignore[arg-type]


def test_counts_below_one_are_refused() -> None:
    for asked in (0, -1):
        with pytest.raises(ValueError, match=rf"at least 1\. .*GPU:0, GPU:1.*devices={asked}"):
            resolve_devices(asked, gpu_names(2))


def test_names_keep_the_order_asked_for() -> None:
    assert resolve_devices(["/gpu:2", "GPU:0"], gpu_names(4)) == ("GPU:2", "GPU:0")
    assert resolve_devices("gpu:1", gpu_names(2)) == ("GPU:1",)
    assert resolve_devices(["cpu:0"], ("/device:CPU:0",)) == ("CPU:0",)


def test_a_missing_device_is_named_with_what_exists_and_the_line() -> None:
    with pytest.raises(DeviceNotFoundError) as caught:
        resolve_devices(["GPU:0", "GPU:3"], ("CPU:0", "GPU:0", "GPU:1"))
    text = str(caught.value)
    assert "No such device here: GPU:3." in text
    assert "Asked for: GPU:0, GPU:3. Existing: CPU:0, GPU:0, GPU:1." in text
    assert "Change the line to devices=['GPU:0']" in text
    assert isinstance(caught.value, ValueError)


def test_a_missing_device_where_nothing_exists() -> None:
    with pytest.raises(DeviceNotFoundError, match=r"Existing: none\..*Leave devices out"):
        resolve_devices(["GPU:0"], ())


def test_twice_is_refused_in_any_spelling() -> None:
    with pytest.raises(ValueError, match=r"GPU:1 is named more than once.*devices=\['GPU:1'\]"):
        resolve_devices(["GPU:1", "/device:gpu:1"], gpu_names(2))


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ValueError, match=r"empty list\. TensorFlow would take every"):
        resolve_devices([], gpu_names(2))


def test_yes_and_plain_indices_are_refused() -> None:
    with pytest.raises(TypeError, match="not a boolean"):
        resolve_devices(True, gpu_names(2))
    with pytest.raises(TypeError, match='Write "GPU:1"'):
        resolve_devices([1], gpu_names(2))  # type: ignore[list-item]


# --- CUDA_VISIBLE_DEVICES --------------------------------------------------------------------


SHOWN: list[tuple[str | None, list[int]]] = [
    (None, [0, 1, 2, 3]),
    ("", []),
    ("-1", []),
    ("0", [0]),
    ("3,1", [3, 1]),
    (" 2 , 0 ", [2, 0]),
    ("+1", [1]),
    ("1gpu", [1]),
    ("0,-1,1", [0]),  # an invalid entry ends the list
    ("0,9,1", [0]),
    ("9,0", []),
    ("0,x,1", [0]),
    ("0,,1", [0]),
    ("0,1,0", []),  # an entry twice empties it
    ("GPU-00000002", [2]),  # the beginning of a UUID is enough
    ("GPU-00000003-aaaa,GPU-00000000-aaaa", [3, 0]),
    ("GPU-0000", []),  # unless it fits several
    ("GPU-00000001,GPU-ffff,GPU-00000002", [1]),
    ("GPU-00000001,2", [1]),  # sorts do not mix
    ("0,GPU-00000001", [0]),
    ("GPU-00000001,GPU-00000001-aaaa", []),
]


def test_cuda_visible_devices() -> None:
    gpus = machine(A100, A100, A100, A100)
    found = [(asked, [gpus.index(gpu) for gpu in visible_gpus(gpus, asked)]) for asked, _ in SHOWN]
    assert found == SHOWN


def memory_of(
    models: list[str | None], gpus: tuple[NvmlGpu, ...], **environment: str
) -> list[int | None]:
    """PCI positions that TensorFlow's GPUs were matched to."""
    return [gpu and gpus.index(gpu) for gpu in match_gpus(models, gpus, environment)]


def test_equal_gpus_keep_their_order() -> None:
    for count in (0, 1, 2, 8, 16):
        assert memory_of([H200] * count, machine(*[H200] * count)) == list(range(count))


MATCHES: list[tuple[list[Any], list[str], dict[str, str], list[int | None]]] = [
    # equal GPUs, some of them shown
    ([H200] * 2, [H200] * 8, {"CUDA_VISIBLE_DEVICES": "5,2"}, [5, 2]),
    ([H200] * 1, [H200] * 8, {"CUDA_VISIBLE_DEVICES": "7,99,0"}, [7]),
    ([H200] * 2, [H200] * 16, {"CUDA_VISIBLE_DEVICES": "GPU-0000000f,GPU-00000001"}, [15, 1]),
    # TensorFlow sees another number than the environment says: do not guess
    ([H200] * 3, [H200] * 8, {"CUDA_VISIBLE_DEVICES": "5,2"}, [None] * 3),
    ([H200] * 3, [H200] * 2, {}, [None] * 3),
    # without a driver
    ([H200] * 2, [], {}, [None] * 2),
    # mixed models: CUDA puts the fastest first, NVML counts by bus
    ([A100, T4], [T4, A100], {}, [1, 0]),
    ([A100, A100, T4], [A100, T4, A100], {}, [0, 2, 1]),
    ([T4, A100], [T4, A100], {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [0, 1]),
    ([A100], [T4, A100], {"CUDA_VISIBLE_DEVICES": "0"}, [1]),
    ([A100], [T4, A100], {"CUDA_VISIBLE_DEVICES": "GPU-00000001"}, [1]),
    (
        [T4, A100],
        [A100, A100, T4],
        {"CUDA_VISIBLE_DEVICES": "2,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        [2, 1],
    ),
    # one of two equal ones among others, by a number whose order is not known
    ([A100, T4], [A100, A100, T4], {"CUDA_VISIBLE_DEVICES": "1,2"}, [None, 2]),
    ([A100, A100, T4], [A100, A100, T4], {"CUDA_VISIBLE_DEVICES": "1,0,2"}, [None, None, 2]),
    # the environment changed after CUDA read it: the models do not fit
    (
        [A100],
        [T4, A100],
        {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        [None],
    ),
    # TensorFlow left out a display card that is too small
    (
        [A100, A100],
        ["NVIDIA T400", A100, A100],
        {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        [1, 2],
    ),
    # the same model under two spellings; a device that TensorFlow does not describe
    (["NVIDIA Tesla T4"], [T4], {}, [0]),
    ([None, None], [T4, T4], {}, [0, 1]),
    ([None, A100], [T4, A100], {}, [None, 1]),
]


def test_matching_tensorflow_with_the_driver() -> None:
    for models, here, environment, matched in MATCHES:
        found = memory_of(models, machine(*here), **environment)
        assert found == matched, (models, here, environment)


def test_mig() -> None:
    parts = tuple(
        NvmlGpu(f"MIG-{index}", f"{A100} MIG 1g.5gb", 5 * GIB + index, 4 * GIB) for index in (0, 1)
    )
    whole = dataclasses.replace(machine(A100)[0], mig_mode=True, instances=parts)
    plain = machine(A100, A100)[1]
    model = f"{A100} MIG 1g.5gb"
    assert match_gpus([model], [whole], {"CUDA_VISIBLE_DEVICES": "MIG-1"}) == (parts[1],)
    assert visible_gpus([whole], "MIG-1,MIG-0") == (parts[1],)  # CUDA takes one instance only
    # which instance CUDA takes by itself is not known
    assert match_gpus([model], [whole], {}) == (None,)
    assert match_gpus([A100], [whole, plain], {"CUDA_VISIBLE_DEVICES": "1"}) == (None,)
    assert match_gpus([A100], [whole, plain], {"CUDA_VISIBLE_DEVICES": plain.uuid}) == (plain,)


# --- the driver ------------------------------------------------------------------------------


class FakeNvml:
    """The functions of `pynvml` that are used, over a machine written down as dicts."""

    class NVMLError(Exception):
        """What pynvml raises."""

    def __init__(self, *gpus: dict[str, object], broken: str = "") -> None:
        self.gpus, self.broken, self.open = gpus, broken, 0

    def _get(self, handle: dict[str, object], key: str) -> object:
        if self.broken == key or key not in handle:
            raise self.NVMLError(key)
        return handle[key]

    def nvmlInit(self) -> None:
        if self.broken == "driver":
            raise self.NVMLError("Library Not Found")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        if self.broken == "handle" and index == 1:
            raise self.NVMLError("GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetName(self, handle: dict[str, object]) -> object:
        return self._get(handle, "name")

    def nvmlDeviceGetUUID(self, handle: dict[str, object]) -> object:
        return self._get(handle, "uuid")

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, object]) -> object:
        total, free = self._get(handle, "memory")  # type: ignore[misc]
        return SimpleNamespace(total=total, free=free)

    def nvmlDeviceGetMigMode(self, handle: dict[str, object]) -> tuple[int, int]:
        self._get(handle, "mig")
        return 1, 1

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: dict[str, object]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: dict[str, object], index: int) -> object:
        parts = self._get(handle, "mig")
        if index >= len(parts):  # type: ignore[arg-type]
            raise self.NVMLError("Not Found")
        return parts[index]  # type: ignore[index]


def test_the_driver_is_read_and_closed() -> None:
    nvml = FakeNvml(
        {"name": b"Tesla T4", "uuid": b"GPU-a", "memory": (16 * GIB, 15 * GIB)},
        {
            "name": A100,
            "uuid": "GPU-b",
            "memory": (40 * GIB, 39 * GIB),
            "mig": [{"name": "part", "uuid": "MIG-c", "memory": (5 * GIB, 4 * GIB)}],
        },
        {"name": "NVIDIA GB10", "uuid": "GPU-d"},  # shares the memory of the CPU
    )
    part = NvmlGpu("MIG-c", "part", 5 * GIB, 4 * GIB)
    assert read_gpus(nvml) == (
        NvmlGpu("GPU-a", "Tesla T4", 16 * GIB, 15 * GIB),
        NvmlGpu("GPU-b", A100, 40 * GIB, 39 * GIB, mig_mode=True, instances=(part,)),
        NvmlGpu("GPU-d", "NVIDIA GB10", None, None),
    )
    assert nvml.open == 0


def test_without_a_driver_or_package_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": T4, "uuid": "GPU-a", "memory": (1, 1)}
    assert read_gpus(FakeNvml(gpu, broken="driver")) == ()
    assert read_gpus(FakeNvml()) == ()
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)  # "import pynvml" fails
    assert read_gpus() == ()


def test_one_silent_gpu_makes_all_unknown_and_closes() -> None:
    gpu = {"name": T4, "uuid": "GPU-a", "memory": (1, 1)}
    nvml = FakeNvml(gpu, gpu, broken="handle")
    assert read_gpus(nvml) == ()
    assert nvml.open == 0


# --- putting it together ---------------------------------------------------------------------


def test_devices_of_machines_of_every_size() -> None:
    for count in (0, 1, 16):
        found = [("/physical_device:CPU:0", {})] + [
            (f"/physical_device:GPU:{index}", {"device_name": H200, "compute_capability": (9, 0)})
            for index in range(count)
        ]
        devices = describe_devices(found, machine(*[H200] * count), {})
        assert devices[0] == D.Device("CPU:0", "CPU", 0)
        assert devices[1:] == tuple(
            D.Device(f"GPU:{i}", "GPU", i, H200, (9, 0), 16 * GIB + i, 8 * GIB + i)
            for i in range(count)
        )
        assert describe_devices(found, (), {})[1:] == tuple(
            D.Device(f"GPU:{i}", "GPU", i, H200, (9, 0)) for i in range(count)
        )


def test_devices_of_a_mixed_machine() -> None:
    found = [
        ("/physical_device:CPU:0", {}),
        ("/physical_device:GPU:0", {"device_name": A100, "compute_capability": (8, 0)}),
        ("/physical_device:GPU:1", {"device_name": T4, "compute_capability": (7, 5)}),
    ]
    _, fast, slow = describe_devices(found, machine(T4, A100), {})
    assert (fast.description, fast.memory_total) == (A100, 16 * GIB + 1)
    assert (slow.compute_capability, slow.memory_free) == ((7, 5), 8 * GIB)


NUMBERS: list[tuple[list[tuple[str, int]], dict[str, str]]] = [
    ([], {}),
    ([("CPU:0", 1)], {"CPU:0": "CPU:0"}),
    ([("CPU:0", 3)], {"CPU:0": "CPU:0", "CPU:1": "CPU:0", "CPU:2": "CPU:0"}),
    # parts are numbered over all GPUs, and hidden ones leave no gap
    (
        [("CPU:0", 1), ("GPU:1", 1), ("GPU:2", 2), ("GPU:5", 1)],
        {"CPU:0": "CPU:0", "GPU:0": "GPU:1", "GPU:1": "GPU:2", "GPU:2": "GPU:2"}
        | {"GPU:3": "GPU:5"},
    ),
]


def test_numbering_of_logical_devices() -> None:
    for parts, names in NUMBERS:
        assert logical_names(parts) == names


# --- the real machine, after TensorFlow started ------------------------------------------------


def test_names_equal_tensorflows_own_once_it_has_started() -> None:
    real = tuple(parse_device_name(device.name) for device in tf.config.list_logical_devices())
    assert D.list_logical_devices() == real
    assert D.list_logical_devices("cpu") == tuple(n for n in real if n.startswith("CPU:"))
    assert set(D.logical_to_physical().values()) == {d.name for d in D.visible_devices()}


def test_a_split_cpu_is_one_physical_device() -> None:
    assert [device.name for device in D.list_devices("CPU")] == ["CPU:0"]
    assert D.list_devices("no such kind") == ()


def test_splitting_after_the_start_says_what_to_move() -> None:
    tf.constant(1.0)
    before = D.list_logical_devices("CPU")
    assert D.split_device("CPU:0", parts=len(before)) == before  # as it is: nothing to do
    with pytest.raises(DevicesInitializedError) as caught:
        D.split_device("CPU:0", parts=len(before) + 1)
    text = str(caught.value)
    assert f"split_device('CPU:0', parts={len(before) + 1}, memory=None) came after" in text
    assert "nothing was" in text
    assert "tf.distribute strategy, tf.config.list_logical_devices" in text
    assert "Move this line up, directly after the imports" in text
    assert D.list_logical_devices("CPU") == before


def test_parts_must_be_a_count() -> None:  # What else is none: tests/test_check_count.py.
    with pytest.raises(ValueError, match="parts must be a whole number, at least 1"):
        D.split_device("CPU:0", parts=0)


def test_memory_of_cpus_cannot_be_limited() -> None:
    with pytest.raises(TfMultiGpuError, match=r"memory of CPU parts\. Leave memory out"):
        D.split_device("CPU:0", parts=2, memory=GIB)
    with pytest.raises(TfMultiGpuError, match=r"GPUs only, not of CPU:0\. Leave CPU:0 out"):
        D.limit_memory({"CPU:0": GIB})


def test_a_device_that_is_not_there_is_named_with_those_that_are() -> None:
    for call in (
        lambda: D.split_device("GPU:97", parts=2, memory=GIB),
        lambda: D.limit_memory({"GPU:97": GIB}),
    ):
        with pytest.raises(DeviceNotFoundError, match=r"GPU:97 does not exist") as caught:
            call()
        assert "Asked for: GPU:97. Existing: CPU:0" in str(caught.value)
    with pytest.raises(DeviceNotFoundError, match="No such device here: GPU:97"):
        D.enable_memory_growth(["GPU:97"])
    with pytest.raises(DeviceNotFoundError, match="No such device here: GPU:97"):
        D.restrict_devices(["GPU:97"])


def test_limits_that_say_nothing_or_too_much() -> None:
    D.limit_memory({})
    with pytest.raises(ValueError, match="gives one device two limits"):
        D.limit_memory({"GPU:0": GIB, "/gpu:0": 2 * GIB})


def test_tensorflow_needs_a_cpu() -> None:
    with pytest.raises(TfMultiGpuError, match=r"cannot start without one\. Keep CPU:0"):
        D.restrict_devices([], kind="CPU")
    assert D.restrict_devices(["CPU:0"], kind="cpu") == D.visible_devices("CPU")
