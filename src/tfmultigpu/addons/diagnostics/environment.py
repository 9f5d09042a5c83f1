"""Environment variables for a report, without addresses, paths and unexpected values.

Users paste the report into public issues.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["describe_variables", "redact", "redact_devices"]

_LISTS = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_PATHS = ("CUDA_HOME", "KERAS_HOME", "LD_LIBRARY_PATH")
_ADDRESSES = ("COLAB_TPU_ADDR", "TPU_NAME")
_HOSTS = (
    "TF_CONFIG",
    "SLURMD_NODENAME",
    "SLURM_JOB_NODELIST",
    "SLURM_NODELIST",
    "SLURM_STEP_NODELIST",
    "SLURM_SUBMIT_HOST",
)
_OF_CLUSTERS = ("TF_CONFIG", "SLURM_NTASKS", "SLURM_PROCID")
_HOST_PORT = re.compile(
    r"(?<![\w.-])(?![CGT]PU:)(?:[\w-]+(?:\.[\w-]+)*|\[[0-9a-fA-F:.]+\]):\d{2,5}\b"
)
_FLAGS = ("TF_XLA_FLAGS", "XLA_FLAGS")
_WORDS = (
    "CUDA_DEVICE_ORDER",
    "KERAS_BACKEND",
    "TF_CPP_MIN_LOG_LEVEL",
    "TF_DETERMINISTIC_OPS",
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "TF_GPU_ALLOCATOR",
    "TF_GPU_THREAD_COUNT",
    "TF_GPU_THREAD_MODE",
    "TF_NUM_INTEROP_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_USE_LEGACY_KERAS",
)
_WORD = re.compile(r"[A-Za-z_]{0,24}[0-9]{0,6}")
_ENTRY = re.compile(r"-?[0-9]{0,4}|all|none|void|NoDevFiles|(?:GPU|MIG)-[0-9a-fA-F-]{1,40}")
_FLAG = re.compile(r"--[A-Za-z0-9_]{1,60}")
_NOT_SHOWN = "set (not shown)"
_HIDDEN = "<not shown>"


def _relevant(environ: Mapping[str, str]) -> dict[str, str]:
    named = {*_LISTS, *_PATHS, *_ADDRESSES, *_FLAGS, *_WORDS, *_OF_CLUSTERS}
    return {
        name: value
        for name, value in sorted(environ.items())
        if name in named or name.startswith("NCCL_")
    }


def describe_variables(environ: Mapping[str, str], *, addresses: bool = False) -> dict[str, str]:
    """Returns a description of each relevant variable, safe to publish.

    Args:
        environ: The environment.
        addresses: Show addresses.

    Example:
        >>> describe_variables({"CUDA_VISIBLE_DEVICES": "0", "HOME": "/home/ada"})
        {'CUDA_VISIBLE_DEVICES': "'0'"}
    """
    shown = {}
    for name, value in _relevant(environ).items():
        if name == "TF_CONFIG":
            text = repr(value) if addresses else _describe_tf_config(value)
        elif name in _ADDRESSES:
            text = repr(value) if addresses else _NOT_SHOWN
        elif name in _LISTS:
            text = redact_devices(value)
        elif name in _PATHS:
            text = f"set, {len([part for part in value.split(':') if part])} path(s)"
        elif name in _FLAGS:
            text = " ".join(_FLAG.findall(value)) or _NOT_SHOWN
        else:
            text = repr(value) if _WORD.fullmatch(value) else _NOT_SHOWN
        shown[name] = text
    return shown


def redact_devices(value: str) -> str:
    """Shortens the UUIDs in a list of devices; hides a list with unexpected entries."""
    entries = [entry.strip() for entry in value.split(",")]
    if not all(_ENTRY.fullmatch(entry) for entry in entries):
        return _NOT_SHOWN
    short = [f"{entry[:8]}..." if len(entry) > 10 else entry for entry in entries]
    return repr(",".join(short))


def redact(text: str, environ: Mapping[str, str]) -> str:
    """Hides every address in a text, and every value that describes a cluster or a TPU.

    Args:
        text: The text.
        environ: The environment; an empty one leaves the text unchanged.
    """
    if not environ:
        return text
    secrets: set[str] = set()
    for name in (*_ADDRESSES, *_HOSTS):
        value = environ.get(name)
        if not value:
            continue
        found = {value}
        if name == "TF_CONFIG":
            found |= set(_strings(_parsed(value)))
            # Addresses in a text that is not JSON.
            found |= set(re.findall(r"[\w.\[\]-]+:\d+", value))
        secrets |= found | {one.rsplit(":", 1)[0] for one in found if ":" in one}
    secrets |= {repr(one)[1:-1] for one in secrets}
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) > 2 and secret not in _VOCABULARY:
            text = re.sub(rf"(?<![\w.-]){re.escape(secret)}(?![\w-])", _HIDDEN, text)
    return _HOST_PORT.sub(_HIDDEN, text)


_VOCABULARY = {"chief", "cluster", "evaluator", "grpc", "index", "local", "master", "task", "type"}
_VOCABULARY |= {"worker", "environment", "cloud", "rpc_layer", "sparseCluster"}


def _describe_tf_config(text: str) -> str:
    """Returns the number of addresses of each job, and the task."""
    config = _parsed(text)
    if not isinstance(config, dict):
        return "set, not a JSON object (not shown)"
    cluster, task = config.get("cluster"), config.get("task")
    jobs = []
    if isinstance(cluster, dict):
        for job, listed in cluster.items():
            count = len(listed) if isinstance(listed, (list, dict)) else "?"
            jobs.append(f"{job if job in _VOCABULARY | {'ps'} else 'another job'}: {count}")
    which = "none"
    if isinstance(task, dict):
        kind, index = task.get("type"), task.get("index")
        kind = kind if isinstance(kind, str) and kind in _VOCABULARY | {"ps"} else "?"
        which = f"{kind} {index if isinstance(index, int) else '?'}"
    return f"set; addresses {', '.join(jobs) or 'none'}; task {which} (addresses not shown)"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _strings(key)
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
    elif isinstance(value, str):
        yield value
