"""Each cause of "one GPU only" that a machine can have, provoked, and the report's first lines."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from diagnosed import clean, provoke

from tfmultigpu.__main__ import main
from tfmultigpu.addons.diagnostics import Finding, Report
from tfmultigpu.addons.diagnostics.driver import ask_driver
from tfmultigpu.addons.diagnostics.environment import describe_variables, redact
from tfmultigpu.addons.diagnostics.machine_checks import CHECKS
from tfmultigpu.addons.diagnostics.report import SEVERITIES

ROOT = "from pathlib import Path\nimport functools\nfrom tfmultigpu.addons.diagnostics import machine\n"
PAGE = Path(__file__).parents[2] / "docs" / "diagnostics.md"
CLUSTER = {"cluster": {"worker": ["ada.corp.example:2222", "10.1.2.3:2222"]}}
WORKER = json.dumps({**CLUSTER, "task": {"type": "worker", "index": 0}})
ALONE = json.dumps({"cluster": {"worker": ["a.example:1"]}, "task": {"type": "worker", "index": 0}})
BAD = json.dumps({**CLUSTER, "task": {"type": "worker", "index": 5}})


def case(code: str, says: str, change: str, severity: str, setup: str = "", **environment: str):
    """A cause: how it is provoked, and what the report must say of it."""
    return code, says, change, severity, {"code": setup, "environment": environment}


def files(**lines: str) -> str:
    """Plants files of the machine under a root of its own."""
    script = ROOT + "import tempfile\nroot = Path(tempfile.mkdtemp())\n"
    for path, text in lines.items():
        script += f"f = root / {path.replace('__', '/')!r}\n"
        script += f"f.parent.mkdir(parents=True, exist_ok=True); f.write_text({text!r})\n"
    return script + "machine.ask_driver = functools.partial(machine.ask_driver, root)\n"


CARD = {"sys__bus__pci__devices__a__vendor": "0x10de\n", "sys__bus__pci__devices__a__class": "0x03"}
CASES = {
    "nothing": case(
        "no-gpu", "No GPU is here", "Run it on a machine with GPUs", "note", "driver(0, broken='x')"
    ),
    "hidden": case(
        "gpus-hidden",
        "CUDA_VISIBLE_DEVICES='-1' hides every GPU from TensorFlow: it sees none of the 4 GPU(s)",
        "unset CUDA_VISIBLE_DEVICES",
        "error",
        "driver(4)",
        CUDA_VISIBLE_DEVICES="-1",
    ),
    "one-shown": case(
        "gpus-hidden",
        "CUDA_VISIBLE_DEVICES='2' shows TensorFlow 1 of the 4 GPU(s)",
        "CUDA_VISIBLE_DEVICES=0,1,2,3",
        "error",
        "driver(4); tensorflow_sees(1)",
        CUDA_VISIBLE_DEVICES="2",
    ),
    "cut": case(
        "gpu-list-cut",
        "CUDA_VISIBLE_DEVICES='0,7,1' names 3 GPUs, and CUDA shows 1 of the 2 GPU(s)",
        "CUDA_VISIBLE_DEVICES=0,1",
        "error",
        "driver(2); tensorflow_sees(1)",
        CUDA_VISIBLE_DEVICES="0,7,1",
    ),
    "twice": case(
        "gpu-twice",
        "CUDA_VISIBLE_DEVICES='0,0,1' names a GPU twice, and CUDA then shows none",
        "CUDA_VISIBLE_DEVICES=0,1",
        "error",
        "driver(2)",
        CUDA_VISIBLE_DEVICES="0,0,1",
    ),
    "too-late": case(
        "variable-too-late",
        "CUDA_VISIBLE_DEVICES='0,1' shows 2 GPU(s), but TensorFlow sees 4",
        "before import tensorflow",
        "warning",
        "driver(4); tensorflow_sees(4)",
        CUDA_VISIBLE_DEVICES="0,1",
    ),
    "mig": case(
        "mig",
        "divided into 2 MIG instances; CUDA shows one instance to a process",
        "nvidia-smi -mig 0",
        "warning",
        "driver(1, parts=[{'uuid': 'MIG-a'}, {'uuid': 'MIG-b'}]); tensorflow_sees(1)",
    ),
    "libraries": case(
        "no-cuda-libraries",
        "The driver shows 2 GPU(s), TensorFlow sees none. CUDA libraries not found: cublas",
        "pip install 'tensorflow[and-cuda]'",
        "error",
        "driver(2)\n"
        "from tfmultigpu.addons.diagnostics import machine\n"
        "machine.find_libraries = lambda environ: {'cublas': None, 'cudart': '12.5'}",
    ),
    "no-driver": case(
        "no-driver",
        "1 NVIDIA card(s) are in this machine, but there is no NVIDIA driver",
        "Install the driver and restart",
        "error",
        files(**CARD),
    ),
    "container": case(
        "no-device-files",
        "The driver 550.54.15 is here, but this process sees no GPU",
        "docker run --gpus all",
        "error",
        files(
            proc__driver__nvidia__version="NVRM version: NVIDIA UNIX Kernel Module  550.54.15  Tue",
            dev__nvidiactl="",
        ),
    ),
    "cpu-build": case(
        "cpu-build",
        "is built without GPU support; NVIDIA GPUs in this machine: 2",
        "pip uninstall tensorflow-cpu",
        "error",
        "driver(2); tf.test.is_built_with_gpu_support = lambda: False",
    ),
    "old-driver": case(
        "old-driver",
        "The driver 570.86.10 runs CUDA 11.4 at most",
        "Install a driver for CUDA 12",
        "error",
        "driver(2, cuda=11040)\n"
        "tf.sysconfig.get_build_info = lambda: {'cuda_version': '12.5.1', 'cudnn_version': '9'}",
    ),
    "ignored": case(
        "gpus-ignored",
        "The driver shows 3 GPUs, TensorFlow takes 2 of them",
        "TF_MIN_GPU_MULTIPROCESSOR_COUNT=4",
        "warning",
        "driver(3); tensorflow_sees(2)",
    ),
    "one-left": case(
        "gpus-hidden-by-program",
        "1 of 3 GPUs are used: the program hid GPU:1, GPU:2",
        "Remove the call of tf.config.set_visible_devices",
        "error",
        "driver(3); tensorflow_sees(3)\n"
        "gpus = tf.config.list_physical_devices('GPU')\n"
        "tf.config.set_visible_devices(gpus[:1], 'GPU')",
    ),
    "by-tensorflow": case(
        "gpus-hidden-by-program",
        "2 of 3 GPUs are used: the program hid GPU:0",
        "Remove the call",
        "warning",
        "driver(3); tensorflow_sees(3)\n"
        "gpus = tf.config.list_physical_devices('GPU')\n"
        "tf.config.set_visible_devices(gpus[1:], 'GPU')",
    ),
    "cluster": case(
        "cluster",
        "create_strategy() would raise ClusterError: TF_CONFIG: task.index is out of range",
        "unset TF_CONFIG",
        "error",
        TF_CONFIG=BAD,
    ),
    "no-json": case(
        "cluster", "TF_CONFIG: is not JSON", "unset TF_CONFIG", "error", TF_CONFIG="ada.corp:2222"
    ),
    "cluster-of-one": case(
        "cluster-of-one",
        "TF_CONFIG describes a cluster of one worker",
        "List every worker in TF_CONFIG",
        "warning",
        TF_CONFIG=ALONE,
    ),
    "started": case(
        "started-before-cluster",
        "TensorFlow has started its devices and can no longer join it",
        "Move tmg.create_strategy() up",
        "error",
        "tf.constant(1.0)",
        TF_CONFIG=WORKER,
    ),
    "tpu": case(
        "tpu-missing",
        "TPU_NAME is set, but no TPU answers: TPU_NAME='<not shown>': nothing listens there",
        "unset TPU_NAME",
        "warning",
        TPU_NAME="grpc://localhost:1",
    ),
    "growth-differs": case(
        "growth-differs",
        "Memory growth is on for some GPUs and off for GPU:1",
        "tmg.enable_memory_growth()",
        "error",
        "driver(2); tensorflow_sees(2)\n"
        "gpus = tf.config.list_physical_devices('GPU')\n"
        "tf.config.experimental.set_memory_growth(gpus[0], True)",
    ),
    "gpu-taken": case(
        "gpu-taken",
        "GPU:1 (NVIDIA H200) has 3.0 GiB of 80.0 GiB free: another program uses it",
        "without 'GPU:1'",
        "warning",
        "driver(2, free=3 * GIB); tensorflow_sees(2)",
    ),
    "distribution": case(
        "keras-distribution",
        "keras.distribution is set to DataParallel, which does nothing on the TensorFlow backend",
        "strategy = tmg.create_strategy()",
        "error",
        "virtual_cpus(2)\n"
        "keras.distribution.set_distribution(keras.distribution.DataParallel("
        "devices=['cpu:0', 'cpu:1'], auto_shard_dataset=False))",
    ),
    "slurm": case(
        "not-started-by-scheduler",
        "The Slurm job has 4 tasks, but srun did not start this process, so it trains alone",
        "srun python train.py",
        "warning",
        SLURM_NTASKS="4",
    ),
    "fine": case(
        "ask-explain",
        "This machine can use its 4 GPUs",
        "tmg.explain(model, optimizer, dataset, strategy)",
        "note",
        "driver(4); tensorflow_sees(4)",
    ),
    "one": case(
        "one-gpu",
        "GPU:0 is the only GPU here",
        "Nothing to change",
        "note",
        "driver(1); tensorflow_sees(1)",
    ),
}
SECRETS = {
    "code": "driver(1); tensorflow_sees(1)",
    "environment": {
        "TF_CONFIG": WORKER,
        "COLAB_TPU_ADDR": "tpu.corp.example:1",
        "LD_LIBRARY_PATH": "/home/ada/cuda:/opt/x",
        "NCCL_COMM_ID": "10.1.2.3:1",
        "NCCL_TOPO_FILE": "/home/ada/topology.xml",
        "XLA_FLAGS": "--xla_dump_to=/home/ada/dump",
        "CUDA_VISIBLE_DEVICES": "GPU-0123456789abcdef",
        "AWS_SECRET_ACCESS_KEY": "verysecret",
    },
}
HIDDEN = ("ada", "corp", "10.1.2.3", "verysecret", "topology", "0123456789abcdef")


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    cases = {name: settings for name, (*_, settings) in CASES.items()}
    shown = {**SECRETS, "options": {"show_addresses": True}}
    return provoke({**cases, "secrets": SECRETS, "secrets-shown": shown})


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_cause_is_named_in_the_first_three_lines(reports: Any, name: str) -> None:
    code, says, change, severity, _ = CASES[name]
    report = reports[name]
    (finding,) = [one for one in report["findings"] if one["code"] == code]
    assert finding["severity"] == severity
    assert says in finding["what"]
    assert change in finding["change"]
    assert finding["why"]
    assert finding["why"].rstrip(".") in report["text"]
    first = "\n".join(report["text"].splitlines()[:3])
    assert code in first
    if finding == report["findings"][0]:
        assert says in first
    assert not report["started_by_it"]


def test_each_check_finds_one_cause_that_is_documented() -> None:
    page, wrong = PAGE.read_text(), []
    for check in CHECKS:
        source = inspect.getsource(check)
        codes = set(re.findall(r'^ +"([a-z-]+)",$', source, re.MULTILINE)) - set(SEVERITIES)
        if len(codes) != 1 or any(f"`{code}`" not in page for code in codes):
            wrong.append((check.__name__, codes))
    assert wrong == []


@pytest.mark.slow
def test_what_is_no_cause_is_not_said(reports: Any) -> None:
    found = {name: [one["code"] for one in reports[name]["findings"]] for name in CASES}
    assert found["fine"] == ["ask-explain"]
    assert found["one"] == ["one-gpu"]
    assert found["nothing"] == ["no-gpu"]
    assert found["hidden"] == ["gpus-hidden"]
    assert found["one-shown"] == ["gpus-hidden"]
    assert found["cpu-build"] == ["cpu-build"]
    assert found["container"] == ["no-device-files"]
    assert found["no-driver"] == ["no-driver"]
    assert reports["fine"]["title"] == "tfmultigpu doctor: 4 of 4 GPU(s) in use by TensorFlow"


@pytest.mark.slow
def test_the_facts_are_those_a_helper_asks_for(reports: Any) -> None:
    facts = reports["fine"]["facts"]
    assert facts["versions"]["NVIDIA driver"] == "570.86.10 (by nvml, CUDA up to 12.8)"
    assert {"tensorflow", "keras", "keras backend", "CUDA found", "cuDNN found"} <= set(
        facts["versions"]
    )
    assert facts["devices"]["TensorFlow"] == "4 GPU(s), uses 4"
    assert facts["devices"]["GPU:3"] == (
        "NVIDIA H200, compute capability 9.0, 80.0 GiB of which 79.0 free, memory growth off, "
        "runs as GPU:3"
    )
    assert facts["strategy"]["would be"] == "mirrored, 4 replica(s)"
    assert {"not tpu", "not multi_worker", "not one_device"} <= set(facts["strategy"])
    values = reports["fine"]["values"]
    assert (values["gpus_seen"], values["gpus_used"], len(values["driver"]["gpus"])) == (4, 4, 4)
    gpu = next(one for one in values["devices"] if one["name"] == "GPU:3")
    assert (gpu["memory_total"], gpu["memory_free"]) == (80 * 1024**3, 79 * 1024**3)
    assert gpu["compute_capability"] == [9, 0]
    assert gpu["memory_growth"] is False
    assert values["strategy"]["num_replicas"] == 4
    variables = reports["secrets"]["facts"]["environment"]
    assert variables["TF_CONFIG"] == (
        "set; addresses worker: 2; task worker 0 (addresses not shown)"
    )


@pytest.mark.slow
def test_nothing_secret_is_printed(reports: Any) -> None:
    whole = json.dumps(reports["secrets"])
    assert [word for word in HIDDEN if word in whole] == []
    assert "xla_dump_to" in whole
    for name in ("cluster", "no-json", "tpu", "started"):
        whole = json.dumps(reports[name])
        assert [word for word in ("ada", "corp", "10.1.2.3", "2222") if word in whole] == [], name
    assert "ada.corp.example:2222" in reports["secrets-shown"]["text"]


@pytest.mark.slow
def test_the_command_prints_it_and_its_status_says_whether_there_is_an_error(
    tmp_path: Path,
) -> None:
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')

    def run(*arguments: str, **environment: str) -> Any:
        command = [sys.executable, "-m", "tfmultigpu", "doctor", *arguments]
        env = clean() | {"TF_CPP_MIN_LOG_LEVEL": "3"} | environment
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=600, check=False
        )

    wrong = run(KERAS_BACKEND="jax", TF_USE_LEGACY_KERAS="1")
    assert wrong.returncode == 1
    assert wrong.stderr.count("Traceback") == 0
    first = wrong.stdout.splitlines()
    assert "(keras-backend, legacy-keras)" in first[0]
    assert (
        "Keras runs on the 'jax' backend (chosen by KERAS_BACKEND), not on TensorFlow" in first[1]
    )
    assert first[3].endswith('os.environ["KERAS_BACKEND"] = "tensorflow"')
    assert "TF_USE_LEGACY_KERAS is set, so tf.keras is Keras 2" in wrong.stdout

    fine = run("--json", KERAS_BACKEND="tensorflow")
    found = json.loads(fine.stdout)
    assert fine.returncode == 0
    assert found["facts"]["versions"]["keras backend"].startswith("tensorflow")
    values = found["values"]
    assert values["findings"]["error"] == 0
    assert values["keras_backend"] == "tensorflow"
    assert values["devices_started"] is False
    assert values["gpus_used"] == len([one for one in values["devices"] if one["kind"] == "GPU"])
    cpu = next(one for one in values["devices"] if one["name"] == "CPU:0")
    assert (cpu["visible"], cpu["logical"], cpu["memory_growth"]) == (True, ["CPU:0"], None)
    assert values["strategy"]["num_replicas"] >= 1

    by_file = run("--json", KERAS_HOME=str(tmp_path))
    assert by_file.returncode == 1
    (what,) = [
        f["what"] for f in json.loads(by_file.stdout)["findings"] if f["severity"] == "error"
    ]
    assert "'torch' backend" in what
    assert str(tmp_path) not in by_file.stdout


def test_the_driver_is_asked_by_its_program_where_the_package_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU-a, Tesla T4, 15360, 15000, 535.1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = ask_driver(tmp_path)
    assert (found.version, found.source, found.has_package) == ("535.1", "nvidia-smi", False)
    assert [(gpu.name, gpu.memory_total) for gpu in found.gpus] == [("Tesla T4", 15360 * 1024**2)]
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    failed = ask_driver(tmp_path)
    assert (failed.version, failed.gpus) == (None, ())
    assert failed.problem == "nvidia-smi: NVIDIA-SMI has failed"


def test_tensorflow_that_cannot_be_imported_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tfmultigpu.addons.diagnostics", None)
    text = "^TensorFlow cannot be imported: ModuleNotFoundError: .* check the variable KERAS_BACKE"
    with pytest.raises(SystemExit, match=text):
        main(["doctor"])


def test_addresses_are_taken_out_of_any_text() -> None:
    environment = {"TF_CONFIG": WORKER, "TPU_NAME": "my-own-tpu"}
    text = "worker 0 of 2 at ada.corp.example:2222, host ada.corp.example, TPU_NAME='my-own-tpu'"
    assert redact(text, environment) == (
        "worker 0 of 2 at <not shown>, host <not shown>, TPU_NAME='<not shown>'"
    )
    assert redact(text, {}) == text
    slurm = {"SLURM_STEP_NODELIST": "ada[01-02]"}
    said = "worker 0 of 2 at ada01:12345 (Slurm) of ada[01-02], on CPU:0, GPU:10"
    assert redact(said, slurm) == (
        "worker 0 of 2 at <not shown> (Slurm) of <not shown>, on CPU:0, GPU:10"
    )


def test_unexpected_values_of_variables_are_not_shown() -> None:
    shown = describe_variables(
        {
            "CUDA_VISIBLE_DEVICES": "hello there",
            "TF_CONFIG": "[1]",
            "NCCL_DEBUG": "INFO",
            "KERAS_BACKEND": "/home/ada",
            "OTHER": "x",
        }
    )
    assert shown == {
        "CUDA_VISIBLE_DEVICES": "set (not shown)",
        "KERAS_BACKEND": "set (not shown)",
        "NCCL_DEBUG": "'INFO'",
        "TF_CONFIG": "set, not a JSON object (not shown)",
    }


def test_a_report_without_findings_says_so() -> None:
    report = Report("someone", (), {"facts": {"a": "1", "long": "2"}})
    assert str(report) == "someone: nothing wrong was found\n\nfacts\n  a     1\n  long  2"
    finding = Finding("error", "code", "what.", "why.", "line")
    assert str(Report("x", (finding, finding), {})).splitlines() == [
        "x: 2 errors (code)",
        *["error [code] what.", "    why: why.", "    change: line"] * 2,
    ]
