"""Reasons why TensorFlow sees no GPU, or fewer than a program asks for."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu.devices.names import listed, parse_device_name

_UNSET = "Unset CUDA_VISIBLE_DEVICES before Python starts."
_INSTALL = (
    "If there should be a GPU, nvidia-smi must list it, and TensorFlow needs its libraries: "
    "pip install 'tensorflow[and-cuda]'. python -m tfmultigpu doctor looks further."
)


class MissingGpus(NamedTuple):
    """The likeliest reason why there are no more GPUs: a clause, and sentences on what to do."""

    reason: str
    cure: str

    def __str__(self) -> str:
        """Returns both as sentences."""
        return f"No more GPUs: {self.reason}. {self.cure}"


def why_no_more_gpus() -> MissingGpus | None:
    """Returns why TensorFlow uses no more GPUs; `None` if it uses all. Starts no device."""
    config: Any = tf.config
    test: Any = tf.test
    physical = config.list_physical_devices("GPU")
    hidden = [gpu for gpu in physical if gpu not in config.get_visible_devices("GPU")]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    variable = f"CUDA_VISIBLE_DEVICES={shown!r}"
    if hidden:
        names = listed([parse_device_name(gpu.name) for gpu in hidden])
        return MissingGpus(
            f"the program hides {names} from TensorFlow",
            "Remove the call of tf.config.set_visible_devices.",
        )
    if not physical and not test.is_built_with_gpu_support():
        too, unset = ("", "") if shown is None else (f", and {variable} is set", f"{_UNSET} ")
        return MissingGpus(f"this TensorFlow is built without GPU support{too}", unset + _INSTALL)
    if shown is None:
        return None if physical else MissingGpus("TensorFlow finds none", _INSTALL)
    if shown.strip() in ("", "-1", "NoDevFiles"):
        return MissingGpus(f"{variable} hides every GPU", _UNSET)
    return MissingGpus(
        f"{variable} shows only the GPUs that it names, up to the first that does not exist",
        "Before Python starts, unset it or name GPUs that nvidia-smi -L lists."
        + ("" if physical else f" {_INSTALL}"),
    )
