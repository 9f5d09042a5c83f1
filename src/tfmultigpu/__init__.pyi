"""The public names of the package, which loads each when it is first used."""

from tfmultigpu import (
    accumulation as accumulation,
    data as data,
    devices as devices,
    errors as errors,
    steps as steps,
    strategies as strategies,
)
from tfmultigpu._version import __version__ as __version__
from tfmultigpu.accumulation import (
    GradientAccumulator as GradientAccumulator,
    LossScale as LossScale,
    LossSum as LossSum,
    apply_reduced_gradients as apply_reduced_gradients,
    clip_gradients as clip_gradients,
    global_mean as global_mean,
)
from tfmultigpu.accumulation.losses import loss_sum as loss_sum
from tfmultigpu.addons import (
    checkpoints as checkpoints,
    diagnostics as diagnostics,
    loops as loops,
    sharding as sharding,
    testing as testing,
    tuning as tuning,
    watching as watching,
    workers as workers,
)
from tfmultigpu.addons.checkpoints import Checkpoints as Checkpoints
from tfmultigpu.addons.diagnostics.machine_report import doctor as doctor
from tfmultigpu.addons.diagnostics.program_report import explain as explain
from tfmultigpu.addons.loops import (
    evaluate as evaluate,
    fit as fit,
    predict as predict,
    prepare as prepare,
)
from tfmultigpu.addons.sharding import sharded_variables as sharded_variables
from tfmultigpu.addons.tuning import (
    find_batch_size as find_batch_size,
    measured_capacities as measured_capacities,
    memory_capacities as memory_capacities,
    plan_memory as plan_memory,
)
from tfmultigpu.addons.watching import watch as watch
from tfmultigpu.data import distribute_dataset as distribute_dataset, plan_shares as plan_shares
from tfmultigpu.devices import (
    enable_memory_growth as enable_memory_growth,
    limit_memory as limit_memory,
    list_devices as list_devices,
    split_device as split_device,
)
from tfmultigpu.errors import (
    CheckpointError as CheckpointError,
    DeviceNotFoundError as DeviceNotFoundError,
    DevicesInitializedError as DevicesInitializedError,
    OutOfMemoryError as OutOfMemoryError,
    ReplicaDependenceWarning as ReplicaDependenceWarning,
    ScopeError as ScopeError,
    TfMultiGpuError as TfMultiGpuError,
    WorkerLostError as WorkerLostError,
)
from tfmultigpu.steps import (
    chain_steps as chain_steps,
    gather_rows as gather_rows,
    make_eval_step as make_eval_step,
    make_predict_step as make_predict_step,
    make_train_step as make_train_step,
    rows as rows,
    synchronize_batch_norm as synchronize_batch_norm,
)
from tfmultigpu.strategies import create_strategy as create_strategy, plan_strategy as plan_strategy
