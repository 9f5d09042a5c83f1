"""Tools to test programs that train on several replicas."""

from tfmultigpu.testing.comparison import Difference, InvarianceReport, ReplicaInvarianceError
from tfmultigpu.testing.invariance import assert_replica_invariant
from tfmultigpu.testing.reference import Training
from tfmultigpu.testing.virtual_devices import virtual_devices
from tfmultigpu.testing.workers import WorkerFailedError, WorkerResult, run_workers

__all__ = [
    "Difference",
    "InvarianceReport",
    "ReplicaInvarianceError",
    "Training",
    "WorkerFailedError",
    "WorkerResult",
    "assert_replica_invariant",
    "run_workers",
    "virtual_devices",
]
