"""Clusters: the workers that train together, and the sources that describe them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tfmultigpu.errors import ClusterError

__all__ = ["WRITTEN", "Cluster", "ClusterSource", "find_wrong_address", "find_wrong_addresses"]

_TASK_TYPES = ("chief", "worker", "evaluator")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


def _nothing(environ: Mapping[str, str]) -> None:
    """Reads nothing."""


@dataclass(frozen=True)
class ClusterSource:
    """A way to describe a cluster, such as ``TF_CONFIG`` or a scheduler.

    Everything that the library knows of a scheduler is here. A new one is a file with one of these,
    and its name in ``tfmultigpu.addons.workers.sources.SOURCES``.

    Attributes:
        name: Its name in messages.
        read: Returns the cluster that an environment describes; None if it describes none. Raises
            ``ClusterError`` for a wrong description.
        why_absent: Returns why an environment describes no cluster here; None if nothing hints at
            this source.
        job_id: Returns the name of the job of this process, equal on all its workers; None if the
            source does not know it.
        same: The part of the description that all workers must have alike, for errors.
        own: The part that differs between them, for errors.
        start: The line that starts the workers; empty if the user starts them.
        fix: The line that corrects a wrong description, for the doctor.
        other_port: The line that chooses another port.
        variables: Environment variables that make a process a worker. The launcher removes them
            from the environment of its own workers.
        hosts: Environment variables that name machines; reports conceal their values.
        shown: Environment variables that reports show.
    """

    name: str
    read: Callable[[Mapping[str, str]], Cluster | None] = field(default=_nothing, repr=False)
    why_absent: Callable[[Mapping[str, str]], str | None] = field(default=_nothing, repr=False)
    job_id: Callable[[Mapping[str, str]], str | None] = field(default=_nothing, repr=False)
    same: str = field(default="list of workers", repr=False)
    own: str = field(default="which of them it is", repr=False)
    start: str = field(default="", repr=False)
    fix: str = field(default="", repr=False)
    other_port: str = field(default="", repr=False)
    variables: tuple[str, ...] = field(default=(), repr=False)
    hosts: tuple[str, ...] = field(default=(), repr=False)
    shown: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Completes the lines that follow from the name."""
        if not self.other_port:
            line = f"list another port in {self.name} on every worker"
            object.__setattr__(self, "other_port", line)
        if not self.fix:
            object.__setattr__(self, "fix", f"Correct {self.name}")

    def __str__(self) -> str:
        """Returns the name."""
        return self.name

    def is_present(self, environ: Mapping[str, str]) -> bool:
        """Returns whether an environment has a variable that makes a process a worker."""
        return any(name in environ for name in self.variables)


WRITTEN = ClusterSource("Cluster", same="Cluster(workers=...)", own="index=")


@dataclass(frozen=True)
class Cluster:
    """The workers that train together, and which of them this process is.

    ``cluster_from_environment`` reads it from the environment. In a program of your own only
    ``index`` differs between the workers.

    Attributes:
        workers: ``host:port`` of each worker, the chief first if there is one.
        index: The position of this process in ``workers``; None for the evaluator, which is not
            one of them.
        task_type: ``"chief"``, ``"worker"`` or ``"evaluator"``; ``master`` is read as chief.
        task_index: The number within the task type; None to derive it from ``index``.
        has_chief: Whether the first worker has the task type chief.
        source: The source that described the cluster.

    Raises:
        ClusterError: An address is not ``host:port`` or is listed twice, or ``index`` is out of
            range.

    Example:
        >>> print(Cluster(workers=["10.0.0.1:2222", "10.0.0.2:2222"], index=1))
        worker 1 of 2 at 10.0.0.2:2222 (Cluster)
    """

    workers: Sequence[str]
    index: int | None
    task_type: str = "worker"
    task_index: int | None = None
    has_chief: bool = False
    source: ClusterSource = WRITTEN

    def __post_init__(self) -> None:
        """Checks the fields."""
        if isinstance(self.workers, str) or not isinstance(self.workers, Sequence):
            raise self._wrong("workers must be a list of addresses", self.workers)
        if not self.workers:
            raise self._wrong("workers lists nobody", self.workers)
        fields = [(f"workers[{place}]", one) for place, one in enumerate(self.workers)]
        found = find_wrong_addresses(fields)
        if found is not None:
            raise self._wrong(found[0], found[1], found[2])
        count = len(self.workers)
        if self.task_type not in _TASK_TYPES:
            raise self._wrong(f"task_type must be one of {', '.join(_TASK_TYPES)}", self.task_type)
        if self.index is None and self.task_type != "evaluator":
            raise self._wrong("index is missing", None, f"It is one of 0 to {count - 1}")
        if isinstance(self.index, bool) or not isinstance(self.index, (int, type(None))):
            raise self._wrong("index must be a whole number", self.index)
        if self.index is not None and not 0 <= self.index < count:
            raise self._wrong(
                "index is out of range", self.index, f"There are {count} workers: 0 to {count - 1}"
            )
        object.__setattr__(self, "workers", tuple(self.workers))
        if self.task_index is None:
            number = self.index or 0
            inside = self.has_chief and self.task_type == "worker"
            object.__setattr__(self, "task_index", number - 1 if inside else number)

    @property
    def address(self) -> str | None:
        """The ``host:port`` of this worker; None for the evaluator."""
        return None if self.index is None else self.workers[self.index]

    @property
    def is_chief(self) -> bool:
        """True for the first worker, which writes checkpoints and logs."""
        return self.index == 0

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits, equal if the same workers are listed in the same order."""
        text = json.dumps([self.has_chief, *self.workers])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def jobs(self) -> dict[str, list[str]]:
        """The workers in the form of TensorFlow's ``ClusterSpec``."""
        first = 1 if self.has_chief else 0
        jobs = {"chief": list(self.workers[:first]), "worker": list(self.workers[first:])}
        return {job: addresses for job, addresses in jobs.items() if addresses}

    def __str__(self) -> str:
        """Returns which of the workers this process is."""
        if self.index is None:
            return f"evaluator {self.task_index} beside {len(self.workers)} workers"
        return f"worker {self.index} of {len(self.workers)} at {self.address} ({self.source})"

    def _wrong(self, what: str, value: object, cure: str | None = None) -> ClusterError:
        cure = cure or 'It looks like Cluster(workers=["host1:2222", "host2:2222"], index=0)'
        return ClusterError(f"{self.source}: {what}. {cure}. Received: {value!r}")


def find_wrong_address(name: str, address: object) -> tuple[str, object, str] | None:
    """Returns what is wrong with an address, its value, and the fix; None for a right one.

    Example:
        >>> find_wrong_address("workers[0]", "http://a:1")[0]
        'workers[0] must be host:port, without a scheme'
    """
    example = 'Write it as "host1:2222"'
    if isinstance(address, str) and "://" in address:
        bare = address.split("://", 1)[1].rstrip("/")
        return f"{name} must be host:port, without a scheme", address, f'Write "{bare}"'
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None:
        return f"{name} must be host:port", address, example
    if not 1 <= int(match[2]) <= 65535:
        return f"{name} must have a port from 1 to 65535", address, example
    return None


def find_wrong_addresses(
    fields: Sequence[tuple[str, object]],
) -> tuple[str, object, str] | None:
    """Returns the first address that is wrong or listed twice, as ``find_wrong_address`` does.

    Args:
        fields: The name of the field and the address, of each.

    Example:
        >>> find_wrong_addresses([("a", "host:1"), ("b", "HOST:1")])[0]
        'b and a are the same address'
    """
    owners: dict[str, str] = {}
    for name, address in fields:
        found = find_wrong_address(name, address)
        if found is not None:
            return found
        key = str(address).lower()
        if key in owners:
            return (
                f"{name} and {owners[key]} are the same address",
                address,
                "TensorFlow would wait for ever. Give every task another host or port",
            )
        owners[key] = name
    return None
