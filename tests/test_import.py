"""Importing the library costs next to nothing and starts nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import tfmultigpu

SCRIPT = """
import json, sys
import tfmultigpu
without = "tensorflow" in sys.modules
import tensorflow as tf
with_it = sorted(name for name in sys.modules if name.startswith("tfmultigpu"))
# Loading every public name, wherever it lives, must not start anything either.
missing = [name for name in tfmultigpu.__all__ if not hasattr(tfmultigpu, name)]
# This fails once TensorFlow has started its devices.
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
print(json.dumps([without, with_it, missing, len(tf.config.list_logical_devices("CPU"))]))
"""


def test_importing_loads_one_module_and_starts_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen == [False, ["tfmultigpu", "tfmultigpu._version"], [], 3]


def test_listing_the_names_shows_the_public_ones() -> None:
    assert dir(tfmultigpu) == sorted([*tfmultigpu.__all__, "__version__"])
    assert {"fit", "devices", "errors"} <= set(tfmultigpu.__all__)
    # What few programs need can be written here, and is listed in its package alone.
    assert tfmultigpu.ScopeError is tfmultigpu.errors.ScopeError
    assert tfmultigpu.find_batch_size is tfmultigpu.tuning.find_batch_size
    assert tfmultigpu.global_mean is tfmultigpu.accumulation.global_mean
    assert not {"ScopeError", "find_batch_size", "global_mean"} & set(tfmultigpu.__all__)
    assert "plan_memory" in tfmultigpu.__all__
    assert len(dir(tfmultigpu)) <= 39


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tfmultigpu' has no attribute 'fit_all'"):
        _ = tfmultigpu.fit_all
