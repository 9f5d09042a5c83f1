"""The job that a worker belongs to: its id, and the secret that its workers share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfmultigpu.addons.workers.spec import ClusterSource
from tfmultigpu.errors import ClusterError

__all__ = ["JOB_ID", "JOB_SECRET", "Job", "new_job", "read_job"]

JOB_ID = "TFMULTIGPU_JOB_ID"
JOB_SECRET = "TFMULTIGPU_JOB_SECRET"
_LONGEST_ID = 200
_SHORTEST_SECRET = 16


@dataclass(frozen=True)
class Job:
    """The job that a worker belongs to.

    Attributes:
        id: Its name, equal on all workers; None if nothing in the environment says it.
        secret: The key that signs the lines of its workers when they meet; None for no signatures.
    """

    id: str | None = None
    secret: bytes | None = field(default=None, repr=False)


def read_job(environ: Mapping[str, str], sources: Sequence[ClusterSource]) -> Job:
    """Reads the job from the environment.

    Its id is ``TFMULTIGPU_JOB_ID``, or else the first that a source of clusters knows. Its secret
    is ``TFMULTIGPU_JOB_SECRET``. The launcher sets both, with new values for each attempt.

    Args:
        environ: The environment variables.
        sources: The sources that may know the id.

    Raises:
        ClusterError: The id is empty or cannot be printed, or the secret is too short.

    Example:
        >>> from tfmultigpu.addons.workers.sources import SOURCES
        >>> read_job({"SLURM_JOB_ID": "4711"}, SOURCES)
        Job(id='Slurm job 4711')
    """
    name = environ.get(JOB_ID)
    if name is not None and not (name.isprintable() and 0 < len(name) <= _LONGEST_ID):
        raise ClusterError(
            f"{JOB_ID} must be 1 to {_LONGEST_ID} printable characters. Set it to the same name on "
            f"every worker. Received: {JOB_ID}={name[: 2 * _LONGEST_ID]!r}"
        )
    if name is None:
        known = (source.job_id(environ) for source in sources)
        found = next((one for one in known if one is not None), None)
        name = None if found is None else found[:_LONGEST_ID]
    secret = environ.get(JOB_SECRET)
    if secret is not None and len(secret) < _SHORTEST_SECRET:
        raise ClusterError(
            f"{JOB_SECRET} must have at least {_SHORTEST_SECRET} characters. Make one with "
            '`python -c "import secrets; print(secrets.token_hex(32))"`, and give it to every '
            f"worker of the job, or unset it. Received: {len(secret)} characters"
        )
    return Job(name, None if secret is None else secret.encode(errors="surrogateescape"))


def new_job(name: str) -> dict[str, str]:
    """Returns the variables of a new job, for all its workers: a fresh id and a fresh secret.

    Args:
        name: The name of the program that starts the job, for its id.

    Example:
        >>> first, second = new_job("launch"), new_job("launch")
        >>> sorted(first), first == second
        (['TFMULTIGPU_JOB_ID', 'TFMULTIGPU_JOB_SECRET'], False)
    """
    return {JOB_ID: f"{name} {secrets.token_hex(4)}", JOB_SECRET: secrets.token_hex(32)}
