"""Train a Keras model on several devices and get what one device would have given.

Names are loaded from their modules when they are first used, so that importing the package costs a
millisecond.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfmultigpu import testing
    from tfmultigpu.accumulation import GradientAccumulator
    from tfmultigpu.batch_norm import synchronize_batch_norm
    from tfmultigpu.batch_size import find_batch_size
    from tfmultigpu.capacities import measured_capacities, memory_capacities
    from tfmultigpu.checkpoints import Checkpoints
    from tfmultigpu.clusters import Cluster, cluster_from_environment
    from tfmultigpu.communication import (
        CommunicationTimes,
        communication_times,
        measure_communication,
    )
    from tfmultigpu.data import ShardedDataset, ShardIterator, distribute_dataset, row_weight
    from tfmultigpu.devices import (
        Device,
        enable_memory_growth,
        existing_logical_names,
        limit_memory,
        list_devices,
        logical_to_physical,
        restrict_devices,
        split_device,
        visible_devices,
    )
    from tfmultigpu.diagnostics import (
        Finding,
        Report,
        Scaling,
        ScalingPoint,
        StepProfile,
        doctor,
        explain,
        measure_scaling,
        profile_step,
    )
    from tfmultigpu.errors import (
        CheckpointError,
        ClusterError,
        CompileError,
        DamagedCheckpointWarning,
        DataError,
        DeviceNotFoundError,
        DeviceSettingsError,
        DevicesInitializedError,
        KerasBackendError,
        LossError,
        MetricError,
        MissingExtraError,
        OutOfMemoryError,
        ReplicaDependenceWarning,
        RestoreMismatchError,
        ScopeError,
        ShareError,
        StrategyFallbackWarning,
        StrategyUnavailableError,
        TfMultiGpuError,
        UnknownLengthError,
        UnverifiedWarning,
        WorkerLostError,
        WorkersDifferError,
    )
    from tfmultigpu.loops import evaluate, fit, predict
    from tfmultigpu.losses import LossSum, global_mean, loss_sum
    from tfmultigpu.lost_workers import explaining_lost_workers
    from tfmultigpu.row_gathering import gather_rows, row_positions
    from tfmultigpu.shares import plan_micro_batches, plan_shares
    from tfmultigpu.steps import make_eval_step, make_predict_step, make_train_step
    from tfmultigpu.strategies import StrategyPlan, create_strategy, plan_strategy
    from tfmultigpu.updates import apply_reduced_gradients
    from tfmultigpu.verification import Verification

__version__ = "0.1.0"

_NAMES = {
    "accumulation": ("GradientAccumulator",),
    "batch_norm": ("synchronize_batch_norm",),
    "batch_size": ("find_batch_size",),
    "capacities": (
        "measured_capacities",
        "memory_capacities",
    ),
    "checkpoints": ("Checkpoints",),
    "clusters": (
        "Cluster",
        "cluster_from_environment",
    ),
    "communication": (
        "CommunicationTimes",
        "communication_times",
        "measure_communication",
    ),
    "data": (
        "ShardedDataset",
        "ShardIterator",
        "distribute_dataset",
        "row_weight",
    ),
    "devices": (
        "Device",
        "enable_memory_growth",
        "existing_logical_names",
        "limit_memory",
        "list_devices",
        "logical_to_physical",
        "restrict_devices",
        "split_device",
        "visible_devices",
    ),
    "diagnostics": (
        "Finding",
        "Report",
        "Scaling",
        "ScalingPoint",
        "StepProfile",
        "doctor",
        "explain",
        "measure_scaling",
        "profile_step",
    ),
    "errors": (
        "CheckpointError",
        "ClusterError",
        "CompileError",
        "DamagedCheckpointWarning",
        "DataError",
        "DeviceNotFoundError",
        "DeviceSettingsError",
        "DevicesInitializedError",
        "KerasBackendError",
        "LossError",
        "MetricError",
        "MissingExtraError",
        "OutOfMemoryError",
        "ReplicaDependenceWarning",
        "RestoreMismatchError",
        "ScopeError",
        "ShareError",
        "StrategyFallbackWarning",
        "StrategyUnavailableError",
        "TfMultiGpuError",
        "UnknownLengthError",
        "UnverifiedWarning",
        "WorkerLostError",
        "WorkersDifferError",
    ),
    "loops": (
        "evaluate",
        "fit",
        "predict",
    ),
    "losses": (
        "LossSum",
        "global_mean",
        "loss_sum",
    ),
    "lost_workers": ("explaining_lost_workers",),
    "row_gathering": ("gather_rows", "row_positions"),
    "shares": ("plan_micro_batches", "plan_shares"),
    "steps": (
        "make_eval_step",
        "make_predict_step",
        "make_train_step",
    ),
    "strategies": (
        "StrategyPlan",
        "create_strategy",
        "plan_strategy",
    ),
    "updates": ("apply_reduced_gradients",),
    "verification": ("Verification",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = ("testing",)

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Cluster",
    "ClusterError",
    "CommunicationTimes",
    "CompileError",
    "DamagedCheckpointWarning",
    "DataError",
    "Device",
    "DeviceNotFoundError",
    "DeviceSettingsError",
    "DevicesInitializedError",
    "Finding",
    "GradientAccumulator",
    "KerasBackendError",
    "LossError",
    "LossSum",
    "MetricError",
    "MissingExtraError",
    "OutOfMemoryError",
    "ReplicaDependenceWarning",
    "Report",
    "RestoreMismatchError",
    "Scaling",
    "ScalingPoint",
    "ScopeError",
    "ShardIterator",
    "ShardedDataset",
    "ShareError",
    "StepProfile",
    "StrategyFallbackWarning",
    "StrategyPlan",
    "StrategyUnavailableError",
    "TfMultiGpuError",
    "UnknownLengthError",
    "UnverifiedWarning",
    "Verification",
    "WorkerLostError",
    "WorkersDifferError",
    "apply_reduced_gradients",
    "cluster_from_environment",
    "communication_times",
    "create_strategy",
    "distribute_dataset",
    "doctor",
    "enable_memory_growth",
    "evaluate",
    "existing_logical_names",
    "explain",
    "explaining_lost_workers",
    "find_batch_size",
    "fit",
    "gather_rows",
    "global_mean",
    "limit_memory",
    "list_devices",
    "logical_to_physical",
    "loss_sum",
    "make_eval_step",
    "make_predict_step",
    "make_train_step",
    "measure_communication",
    "measure_scaling",
    "measured_capacities",
    "memory_capacities",
    "plan_micro_batches",
    "plan_shares",
    "plan_strategy",
    "predict",
    "profile_step",
    "restrict_devices",
    "row_positions",
    "row_weight",
    "split_device",
    "synchronize_batch_norm",
    "testing",
    "visible_devices",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return _import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
