"""The workers that train together, and which of them this process is."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tfmultigpu.errors import ClusterError

__all__ = ["Cluster", "find_wrong_address", "find_wrong_addresses"]

_TASK_TYPES = ("chief", "worker", "evaluator")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


@dataclass(frozen=True)
class Cluster:
    """The workers that train together, and which of them this process is.

    Read from the environment by `cluster_from_environment`, or written down: `index` is then all
    that differs between the workers.

    Attributes:
        workers: `host:port` of each, the chief first where there is one.
        index: the place of this process in `workers`; `None` for the evaluator, which is outside.
        task_type: `"chief"`, `"worker"` or `"evaluator"`; `master` is read as chief.
        task_index: the number within its task type; `None` to derive it from `index`.
        has_chief: whether the first worker has the task type chief.
        source: what described the cluster.

    Raises:
        ClusterError: an address is not `host:port` or listed twice, or `index` is none of them.

    Example:
        >>> print(Cluster(workers=["10.0.0.1:2222", "10.0.0.2:2222"], index=1))
        worker 1 of 2 at 10.0.0.2:2222 (Cluster)
    """

    workers: Sequence[str]
    index: int | None
    task_type: str = "worker"
    task_index: int | None = None
    has_chief: bool = False
    source: str = "Cluster"

    def __post_init__(self) -> None:
        """Checks what was given."""
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
        """This worker's `host:port`; `None` for the evaluator."""
        return None if self.index is None else self.workers[self.index]

    @property
    def is_chief(self) -> bool:
        """Whether this is the first worker, the one that writes checkpoints and logs."""
        return self.index == 0

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that are equal where the same workers are listed in the same order."""
        text = json.dumps([self.has_chief, *self.workers])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def jobs(self) -> dict[str, list[str]]:
        """The workers as TensorFlow's `ClusterSpec` takes them."""
        first = 1 if self.has_chief else 0
        jobs = {"chief": list(self.workers[:first]), "worker": list(self.workers[first:])}
        return {job: addresses for job, addresses in jobs.items() if addresses}

    def __str__(self) -> str:
        """Which of the workers this process is."""
        if self.index is None:
            return f"evaluator {self.task_index} beside {len(self.workers)} workers"
        return f"worker {self.index} of {len(self.workers)} at {self.address} ({self.source})"

    def _wrong(self, what: str, value: object, cure: str | None = None) -> ClusterError:
        cure = cure or 'It looks like Cluster(workers=["host1:2222", "host2:2222"], index=0)'
        return ClusterError(f"{self.source}: {what}. {cure}. Received: {value!r}")


def find_wrong_address(field: str, address: object) -> tuple[str, object, str] | None:
    """What is wrong with an address, its value and the cure; `None` for a right one.

    Example:
        >>> find_wrong_address("workers[0]", "http://a:1")[0]
        'workers[0] must be host:port, without a scheme'
    """
    example = 'Write it as "host1:2222"'
    if isinstance(address, str) and "://" in address:
        bare = address.split("://", 1)[1].rstrip("/")
        return f"{field} must be host:port, without a scheme", address, f'Write "{bare}"'
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None:
        return f"{field} must be host:port", address, example
    if not 1 <= int(match[2]) <= 65535:
        return f"{field} must have a port from 1 to 65535", address, example
    return None


def find_wrong_addresses(
    fields: Sequence[tuple[str, object]],
) -> tuple[str, object, str] | None:
    """The first that is wrong, or listed before, as `find_wrong_address` says it.

    Args:
        fields: each address with the name of its field.

    Example:
        >>> find_wrong_addresses([("a", "host:1"), ("b", "HOST:1")])[0]
        'b and a are the same address'
    """
    owners: dict[str, str] = {}
    for field, address in fields:
        found = find_wrong_address(field, address)
        if found is not None:
            return found
        key = str(address).lower()
        if key in owners:
            return (
                f"{field} and {owners[key]} are the same address",
                address,
                "TensorFlow would wait for ever. Give every task a host and port of its own",
            )
        owners[key] = field
    return None
