"""Train a Keras model on several devices and get what one device would have given.

The names that most programs need are here; the packages hold the rest, such as
``tfmultigpu.devices.restrict_devices``. Names are loaded when they are first used, so that
importing the package costs a millisecond.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from tfmultigpu._version import __version__ as __version__

if TYPE_CHECKING:
    from tfmultigpu import (
        checkpoints as checkpoints,
        clusters as clusters,
        data as data,
        devices as devices,
        diagnostics as diagnostics,
        errors as errors,
        loops as loops,
        losses as losses,
        optimizers as optimizers,
        steps as steps,
        strategies as strategies,
        testing as testing,
        tuning as tuning,
    )
    from tfmultigpu.checkpoints import Checkpoints as Checkpoints
    from tfmultigpu.data import (
        distribute_dataset as distribute_dataset,
        plan_shares as plan_shares,
    )
    from tfmultigpu.devices import (
        Device as Device,
        enable_memory_growth as enable_memory_growth,
        limit_memory as limit_memory,
        list_devices as list_devices,
        split_device as split_device,
    )
    from tfmultigpu.diagnostics import Report as Report
    from tfmultigpu.diagnostics.doctor import doctor as doctor
    from tfmultigpu.diagnostics.explain import explain as explain
    from tfmultigpu.errors import (
        CheckpointError as CheckpointError,
        ClusterError as ClusterError,
        DataError as DataError,
        DeviceNotFoundError as DeviceNotFoundError,
        DevicesInitializedError as DevicesInitializedError,
        LossError as LossError,
        OutOfMemoryError as OutOfMemoryError,
        ReplicaDependenceWarning as ReplicaDependenceWarning,
        ScopeError as ScopeError,
        StrategyFallbackWarning as StrategyFallbackWarning,
        StrategyUnavailableError as StrategyUnavailableError,
        TfMultiGpuError as TfMultiGpuError,
        WorkerLostError as WorkerLostError,
    )
    from tfmultigpu.loops.evaluate import evaluate as evaluate
    from tfmultigpu.loops.fit import fit as fit
    from tfmultigpu.loops.fit_here import fit_here as fit_here
    from tfmultigpu.loops.predict import predict as predict
    from tfmultigpu.losses import LossSum as LossSum, global_mean as global_mean
    from tfmultigpu.losses.loss_sum import loss_sum as loss_sum
    from tfmultigpu.optimizers import (
        GradientAccumulator as GradientAccumulator,
        LossScale as LossScale,
        apply_reduced_gradients as apply_reduced_gradients,
        clip_gradients as clip_gradients,
    )
    from tfmultigpu.steps import (
        chain_steps as chain_steps,
        gather_rows as gather_rows,
        make_eval_step as make_eval_step,
        make_predict_step as make_predict_step,
        make_train_step as make_train_step,
        synchronize_batch_norm as synchronize_batch_norm,
    )
    from tfmultigpu.strategies import (
        StrategyPlan as StrategyPlan,
        create_strategy as create_strategy,
        plan_strategy as plan_strategy,
        sharded_variables as sharded_variables,
    )
    from tfmultigpu.tuning import (
        find_batch_size as find_batch_size,
        measured_capacities as measured_capacities,
        memory_capacities as memory_capacities,
        plan_memory as plan_memory,
    )

_NAMES = {
    "checkpoints": ("Checkpoints",),
    "data": (
        "distribute_dataset",
        "plan_shares",
    ),
    "devices": (
        "Device",
        "enable_memory_growth",
        "limit_memory",
        "list_devices",
        "split_device",
    ),
    "diagnostics": (
        "Report",
        "doctor",
        "explain",
    ),
    "errors": (
        "CheckpointError",
        "ClusterError",
        "DataError",
        "DeviceNotFoundError",
        "DevicesInitializedError",
        "LossError",
        "OutOfMemoryError",
        "ReplicaDependenceWarning",
        "ScopeError",
        "StrategyFallbackWarning",
        "StrategyUnavailableError",
        "TfMultiGpuError",
        "WorkerLostError",
    ),
    "loops": (
        "evaluate",
        "fit",
        "fit_here",
        "predict",
    ),
    "losses": (
        "LossSum",
        "global_mean",
        "loss_sum",
    ),
    "optimizers": (
        "GradientAccumulator",
        "LossScale",
        "apply_reduced_gradients",
        "clip_gradients",
    ),
    "steps": (
        "chain_steps",
        "gather_rows",
        "make_eval_step",
        "make_predict_step",
        "make_train_step",
        "synchronize_batch_norm",
    ),
    "strategies": (
        "StrategyPlan",
        "create_strategy",
        "plan_strategy",
        "sharded_variables",
    ),
    "tuning": (
        "find_batch_size",
        "measured_capacities",
        "memory_capacities",
        "plan_memory",
    ),
}
_PACKAGES = (
    "checkpoints",
    "clusters",
    "data",
    "devices",
    "diagnostics",
    "errors",
    "loops",
    "losses",
    "optimizers",
    "steps",
    "strategies",
    "testing",
    "tuning",
)
_HOME = {name: package for package, names in _NAMES.items() for name in names}

__all__ = sorted([*_PACKAGES, *_HOME])


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return _import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
