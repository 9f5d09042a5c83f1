"""Names of devices, and requests against what exists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tfmultigpu.devices import Device
from tfmultigpu.devices.names import parse_device_name, resolve_devices
from tfmultigpu.errors import DeviceNotFoundError

SPELLINGS = {
    "GPU:0": "GPU:0",
    "gpu:0": "GPU:0",
    "/gpu:12": "GPU:12",
    " GPU:1 ": "GPU:1",
    "device:cpu:07": "CPU:7",
    "/device:GPU:3": "GPU:3",
    "/physical_device:GPU:0": "GPU:0",
    "/job:localhost/replica:0/task:0/device:GPU:5": "GPU:5",
    "/job:worker/replica:0/task:3/device:TPU:1": "TPU:1",
    "/device:XLA_GPU:0": "XLA_GPU:0",
}
NOT_NAMES = [
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
]


def gpus(count: int) -> tuple[str, ...]:
    return tuple(f"GPU:{index}" for index in range(count))


def test_every_spelling_becomes_the_short_one() -> None:
    assert {spelled: parse_device_name(spelled) for spelled in SPELLINGS} == SPELLINGS


def test_what_names_no_device_is_refused(subtests: pytest.Subtests) -> None:
    for name in NOT_NAMES:
        with subtests.test(name):
            with pytest.raises(ValueError, match=r"kind and an index, such as 'GPU:0'") as caught:
                parse_device_name(name)
            assert f"name={name!r}" in str(caught.value)
    with pytest.raises(TypeError, match=r'Write "GPU:3"\. Received: name=3'):
        parse_device_name(3)  # type: ignore[arg-type]


def test_what_exists_is_taken_in_the_order_asked_for() -> None:
    assert resolve_devices(None, gpus(2)) == gpus(2)
    assert resolve_devices(None, ()) == ()
    assert resolve_devices(2, gpus(3)) == resolve_devices(np.int64(2), gpus(3)) == gpus(2)
    assert resolve_devices(["/gpu:2", "GPU:0"], gpus(4)) == ("GPU:2", "GPU:0")
    assert resolve_devices("gpu:1", gpus(2)) == ("GPU:1",)
    assert resolve_devices({"GPU:1", "GPU:0"}, gpus(2)) == gpus(2)
    assert resolve_devices(["cpu:0"], ("/device:CPU:0",)) == ("CPU:0",)


WRONG: list[tuple[Any, type[Exception], str]] = [
    (0, ValueError, r"at least 1, or a list of names.*devices=0"),
    (True, TypeError, r"a whole number.*devices=True"),
    ([Device("CPU:3", "CPU", 3)], TypeError, r'Write "CPU:3"'),
    (["GPU:1", "/device:gpu:1"], ValueError, r"GPU:1 is named more than once.*=\['GPU:1'\]"),
]


@pytest.mark.parametrize(("asked", "error", "said"), WRONG, ids=str)
def test_requests_that_mean_nothing_are_refused(asked: Any, error: Any, said: Any) -> None:
    with pytest.raises(error, match=said):
        resolve_devices(asked, gpus(2))


MISSING: list[tuple[Any, tuple[str, ...], list[str]]] = [
    (
        ["GPU:0", "GPU:3"],
        ("CPU:0", "GPU:0", "GPU:1"),
        [
            "Asked for GPU:0, GPU:3, but this machine does not have GPU:3.",
            "Existing: CPU:0, GPU:0, GPU:1.",
            "Write ['CPU:0', 'GPU:0', 'GPU:1'], or some of these. No more GPUs: CURE.",
        ],
    ),
    (3, ("GPU:0", "GPU:1"), ["Asked for 3 devices, but only 2 exist. Existing: GPU:0", "CURE"]),
    # The count means GPUs: why there is none is told although CPUs are counted.
    (4, ("CPU:0",), ["Existing: CPU:0", "CURE", 'tmg.split_device("CPU:0", parts=4). Write [']),
    (["CPU:0", "CPU:2"], ("CPU:0",), ['tmg.split_device("CPU:0", parts=3)']),
    (["GPU:0"], (), ["Existing: none", "Leave devices out. No more GPUs: CURE."]),
    (1, (), ["only 0 exist", "Leave devices out. No more GPUs: CURE."]),
]


@pytest.mark.parametrize(("asked", "here", "said"), MISSING, ids=str)
def test_a_missing_device_is_named_with_what_exists_and_the_line(
    asked: Any, here: Any, said: Any
) -> None:
    with pytest.raises(DeviceNotFoundError) as caught:
        resolve_devices(asked, here, "CURE")
    assert [part for part in said if part not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("asked", "here", "no"),
    [
        (["GPU:1"], ["CPU:0"], "split_device"),
        (["CPU:2"], ["CPU:0", "CPU:1"], "split_device"),
        (["CPU:2"], ["CPU:0", "CPU:1"], "CURE"),
    ],
    ids=str,
)
def test_no_cure_that_does_not_help_is_told(asked: Any, here: Any, no: Any) -> None:
    # Splitting the CPU does not make a GPU, and no GPU is asked for in the second.
    with pytest.raises(DeviceNotFoundError) as caught:
        resolve_devices(asked, here, "CURE")
    assert no not in str(caught.value)
