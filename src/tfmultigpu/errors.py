"""Errors and warnings of the library, by name.

An error has three fields, which its text joins: ``what`` happened and why it matters, the values
``received``, and what to ``write``. So no code has to parse a text. Wrong arguments raise Python's
own ``TypeError`` or ``ValueError``, and a missing optional package raises ``ImportError``. These
errors, and all warnings, have only a text, in the same form.

Importing this module does not import TensorFlow: the launcher starts without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING


class TfMultiGpuError(Exception):
    """Base class of every error of the library, and the error itself if no other class fits.

    Its arguments are its fields, by position: ``TfMultiGpuError(what, received, write)``. After an
    error has left a ``tf.function``, ``what`` has the whole text, because AutoGraph makes the error
    anew from it.
    """

    if TYPE_CHECKING:

        def __init__(self, what: str, received: str = "", write: str = "", /) -> None: ...

    else:
        # AutoGraph keeps the type of an error from inside a tf.function only with this one.
        __init__ = Exception.__init__

    @property
    def what(self) -> str:
        """What happened, and why it matters: one or more sentences."""
        return self._field(0)

    @property
    def received(self) -> str:
        """The values received, without a period at the end; may be empty."""
        return self._field(1)

    @property
    def write(self) -> str:
        """The line to write instead; may be empty."""
        return self._field(2)

    def __str__(self) -> str:
        """Joins the fields, and leaves out those that are empty."""
        received = f"Received: {self.received}." if self.received else ""
        return " ".join(part for part in (self.what, received, self.write) if part)

    def _field(self, place: int) -> str:
        return str(self.args[place]) if place < len(self.args) else ""


class DeviceNotFoundError(TfMultiGpuError, ValueError):
    """This machine does not have a device that was asked for."""


class DevicesInitializedError(TfMultiGpuError, RuntimeError):
    """A device setting came after TensorFlow had started its devices."""


class StrategyUnavailableError(TfMultiGpuError, RuntimeError):
    """The requested strategy is not available, and falling back was not allowed."""


class StrategyFallbackWarning(UserWarning):
    """A request is not available on this machine, so the next best was taken."""


class ScopeError(TfMultiGpuError, ValueError):
    """A model, an optimizer or a metric was created outside the scope of the strategy."""


class DataError(TfMultiGpuError, ValueError):
    """The data cannot be distributed as it is, or not by the requested shares."""


class LossError(TfMultiGpuError, ValueError):
    """A loss or a metric is not a sum over examples and a weight, or a model cannot be compiled."""


class ClusterError(TfMultiGpuError, ValueError):
    """The cluster is not as described, or its workers do not train alike."""


class WorkerLostError(TfMultiGpuError, RuntimeError):
    """Another worker ended during training, and this process cannot continue without it."""


class CheckpointError(TfMultiGpuError, RuntimeError):
    """A checkpoint cannot be written or read, or does not fit the run to restore."""


class OutOfMemoryError(TfMultiGpuError, MemoryError):
    """A device has not enough memory; TensorFlow's own error is the ``__cause__``."""


class ReplicaDependenceWarning(UserWarning):
    """A result depends on the number of replicas, or could not be compared with one device."""


class PrecisionWarning(UserWarning):
    """A model computes in a type that cannot hold the numbers of its training."""
