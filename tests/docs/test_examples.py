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
# The last line of each program ends with its largest difference to one device.
DIFFERENCE = re.compile(r"largest .*difference to one device: (\d\.\de[-+]\d\d)$")
# Layers in float16 round to 1e-3 of their values: 8e-6 was seen.
ROUNDING = {"by_hand": 2e-5}

# What else must be in the output.
ALSO = {
    "explicit_devices": ("does not have GPU:0, GPU:99", "hierarchical_copy: "),
    "gan": ("'c_loss': [", "'g_loss': ["),
    "input_pipeline": ("epoch 3: 1003 examples",),
    "memory_growth": ("came after TensorFlow had started its devices",),
    "mirrored_fit": ("no error, no warning",),
    "one_gpu_by_mistake": ("error [model-scope]", "refused: fit would run on one device"),
    "recommender": ("in the first ten of 256 0.",),
    "several_workers": ("2 workers",),
    "sharded_by_hand": ("Replica 1 got no rows",),
    "tpu_with_fallback": ("nothing answers there", "warned: Requested but unavailable"),
    "unequal_gpus": ("shares (48, 16), micro-batches 1:", "shares (32, 32), micro-batches 2:"),
    "vae": ("'kl': [0.",),
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
    found = DIFFERENCE.search(last)
    assert found is not None, last
    assert float(found[1]) <= ROUNDING.get(program.stem, 1e-6), last
    for text in ALSO.get(program.stem, ()):
        assert text in result.stdout + result.stderr
    assert list(tmp_path.iterdir()) == [], "an example must leave nothing behind"


def test_examples_are_short_on_the_page_and_say_what_the_usual_answer_gets_wrong(
    subtests: pytest.Subtests,
) -> None:
    assert len(PROGRAMS) <= 15
    for program in PROGRAMS:
        with subtests.test(program=program):
            source = program.read_text(encoding="utf-8")
            # Two towers with their data, a metric and a resume.
            most = 90 if program.stem == "recommender" else 60
            assert source.count("\n") < most, program.name
            assert "The usual" in (ast.get_docstring(ast.parse(source)) or ""), program.name
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"`examples/(\w+)\.py`", page)) == [p.stem for p in PROGRAMS]
