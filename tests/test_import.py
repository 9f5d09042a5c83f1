"""Importing the library costs next to nothing and starts nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import tensorflow as tf
before = set(sys.modules)
import tfmultigpu
with_it = sorted(set(sys.modules) - before)
# Loading every public name, wherever it lives, must not start anything either.
missing = [name for name in tfmultigpu.__all__ if not hasattr(tfmultigpu, name)]
# This fails once TensorFlow has started its devices.
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
print(json.dumps({
    "with it": with_it,
    "logical_cpus": len(tf.config.list_logical_devices("CPU")),
    "foreign": sorted({name.split(".")[0] for name in set(sys.modules) - before}
                      - set(sys.stdlib_module_names)),
    "missing": missing,
}))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, object]:
    """What a fresh process saw when it imported the library after TensorFlow."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_importing_loads_one_module_and_starts_nothing(imported: dict[str, object]) -> None:
    # Which is why importing takes milliseconds: 1.7 to 2.9 were measured on two cores. In
    # particular not Keras, which takes longer to import than all the rest of this library.
    assert imported == {
        "with it": ["tfmultigpu", "tfmultigpu._version"],
        "logical_cpus": 3,
        "foreign": ["tfmultigpu"],
        "missing": [],
    }


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
    assert sorted(typed) == sorted([*tfmultigpu.__all__, "__version__"])
    for name, module in typed.items():
        found = getattr(tfmultigpu, name)
        assert found is sys.modules.get(f"{module}.{name}", getattr(sys.modules[module], name))


def test_listing_the_names_shows_nothing_else() -> None:
    import tfmultigpu

    assert dir(tfmultigpu) == sorted([*tfmultigpu.__all__, "__version__"])


def test_an_unknown_name_is_an_attribute_error() -> None:
    import tfmultigpu

    with pytest.raises(AttributeError, match="module 'tfmultigpu' has no attribute 'fit_all'"):
        _ = tfmultigpu.fit_all
