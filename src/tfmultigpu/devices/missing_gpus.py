"""Reasons why TensorFlow sees no GPU, or fewer than a program asks for."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from tfmultigpu.devices.names import listed, parse_device_name

_INSTALL = (
    "if there should be a GPU, nvidia-smi must list it, and TensorFlow needs its libraries: "
    "pip install 'tensorflow[and-cuda]'"
)
_NAME = "unset it before Python starts, or name GPUs that nvidia-smi -L lists"


def why_no_more_gpus() -> str | None:
    """Returns why TensorFlow uses no more GPUs, and what to do; `None` if it uses all."""
    untyped: Any = tf
    config, test = untyped.config, untyped.test
    physical = config.list_physical_devices("GPU")
    visible = config.get_visible_devices("GPU")
    hidden = [parse_device_name(gpu.name) for gpu in physical if gpu not in visible]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    variable = f"CUDA_VISIBLE_DEVICES={shown!r}"
    if hidden:
        return f"tf.config.set_visible_devices hides {listed(hidden)}; remove that call"
    if not physical and not test.is_built_with_gpu_support():
        too = ""
        if shown is not None:
            too = f", and {variable} is set ({_NAME})"
        return f"this TensorFlow is built without GPU support{too}; {_INSTALL}"
    if shown is None and physical:
        return None
    if shown is None:
        return f"TensorFlow finds none; {_INSTALL}"
    if shown.strip() in ("", "-1", "NoDevFiles"):
        return f"{variable} hides every GPU; {_NAME}"
    only = f"{variable} shows only GPUs that it names, up to the first that is missing; {_NAME}"
    if physical:
        return only
    return f"{only}; {_INSTALL}"
