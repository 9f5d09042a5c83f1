"""Tools to test programs that train on several replicas."""

from tfmultigpu.addons.testing.devices import virtual_devices
from tfmultigpu.addons.testing.differences import Difference, ReplicaInvarianceError
from tfmultigpu.addons.testing.invariance import assert_replica_invariant
from tfmultigpu.addons.testing.reference import Training
from tfmultigpu.addons.testing.workers import WorkerFailedError, WorkerResult, run_workers

__all__ = [
    "Difference",
    "ReplicaInvarianceError",
    "Training",
    "WorkerFailedError",
    "WorkerResult",
    "assert_replica_invariant",
    "run_workers",
    "virtual_devices",
]
