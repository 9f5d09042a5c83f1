"""What a watch reads of the driver, from a library in C with the functions of NVML."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tfmultigpu.addons.watching.gpus import in_words, read_activity

# In the types of nvml.h. Of the third GPU the driver says nothing.
SOURCE = """
typedef struct { unsigned int gpu, memory; } rates_t;
typedef struct { unsigned long long total, free, used; } memory_t;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int i, void **device) {
    *device = (void *)(0x100000000ul + i); return 0;
}
static unsigned long of(void *device) { return (unsigned long)device - 0x100000000ul; }
int nvmlDeviceGetUtilizationRates(void *device, rates_t *rates) {
    rates->gpu = of(device) ? 0 : 100; rates->memory = 1; return of(device) == 2 ? 3 : 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    memory->total = 1ull << 37; memory->free = 1; memory->used = 5ull << 32;
    return of(device) == 2 ? 3 : 0;
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned int length) {
    text[0] = 'A' + of(device); text[1] = 0; return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no compiler of C")
    folder: Path = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(SOURCE)
    built = str(folder / "libnvidia-ml.so.1")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", built, folder / "nvml.c"], check=True)
    return built


def test_the_activity_of_each_gpu_is_read(library: str) -> None:
    memory = {"memory_used": 5 << 32, "memory_total": 1 << 37}
    nothing = dict.fromkeys(("busy", "memory_traffic", "memory_used", "memory_total"))
    gpus = [
        {"index": 0, "uuid": "A", "busy": 100, "memory_traffic": 1, **memory},
        {"index": 1, "uuid": "B", "busy": 0, "memory_traffic": 1, **memory},
        {"index": 2, "uuid": "C", **nothing},
    ]
    assert read_activity(library, {}) == gpus
    assert read_activity(library, {"CUDA_VISIBLE_DEVICES": "1, C"}) == gpus[1:]
    assert in_words(gpus[:1]).endswith("busy without memory traffic is a collective that waits "
                                       "for another GPU")  # fmt: skip
    assert in_words(gpus[1:]).endswith("they are idle and wait for input or for the host")
    assert in_words(gpus).endswith("they compute")
    assert in_words(gpus[2:]) == ""


def test_without_a_driver_nothing_is_read(tmp_path: Path) -> None:
    assert read_activity(str(tmp_path / "none.so"), {}) == []
