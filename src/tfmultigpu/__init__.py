"""Train a Keras model on several devices and get what one device would have given.

The public names are in ``__init__.pyi``, for type checkers and editors too; the packages hold the
rest, such as ``tfmultigpu.devices.logical_to_physical``. A name is loaded when it is first used, so
importing the package costs milliseconds. ``dir`` shows what most programs write; it leaves errors
to ``tfmultigpu.errors``, and the names of few programs to their packages.
"""

import ast as _ast
from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import Any

from tfmultigpu._version import __version__ as __version__

_MODULES = {
    alias.name: node.module
    for node in _ast.parse(_Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(node, _ast.ImportFrom) and node.module
    for alias in node.names
}
_UNLISTED_MODULES = {"tfmultigpu.errors", "tfmultigpu._version"}
# Few programs need them; their packages list them. All of three packages is here without them.
_UNLISTED = {"apply_reduced_gradients", "clip_gradients", "global_mean", "limit_memory"}
_UNLISTED |= {"find_batch_size", "measured_capacities", "memory_capacities", "plan_shares"}
_UNLISTED |= {"checkpoints", "loops", "watching"}
__all__ = sorted(
    name
    for name, module in _MODULES.items()
    if module not in _UNLISTED_MODULES and name not in _UNLISTED
)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _import_module(_MODULES[name])
    if name not in vars(module):  # A package, of this one or of its add-ons.
        _import_module(f"{module.__name__}.{name}")
    globals()[name] = vars(module)[name]
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
