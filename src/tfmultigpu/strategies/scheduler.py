"""The interface of a scheduler: what describes a cluster to the processes that it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tfmultigpu.strategies.cluster import Cluster


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
