"""A cluster, and what a scheduler is, which describes one to the processes that it starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tfmultigpu.errors import ClusterError

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_EXAMPLE = 'It looks like Cluster(workers=["host1:2222", "host2:2222"], index=0)'


@dataclass(frozen=True)
class Cluster:
    """The workers that train together, and which of them this process is.

    ``cluster_from_environment`` reads it from the environment. In a program of your own only
    ``index`` differs between the workers.

    Attributes:
        workers: ``host:port`` of each worker. The first one, the chief, writes checkpoints.
        index: The position of this process in ``workers``; None for the evaluator, which runs
            alone beside them.
        source: What described the cluster, for messages.

    Raises:
        ClusterError: An address is not ``host:port`` or is listed twice, or ``index`` is out of
            range.

    Example:
        >>> print(Cluster(workers=["10.0.0.1:2222", "10.0.0.2:2222"], index=1))
        worker 1 of 2 at 10.0.0.2:2222 (Cluster)
    """

    workers: Sequence[str]
    index: int | None
    source: str = "Cluster"

    def __post_init__(self) -> None:
        """Checks the fields."""
        listed = isinstance(self.workers, Sequence) and not isinstance(self.workers, str)
        if not listed or not self.workers:
            raise self._wrong("workers must be a list of addresses", self.workers)
        for place, address in enumerate(self.workers):
            match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
            if match is None or not 1 <= int(match[2]) <= 65535:
                what = f"workers[{place}] must be host:port, without a scheme"
                raise self._wrong(what, address, 'Write it as "host1:2222", the port below 65536')
            if address.lower() in [other.lower() for other in self.workers[:place]]:
                cure = "TensorFlow would wait for ever. Give every task another host or port"
                raise self._wrong(f"workers[{place}] is listed twice", address, cure)
        count, index = len(self.workers), self.index
        if isinstance(index, bool) or not isinstance(index, int | None):
            raise self._wrong("index must be a whole number", index)
        if index is not None and not 0 <= index < count:
            cure = f"There are {count} workers: 0 to {count - 1}"
            raise self._wrong("index is out of range", index, cure)
        object.__setattr__(self, "workers", tuple(self.workers))

    @property
    def address(self) -> str | None:
        """The ``host:port`` of this worker; None for the evaluator."""
        return None if self.index is None else self.workers[self.index]

    def name(self, worker: int) -> str:
        """Returns a worker in words: which one it is, and where."""
        return f"worker {worker} of {len(self.workers)} at {self.workers[worker]}"

    def __str__(self) -> str:
        """Returns which of the workers this process is."""
        if self.index is None:
            return f"evaluator beside {len(self.workers)} workers ({self.source})"
        return f"{self.name(self.index)} ({self.source})"

    def _wrong(self, what: str, value: object, cure: str = _EXAMPLE) -> ClusterError:
        return ClusterError(f"{self.source}: {what}.", f"{value!r:.2000}", f"{cure}.")


def split_address(address: str) -> tuple[str, int]:
    """Splits ``host:port``; drops the brackets of an IPv6 host."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class Scheduler(Protocol):
    """A way in which the environment of a process describes its cluster: one object, one file.

    Attributes:
        name: The ``source`` of its clusters, for messages.
        variables: The variables that make a process a worker. The launcher removes them from the
            environment of its own workers.
        shown: Variables whose values a report may show.
        secret: Variables that hold host names. A report says only that they are set, because users
            paste it into public issues.
        port_advice: What to do if the port of a worker is taken or is of another machine.
    """

    name: str
    variables: tuple[str, ...]
    shown: tuple[str, ...]
    secret: tuple[str, ...]
    port_advice: str

    def described_by(self, environ: Mapping[str, str]) -> str:
        """Returns the variable that says that there are several workers; empty without one."""

    def job_id(self, environ: Mapping[str, str]) -> str:
        """Returns what numbers the job, so that workers of two jobs do not meet; may be empty."""

    def read(self, environ: Mapping[str, str]) -> Cluster | None:
        """Reads the cluster; raises ``ClusterError`` if its description is wrong.

        Returns None if there is none, or this process is alone.
        """

    def why_not(self, environ: Mapping[str, str]) -> str:
        """Returns why ``read`` returns None; empty if nobody would expect a cluster."""
