"""Each cause of "one GPU only" that a machine can have: named first, with the line to change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tfmultigpu.__main__ import main
from tfmultigpu.addons.diagnostics import Finding, Report, doctor
from tfmultigpu.addons.diagnostics.machine import Driver, Machine, ask_driver, inspect_machine
from tfmultigpu.addons.diagnostics.machine_report import report_on
from tfmultigpu.addons.diagnostics.report import describe_variables, redact
from tfmultigpu.devices import Device
from tfmultigpu.errors import ClusterError
from tfmultigpu.strategies.plan import MachineInfo, choose

GIB = 1024**3
DOCS = Path(__file__).parents[2] / "docs"
PAGES = DOCS / "troubleshooting.md", DOCS / "contributing" / "messages.md"
WORKERS = ["ada.corp.example:2222", "10.1.2.3:2222"]
CONFIG = json.dumps({"cluster": {"worker": WORKERS}, "task": {"type": "worker", "index": 0}})


def driver(gpus: int, version: str = "570.86.10", **facts: Any) -> Driver:
    return Driver(("NVIDIA H200",) * gpus, version, facts.pop("cuda", (12, 8)), **facts)


def gpu(index: int, capability: tuple[int, int] = (9, 0), free: int = 79) -> Device:
    return Device(f"GPU:{index}", "GPU", index, "NVIDIA H200", capability, 80 * GIB, free * GIB)


def sees(count: int, used: int | None = None, **facts: Any) -> dict[str, Any]:
    devices = tuple(gpu(index, **facts) for index in range(count))
    names = [device.name for device in devices[: count if used is None else used]]
    return {"devices": devices, "growth": dict.fromkeys(names, False)}


def shows(value: str) -> dict[str, Any]:
    return {"environment": {"CUDA_VISIBLE_DEVICES": value}}


FINE = {"driver": driver(4), **sees(4), "kernels": ("sm_80", "compute_90")}
PLAN = choose(MachineInfo({"CPU:0": "CPU:0"}))
CASES: dict[str, tuple[Machine, str, str, str, str]] = {
    "no GPU": (Machine(), "note", "no-gpu", "have no GPU", "split_device"),
    "one GPU": (
        Machine(driver=driver(1), **sees(1)),
        *("note", "one-gpu", "have one GPU", "tmg.split_device('CPU:0', parts=4)"),
    ),
    "all in order": (
        Machine(**FINE),
        *("note", "ask-explain", "can use its 4 GPUs", "print(tmg.explain(model, optimizer"),
    ),
    "all hidden": (
        Machine(driver=driver(4), **shows("-1")),
        *("error", "gpus-hidden", "CUDA_VISIBLE_DEVICES='-1' shows TensorFlow 0 of 4 GPU(s)"),
        "unset CUDA_VISIBLE_DEVICES, before Python starts, or CUDA_VISIBLE_DEVICES=0,1,2,3",
    ),
    "one shown": (
        Machine(driver=driver(4), **sees(1), **shows("2")),
        *("error", "gpus-hidden", "'2' shows TensorFlow 1 of 4 GPU(s)", "=0,1,2,3"),
    ),
    "cut off": (
        Machine(driver=driver(2), **sees(1), **shows("0,7,1")),
        *("error", "gpus-hidden", "'0,7,1' shows TensorFlow 1 of 2 GPU(s)", "=0,1"),
    ),
    "named twice": (
        Machine(driver=driver(2), **shows("0,0,1")),
        *("error", "gpus-hidden", "'0,0,1' shows TensorFlow 0 of 2 GPU(s)", "=0,1"),
    ),
    "instances of MIG": (
        Machine(driver=driver(2), **sees(1), **shows("MIG-a,MIG-b")),
        *("error", "gpus-hidden", "shows TensorFlow 1 of 2 GPU(s)", "=0,1"),
    ),
    "set too late": (
        Machine(driver=driver(4), **sees(4), **shows("0,1")),
        *("warning", "gpus-hidden", "'0,1' came too late: TensorFlow had listed 4 GPUs"),
        "before import tensorflow",
    ),
    "libraries": (
        Machine(driver=driver(2)),
        *("error", "no-libraries", "shows 2 GPU(s), and TensorFlow sees none: it does not find"),
        "pip install --upgrade 'tensorflow[and-cuda]'",
    ),
    "built without GPUs": (
        Machine(driver=driver(2), cuda=None),
        *("error", "no-libraries", "built without GPU support", "uninstall tensorflow-cpu"),
    ),
    "old driver": (
        Machine(driver=driver(2, cuda=(11, 4))),
        *("error", "no-libraries", "built for CUDA 12, and the driver runs CUDA 11"),
        "Install a driver for CUDA 12",
    ),
    "GPU newer than TensorFlow": (
        Machine(driver=driver(1), kernels=("sm_80", "compute_90"), **sees(1, capability=(12, 0))),
        *("error", "no-kernels", "GPU:0 (NVIDIA H200) has compute capability 12.0, and this"),
        "pip install --upgrade",
    ),
    "no driver": (
        Machine(driver=Driver(problem="nvidia-smi: FileNotFoundError", cards=1)),
        *("error", "no-driver", "1 NVIDIA card(s) are here, and no driver answers (nvidia-smi: Fi"),
        "docker run --gpus all",
    ),
    "hidden by the program": (
        Machine(driver=driver(3), **sees(3, used=1)),
        *("error", "gpus-hidden-by-program", "1 of 3 GPUs are used: the program hides GPU:1, GPU"),
        "Remove tf.config.set_visible_devices",
    ),
    "used by another program": (
        Machine(driver=driver(1), **sees(1, free=3)),
        *("warning", "gpu-taken", "Of GPU:0 (NVIDIA H200) 3.0 GiB are free", "nvidia-smi"),
    ),
    "left out by TensorFlow": (
        Machine(driver=driver(3), **sees(2)),
        *("warning", "gpus-hidden-by-program", "The driver shows 3 GPUs (NVIDIA H200, NVIDIA"),
        "TF_MIN_GPU_MULTIPROCESSOR_COUNT=4",
    ),
    "instances of MIG, all of them named": (
        Machine(driver=driver(1, instances=2), **sees(1), **shows("MIG-a,MIG-b")),
        *("warning", "mig-instances", "has 2 instances of MIG, and a process sees one of them"),
        "launch --workers 2",
    ),
    "instances of MIG on two GPUs": (
        Machine(driver=driver(2, instances=4), **sees(1)),
        *("warning", "mig-instances", "has 4 instances of MIG", "launch --workers 4"),
    ),
    "little shared memory": (
        Machine(**FINE, shared_memory=64 * 1024**2),
        *("warning", "small-shared-memory", "/dev/shm has 64 MiB, for 4 GPUs", "--shm-size=1g"),
    ),
    "several GPUs under WSL2": (
        Machine(**FINE, wsl=True),
        *("warning", "wsl2", "4 GPUs are used under WSL2", "NCCL_P2P_DISABLE=1"),
    ),
    "another backend": (
        Machine(**{**FINE, "backend": "jax"}),
        *("error", "keras-backend", "Keras runs on the backend 'jax', not on TensorFlow"),
        'os.environ["KERAS_BACKEND"] = "tensorflow"',
    ),
    "keras.distribution": (
        Machine(**FINE, distribution="DataParallel"),
        *("error", "keras-backend", "keras.distribution is set to DataParallel"),
        "strategy = tmg.create_strategy()",
    ),
    "Keras 2": (
        Machine(**FINE, environment={"TF_USE_LEGACY_KERAS": "1"}),
        *("warning", "keras-legacy", "tf.keras is tf_keras, which is Keras 2", "import keras"),
    ),
    "a broken cluster": (
        Machine(
            environment={"TF_CONFIG": CONFIG},
            plan=ClusterError(f"{WORKERS[0]} is taken. Received: {WORKERS[1]}"),
        ),
        *("error", "cluster", "would raise ClusterError: <not shown> is taken.", "unset TF_CONFIG"),
    ),
    "no srun": (
        Machine(environment={"SLURM_NTASKS": "4"}, plan=PLAN),
        *("warning", "cluster", "SLURM_NTASKS is set and not used: no cluster is described"),
        "unset SLURM_NTASKS",
    ),
    "no TPU": (
        Machine(environment={"TPU_NAME": "my-own-tpu"}, plan=PLAN),
        *("warning", "cluster", "TPU_NAME is set and not used: ", "unset TPU_NAME"),
    ),
}


# Fails if a cause is missed or another one is told, if it is not in the first lines, if its line to
# write is missing, or if the page does not have it.
@pytest.mark.parametrize("name", CASES)
def test_each_cause_is_named_in_the_first_three_lines(name: str) -> None:
    machine, severity, code, says, change = CASES[name]
    report = report_on(machine)
    (finding,) = report.findings
    assert (finding.severity, finding.code) == (severity, code), str(report)
    assert says in finding.what
    assert change in finding.change
    assert code in str(report).splitlines()[0]
    assert says in str(report).splitlines()[1]
    assert any(f"`{code}`" in page.read_text() for page in PAGES)


# Fails if what only NCCL needs is asked of a machine with one GPU, or what is set is set again.
def test_what_one_gpu_does_not_need_is_not_asked() -> None:
    one = {"driver": driver(1), **sees(1)}
    assert report_on(Machine(**one, shared_memory=1, wsl=True)).codes == ("one-gpu",)
    told = Machine(**FINE, wsl=True, environment={"NCCL_P2P_DISABLE": "1"})
    assert report_on(told).codes == ("ask-explain",)
    assert report_on(Machine(**FINE, shared_memory=GIB)).codes == ("ask-explain",)


def test_the_facts_are_those_a_helper_asks_for() -> None:
    facts = report_on(Machine(**FINE, plan=PLAN)).facts
    assert facts["devices"]["GPU:3"] == (
        "NVIDIA H200, compute capability 9.0, 79.0 of 80.0 GiB free, memory growth off"
    )
    assert facts["versions"]["NVIDIA driver"] == "570.86.10, for CUDA up to 12.8"
    assert facts["versions"]["tensorflow built with"] == "CUDA 12.5, for sm_80, compute_90"
    assert facts["create_strategy()"]["1."] == "one_device: 1 replica on CPU:0"
    here = inspect_machine()
    assert {"tfmultigpu", "tensorflow", "keras", "numpy", "python"} <= set(here.versions)
    assert here.kernels
    assert here.shared_memory is None or here.shared_memory > 0
    assert "CPU:0" in doctor().facts["devices"]


def test_nothing_secret_is_printed() -> None:
    environment = {
        "TF_CONFIG": CONFIG,
        "TPU_NAME": "my-own-tpu",
        "LD_LIBRARY_PATH": "/home/ada/cuda:/opt/x",
        "NCCL_COMM_ID": "10.1.2.3:1",
        "XLA_FLAGS": "--xla_dump_to=/home/ada/dump",
        "CUDA_VISIBLE_DEVICES": "GPU-0123456789abcdef",
        "AWS_SECRET_ACCESS_KEY": "verysecret",
        "NCCL_DEBUG": "INFO",
    }
    problem = f"no /home/ada/x, my-own-tpu, {WORKERS[0]}, ada.corp.example:1, host ada.corp.example"
    machine = Machine(
        driver=Driver(problem=problem), environment=environment, plan=ClusterError(problem)
    )
    text = str(report_on(machine))
    hidden = ("ada", "corp", "10.1.2.3", "verysecret", "my-own", "0123456789abcdef", "2222")
    assert [word for word in hidden if word in text] == []
    assert "'INFO'" in text
    assert "TF_CONFIG" in text
    shown = describe_variables(environment | {"CUDA_VISIBLE_DEVICES": "hello there"})
    assert shown["CUDA_VISIBLE_DEVICES"] == "set (not shown)"
    assert "AWS_SECRET_ACCESS_KEY" not in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("worker 0 at ada01:12345 (Slurm) of ada[01-02]", "worker 0 at <not shown> (Slurm) of <no"),
        ("on CPU:0, GPU:10, /job:worker/task:0", "on CPU:0, GPU:10, /job:worker/task:0"),
        ("TF_CONFIG: task.index is 5", "TF_CONFIG: task.index is 5"),
        ("'dense/kernel' of [::1]:8080", "'dense/kernel' of <not shown>"),
    ],
)
def test_addresses_are_taken_out_of_any_text(text: str, shown: str) -> None:
    environment = {"SLURM_STEP_NODELIST": "ada[01-02]", "TF_CONFIG": CONFIG}
    assert redact(text, environment).startswith(shown)


def plant(folder: Path, answer: str) -> None:
    """Plants a program nvidia-smi, and a card on the bus."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
    (folder / "nvidia-smi").chmod(0o755)
    for name, vendor, kind in [("gpu", "0x10de", "0x030200"), ("audio", "0x10de", "0x040300")]:
        device = folder / "sys" / "bus" / "pci" / "devices" / name
        device.mkdir(parents=True, exist_ok=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")


def test_the_driver_is_asked_by_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    xml = (
        "<driver_version>535.1</driver_version><cuda_version>12.2</cuda_version>"
        "<gpu><product_name>Tesla T4</product_name></gpu><gpu><product_name>A2</product_name></gpu>"
    )
    plant(tmp_path, f"echo '{xml}'")
    assert ask_driver(tmp_path) == Driver(("Tesla T4", "A2"), "535.1", (12, 2), cards=1)
    part = "<mig_device><index>0</index></mig_device>"
    plant(tmp_path, f"echo '{xml}<mig_devices>{part}{part}</mig_devices>'")
    assert ask_driver(tmp_path).instances == 2
    plant(tmp_path, "echo 'NVIDIA-SMI has failed'; echo more; exit 9")
    failed = Driver(problem="nvidia-smi: NVIDIA-SMI has failed", cards=1)
    assert ask_driver(tmp_path) == failed
    (tmp_path / "nvidia-smi").unlink()
    assert ask_driver(tmp_path).problem == "nvidia-smi: FileNotFoundError"


@pytest.mark.slow
def test_the_command_prints_it_and_its_status_says_whether_there_is_an_error() -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TF_", "CUDA_", "SLURM_"))
    }
    code = (
        "import sys, tensorflow as tf\n"
        "from tfmultigpu.__main__ import main\n"
        "status = main(['doctor'])\n"
        "from tfmultigpu.devices.configure import devices_started\n"
        "sys.exit(status + 2 * devices_started())"
    )
    command = [sys.executable, "-c", code]

    def run(backend: str) -> Any:
        changed = environment | {"KERAS_BACKEND": backend}
        return subprocess.run(
            command, env=changed, capture_output=True, text=True, timeout=600, check=False
        )

    wrong, fine = run("jax"), run("tensorflow")
    assert wrong.returncode == 1, wrong.stderr  # An error, and no device was started.
    assert wrong.stderr.count("Traceback") == 0
    assert "Keras runs on the backend 'jax', not on TensorFlow" in wrong.stdout.splitlines()[1]
    assert wrong.stdout.splitlines()[3].strip().startswith('change: os.environ["KERAS_BACKEND"]')
    assert fine.returncode == 0, fine.stdout
    assert fine.stdout.startswith("tfmultigpu doctor: ")


def test_tensorflow_that_cannot_be_imported_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tfmultigpu.addons.diagnostics", None)
    text = "^TensorFlow cannot be imported: ModuleNotFoundError: .* check the variable KERAS_BACKE"
    with pytest.raises(SystemExit, match=text):
        main(["doctor"])


def test_a_report_puts_the_most_serious_first_and_counts() -> None:
    note, error = (Finding(one, one[:4], "what.", "why.", "line") for one in ("note", "error"))
    report = Report("x", (note, error, error), {"facts": {"a": "1", "long": "2"}})
    assert repr(report).splitlines() == [
        "x: 2 errors, 1 note (erro)",
        *["error [erro] what.", "    why: why.", "    change: line"] * 2,
        *["note [note] what.", "    why: why.", "    change: line"],
        *["", "facts", "  a     1", "  long  2"],
    ]
