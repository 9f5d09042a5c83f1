"""Every program of ``examples/``, run as a user runs it: in a process of its own, to its last line.

Each program asserts by itself that its promise held, with room for the rounding of GPUs. Here, on
CPUs, the difference it prints must be that of adding in another order.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))
DIFFERENCE = r"(\d\.\de[-+]\d\d)"
ROUNDING = 1e-6

# What each program prints last; the group is the largest difference to one device.
LAST_LINE = {
    "custom_loop": rf"2 replicas, largest weight difference to one device: {DIFFERENCE}",
    "distillation": rf"2 and 3 replicas, largest weight difference to one device: {DIFFERENCE}",
    "explicit_devices": rf"CPU:0, CPU:1, largest weight difference to one device: {DIFFERENCE}",
    "fine_tuning": rf"2 and 3 replicas, largest weight difference to one device: {DIFFERENCE}",
    "gan": rf"2 and 3 replicas, largest weight difference to one device: {DIFFERENCE}",
    "gradient_accumulation": rf"2 replicas, largest weight difference to one device: {DIFFERENCE}",
    "handwritten_loop": rf"2 replicas, largest weight difference to one device: {DIFFERENCE}",
    "inference": rf"3 replicas, largest difference to one device's predictions: {DIFFERENCE}",
    "input_pipeline": rf"4 replicas, largest weight difference to one device: {DIFFERENCE}",
    "layers_by_hand": rf"2 devices, largest weight difference to one device: {DIFFERENCE}",
    # Layers in float16 round to 1e-3 of their values: 7e-6 was seen.
    "loss_scale_by_hand": r"2 replicas, largest weight difference to one device: \d\.\de-0[6-9]",
    "lora": rf"2 replicas, largest weight difference to one device: {DIFFERENCE}",
    "memory_growth": r"memory growth on 0 GPUs, trained on CPU:0, CPU:1",
    "mirrored_fit": rf"  our loop, the last does not:  {DIFFERENCE}",
    "one_gpu_by_mistake": r"inside the scope: 2 copies, loss \d+\.\d+",
    "resource_conflict": "largest weight difference to one device with enough memory: "
    + DIFFERENCE,
    "several_workers": rf"2 workers, largest weight difference to one device: {DIFFERENCE}",
    "sharded_by_hand": "distribute_dataset, 197 rows, largest weight difference to one device: "
    + DIFFERENCE,
    "sharded_variables": rf"4 replicas, largest weight difference to one device: {DIFFERENCE}",
    "simclr": rf"2 and 3 replicas, largest weight difference to one device: {DIFFERENCE}",
    "tpu_with_fallback": r"trained on OneDeviceStrategy: loss \d+\.\d+ at first, \d+\.\d+ at last",
    "unequal_gpus": r"shares \(48, 16\), largest weight difference to one device: " + DIFFERENCE,
    "vae": rf"2 and 3 replicas, largest weight difference to one device: {DIFFERENCE}",
    "wgan_gp": rf"2 and 3 replicas, largest weight difference to one device: {DIFFERENCE}",
}

# What else must be in the output, where the last line does not say it all.
ALSO = {
    "distillation": ("hard 0.", "soft 0.", "val_soft 0."),
    "explicit_devices": ("but not here: GPU:0, GPU:99", "hierarchical_copy: largest"),
    "gradient_accumulation": ("3 updates of 4 batches of 32",),
    "gan": ("d_found 0.", "d_loss 1.", "g_loss 0."),
    "input_pipeline": ("each of 1003 examples once per epoch", "epoch 3: 1003 examples"),
    "layers_by_hand": ("kernels on CPU:0, CPU:0, CPU:1, CPU:1, CPU:1",),
    "loss_scale_by_hand": ("3 updates, each clipped to 0.5",),
    "memory_growth": ("came after TensorFlow had started its devices",),
    "one_gpu_by_mistake": ("1 copy of each weight", "model was created", "optimizer was created"),
    "resource_conflict": (
        "one device instead: Asked for GPU:98, GPU:99, but not here: GPU:98, GPU:99",
        "communication='nccl': NCCL runs on GPUs only",
        "micro_batches=1: Replica ",
        "fit with micro_batches=2",
    ),
    "several_workers": ("worker 0 of 2", "worker 1 of 2"),
    "sharded_by_hand": ("Replica 1 got no rows",),
    "tpu_with_fallback": ("nothing listens there", "warned: Requested but unavailable"),
    "unequal_gpus": ("rows on each: [48, 16]", "rows on each: [8, 3]"),
    "vae": ("kl 0.", "reconstruction 42.", "val_kl 0."),
    "wgan_gp": ("critic_distance 0.", "generator_loss -0."),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_example_keeps_its_promise(program: Path, tmp_path: Path) -> None:
    removed = ("TF_CONFIG", "TPU_NAME", "COLAB_TPU_ADDR")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    result = subprocess.run(
        [sys.executable, str(program)],
        env=environment | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    last = result.stdout.splitlines()[-1]
    found = re.fullmatch(LAST_LINE[program.stem], last)
    assert found is not None, last
    assert all(float(difference) <= ROUNDING for difference in found.groups()), last
    for text in ALSO.get(program.stem, ()):
        assert text in result.stdout + result.stderr
    assert list(tmp_path.iterdir()) == [], "an example must leave nothing behind"


def test_every_example_is_on_the_page_and_says_what_the_usual_answer_gets_wrong() -> None:
    assert sorted(LAST_LINE) == [program.stem for program in PROGRAMS]
    for program in PROGRAMS:
        source = program.read_text(encoding="utf-8")
        docstring = ast.get_docstring(ast.parse(source))
        assert docstring is not None, program.name
        assert "The usual" in docstring, program.name
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"`examples/(\w+)\.py`", page)) == [p.stem for p in PROGRAMS]
