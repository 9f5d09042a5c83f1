"""Errors and warnings of the library, by name.

Every message says what happened, with the values received, why it matters, and the line to write.
What code decides by is an attribute of the error, never a part of its message.

Importing this module does not import TensorFlow: the launcher starts without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf
    from typing_extensions import Self

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
    "NotCopiedError",
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
    """Base class of every error that this library raises on purpose.

    Attributes:
        fix: The line to write instead, by itself; None if only the message has it.
    """

    fix: str | None = None

    if not TYPE_CHECKING:
        # AutoGraph raises an error from inside a tf.function under its own type only with this one.
        # So facts are attributes that `stating` sets, not arguments.
        __init__ = Exception.__init__

    def stating(self, **facts: Any) -> Self:
        """Sets attributes of the error, and returns it.

        Args:
            **facts: Values by the name of an attribute that the class documents.

        Raises:
            AttributeError: The class has no such attribute.

        Example:
            >>> UnknownLengthError("The data has no end.").stating(infinite=True).infinite
            True
        """
        for name, value in facts.items():
            if not hasattr(type(self), name):
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
            setattr(self, name, value)
        return self


class DeviceNotFoundError(TfMultiGpuError, ValueError):
    """This machine does not have a device that was asked for."""


class DeviceSettingsError(TfMultiGpuError, ValueError):
    """Device settings contradict each other, or TensorFlow cannot apply one of them."""


class DevicesInitializedError(TfMultiGpuError, RuntimeError):
    """A device setting came after TensorFlow had started its devices."""


class StrategyUnavailableError(TfMultiGpuError, RuntimeError):
    """The requested strategy is not available, and falling back was not allowed."""


class StrategyFallbackWarning(UserWarning):
    """A request is not available on this machine, so the next best was taken."""


class ClusterError(TfMultiGpuError, ValueError):
    """The description of the cluster is wrong, or the cluster is not as described."""


class WorkerLostError(TfMultiGpuError, RuntimeError):
    """Another worker ended during training, and this process cannot continue without it."""


class WorkersDifferError(TfMultiGpuError, ValueError):
    """The workers make different calls or pass different arguments, or no longer train alike."""


class CompileError(TfMultiGpuError, ValueError):
    """A model was not compiled, or its own steps replace what it was compiled with."""


class CheckpointError(TfMultiGpuError, RuntimeError):
    """A checkpoint cannot be written or read, or does not fit the objects to restore."""


class RestoreMismatchError(CheckpointError):
    """The restored run is not the saved one: on another worker, or in the data."""


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint is damaged and was passed over."""


class ShareError(TfMultiGpuError, ValueError):
    """A global batch cannot be divided into the requested shares."""


class DataError(TfMultiGpuError, ValueError):
    """The data cannot be distributed as it is."""


class UnknownLengthError(DataError, TypeError):
    """A dataset has no known number of batches; a TypeError because ``list`` expects that.

    Attributes:
        infinite: Whether the dataset is known never to end.
    """

    infinite: bool = False


class LossError(TfMultiGpuError, ValueError):
    """The loss cannot be written as a sum over examples and a weight."""


class MetricError(TfMultiGpuError, ValueError):
    """A metric cannot be computed exactly over several replicas."""


class ReplicaDependenceWarning(UserWarning):
    """A result depends on the number of replicas, and the message says how to avoid that."""


class UnverifiedWarning(UserWarning):
    """A step could not be compared with what one device computes; training continues."""


class ScopeError(TfMultiGpuError, ValueError):
    """A model, an optimizer or a metric was created outside the scope of the strategy."""


class NotCopiedError(TfMultiGpuError, TypeError):
    """An object belongs to the variables of one model, so it cannot be copied or pickled."""


class KerasBackendError(TfMultiGpuError, RuntimeError):
    """Keras runs on another backend than TensorFlow."""


class MissingExtraError(TfMultiGpuError, ImportError):
    """An optional package is missing; the message names the extra that installs it."""


if TYPE_CHECKING:

    class OutOfMemoryError(TfMultiGpuError, tf.errors.ResourceExhaustedError):  # type: ignore[misc]
        """A device has not enough memory; also TensorFlow's own error for that."""

        def __init__(self, message: str) -> None:
            """Takes the whole message; TensorFlow's own error has three arguments."""


def __getattr__(name: str) -> Any:
    """Makes ``OutOfMemoryError`` when it is first used: its base class needs TensorFlow."""
    if name != "OutOfMemoryError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = _make_out_of_memory_error()
    return made


def _make_out_of_memory_error() -> type[Exception]:
    import tensorflow as tf

    class OutOfMemoryError(
        TfMultiGpuError,
        tf.errors.ResourceExhaustedError,  # type: ignore[misc]  # Its type is Any.
    ):
        """A device has not enough memory; also TensorFlow's own error for that."""

        def __init__(self, message: str) -> None:
            """Takes the whole message; TensorFlow's own error has three arguments."""
            tf.errors.ResourceExhaustedError.__init__(self, None, None, message)

        def __reduce__(self) -> tuple[Any, tuple[str]]:
            """Lets it be sent to another process."""
            return type(self), (self.message,)

    OutOfMemoryError.__qualname__ = OutOfMemoryError.__name__
    return OutOfMemoryError
