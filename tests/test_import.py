"""Importing the library costs next to nothing and starts nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys, time
import tensorflow as tf
# An installed package is compiled once, on its first import.
sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False
before = set(sys.modules)
start = time.perf_counter()
import tfmultigpu
milliseconds = 1000 * (time.perf_counter() - start)
# Loading every public name, wherever it lives, must not start anything either.
missing = [name for name in tfmultigpu.__all__ if not hasattr(tfmultigpu, name)]
# This fails once TensorFlow has started its devices.
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
print(json.dumps({
    "milliseconds": milliseconds,
    "logical_cpus": len(tf.config.list_logical_devices("CPU")),
    "foreign": sorted({name.split(".")[0] for name in set(sys.modules) - before}
                      - set(sys.stdlib_module_names)),
    "missing": missing,
}))
"""


@pytest.fixture(scope="module")
def imports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """What four fresh processes saw when they imported the library after TensorFlow."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    compiled = tmp_path_factory.mktemp("compiled")
    seen = []
    for _ in range(4):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(compiled)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        seen.append(json.loads(done.stdout.splitlines()[-1]))
    return seen


def test_takes_less_than_20_milliseconds_after_tensorflow(imports: list[dict[str, object]]) -> None:
    # The least of four: a busy machine makes an import slower, never faster.
    fastest = min(float(str(seen["milliseconds"])) for seen in imports)
    assert fastest < 20, f"import tfmultigpu took {fastest:.1f} ms at best"


def test_starts_no_device(imports: list[dict[str, object]]) -> None:
    assert [seen["logical_cpus"] for seen in imports] == [3, 3, 3, 3]


def test_imports_nothing_but_itself(imports: list[dict[str, object]]) -> None:
    # In particular not Keras, which takes longer to import than all the rest of this library.
    assert imports[0]["foreign"] == ["tfmultigpu"]


def test_exports_what_it_names(imports: list[dict[str, object]]) -> None:
    assert imports[0]["missing"] == []


def test_every_public_name_is_loaded_from_the_module_that_types_say() -> None:
    import ast
    from pathlib import Path

    import tfmultigpu

    typed = {
        alias.name: node.module
        for node in ast.walk(ast.parse(Path(tfmultigpu.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tfmultigpu")
        for alias in node.names
    }
    assert sorted(typed) == sorted(tfmultigpu.__all__)
    for name, module in typed.items():
        assert getattr(tfmultigpu, name) is getattr(sys.modules[module], name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    import tfmultigpu

    with pytest.raises(AttributeError, match="module 'tfmultigpu' has no attribute 'fit_all'"):
        _ = tfmultigpu.fit_all
