"""Environment variables and messages for a report that users paste into public issues."""

from __future__ import annotations

import re
from collections.abc import Mapping

# These describe a cluster or a TPU: it is only said that they are set.
_SECRET = ("COLAB_TPU_ADDR", "SLURM_STEP_NODELIST", "TF_CONFIG", "TPU_NAME")
_RELEVANT = re.compile(r"(CUDA|KERAS|NCCL|NVIDIA_VISIBLE|TF|XLA)_\w+|LD_LIBRARY_PATH|SLURM_NTASKS")
_PLAIN = re.compile(r"[A-Za-z_]{0,24}[0-9]{0,6}|-?[0-9]{1,3}(, ?-?[0-9]{1,3})*")

_HOST_PORT = r"(?<![\w.-])(?![CGT]PU:)(?:[\w-]+(?:\.[\w-]+)*|\[[0-9a-fA-F:.]+\]):\d{2,5}\b"
_PATH = r"(?<![\w.:/])(?:/[\w.@+-]+){2,}"
# An element of a list in JSON that may be cut off: an address in TF_CONFIG.
_LISTED = re.compile(r'[\[,]\s*"([^"]+)"(?=\s*[,\]])')


def shown_value(value: str) -> str:
    """Returns a value in quotes if it is a word or a list of numbers; hides any other."""
    return repr(value) if _PLAIN.fullmatch(value) else "set (not shown)"


def describe_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that matter, safe to publish."""
    return {
        name: shown_value("/" if name in _SECRET else value)
        for name, value in sorted(environ.items())
        if name in _SECRET or _RELEVANT.fullmatch(name)
    }


def redact(text: str, environ: Mapping[str, str]) -> str:
    """Hides addresses, paths, and what describes a cluster or a TPU, in a message."""
    values = [environ[name] for name in _SECRET if environ.get(name)]
    secrets = {*values, *[listed for value in values for listed in _LISTED.findall(value)]}
    secrets |= {secret.rpartition(":")[0] for secret in secrets if ":" in secret}
    for secret in sorted(secrets, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(secret)}(?![\w-])", "<not shown>", text)
    return re.sub(f"{_HOST_PORT}|{_PATH}", "<not shown>", text)
