"""What can go wrong, by name.

Every message says what happened, with the values received, why it matters, and the line to change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

__all__ = [
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
]


class TfMultiGpuError(Exception):
    """Base class of every error this library raises on purpose."""

    if not TYPE_CHECKING:
        # AutoGraph raises an error from inside a tf.function under its own type only with this one.
        __init__ = Exception.__init__


class DeviceNotFoundError(TfMultiGpuError, ValueError):
    """A device was asked for that this machine does not have."""


class DeviceSettingsError(TfMultiGpuError, ValueError):
    """Settings of the devices contradict each other, or TensorFlow cannot make one of them."""


class DevicesInitializedError(TfMultiGpuError, RuntimeError):
    """A device setting came after TensorFlow had started its devices."""


class StrategyUnavailableError(TfMultiGpuError, RuntimeError):
    """The strategy asked for cannot be had here, and falling back was not allowed."""


class StrategyFallbackWarning(UserWarning):
    """What was asked for cannot be had here, and the next best was taken."""


class ClusterError(TfMultiGpuError, ValueError):
    """The description of the cluster is wrong, or the cluster is not as described."""


class WorkerLostError(TfMultiGpuError, RuntimeError):
    """Another worker ended during training, and this process cannot go on without it."""


class WorkersDifferError(TfMultiGpuError, ValueError):
    """The workers do not call the same thing with the same arguments, or no longer train alike."""


class CompileError(TfMultiGpuError, ValueError):
    """A model was not compiled, or steps of its own stand in place of what it was compiled with."""


class CheckpointError(TfMultiGpuError, RuntimeError):
    """A checkpoint cannot be written or read, or does not fit what it is to be restored into."""


class RestoreMismatchError(CheckpointError):
    """What was restored is not what was saved: on another worker, or in the data."""


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint is damaged and was passed over."""


class ShareError(TfMultiGpuError, ValueError):
    """The shares of a global batch cannot be given out as asked."""


class DataError(TfMultiGpuError, ValueError):
    """The data cannot be distributed as it is."""


class UnknownLengthError(DataError, TypeError):
    """The number of batches of a dataset is not known; a TypeError because ``list`` expects it."""


class LossError(TfMultiGpuError, ValueError):
    """The loss cannot be written as a sum over examples and a weight."""


class MetricError(TfMultiGpuError, ValueError):
    """A metric cannot be computed exactly over several replicas."""


class ReplicaDependenceWarning(UserWarning):
    """A result will depend on the number of replicas, and there is a way to make it not."""


class UnverifiedWarning(UserWarning):
    """A step could not be held to what one device computes; training goes on."""


class ScopeError(TfMultiGpuError, ValueError):
    """A model, an optimizer or a metric was created outside the scope of the strategy."""


class KerasBackendError(TfMultiGpuError, RuntimeError):
    """Keras runs on another backend than TensorFlow."""


class MissingExtraError(TfMultiGpuError, ImportError):
    """An optional package is needed; the message names the extra that installs it."""


class OutOfMemoryError(
    TfMultiGpuError,
    tf.errors.ResourceExhaustedError,  # type: ignore[misc]  # Its type is Any.
):
    """A device has not enough memory; TensorFlow's error for that, with what to do."""

    def __init__(self, message: str) -> None:
        """Takes the whole message; TensorFlow's own error has three arguments."""
        tf.errors.ResourceExhaustedError.__init__(self, None, None, message)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Lets it be sent to another process."""
        return type(self), (self.message,)
