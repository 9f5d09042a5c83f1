"""The job that a worker belongs to: its id, and the secret that its workers share.

Only the standard library is imported: the launcher, which makes jobs, runs without TensorFlow.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["JOB_ID", "JOB_SECRET", "Job", "new_job", "read_job"]

JOB_ID = "TFMULTIGPU_JOB_ID"
JOB_SECRET = "TFMULTIGPU_JOB_SECRET"
# A job of several components has one number for all of them beside a number for each.
_OF_SLURM = ("SLURM_HET_JOB_ID", "SLURM_JOB_ID")
_LONGEST_ID = 200
_SHORTEST_SECRET = 16


@dataclass(frozen=True)
class Job:
    """The job that a worker belongs to.

    Attributes:
        id: Its name, equal on all workers; None if nothing in the environment says it.
        secret: The key that signs what its workers say when they meet; None for no signatures.
    """

    id: str | None = None
    secret: bytes | None = field(default=None, repr=False)


def read_job(environ: Mapping[str, str]) -> Job:
    """Read the job from the environment.

    Its id is `TFMULTIGPU_JOB_ID`, or else the number of the Slurm job. Its secret is
    `TFMULTIGPU_JOB_SECRET`. The launcher sets both, anew for each attempt.

    Raises:
        ClusterError: The id is empty or has no readable form, or the secret is too short.

    Example:
        >>> read_job({"SLURM_JOB_ID": "4711"})
        Job(id='Slurm job 4711')
    """
    name = environ.get(JOB_ID)
    if name is not None and not (name.isprintable() and 0 < len(name) <= _LONGEST_ID):
        raise _wrong(
            f"{JOB_ID} must be 1 to {_LONGEST_ID} printable characters. Set it to the same name on "
            f"every worker. Received: {JOB_ID}={name[: 2 * _LONGEST_ID]!r}"
        )
    if name is None:
        number = next((environ[one] for one in _OF_SLURM if environ.get(one)), None)
        name = None if number is None else f"Slurm job {number[:_LONGEST_ID]}"
    secret = environ.get(JOB_SECRET)
    if secret is not None and len(secret) < _SHORTEST_SECRET:
        raise _wrong(
            f"{JOB_SECRET} must have at least {_SHORTEST_SECRET} characters. Make one with "
            '`python -c "import secrets; print(secrets.token_hex(32))"`, and give it to every '
            f"worker of the job, or unset it. Received: {len(secret)} characters"
        )
    return Job(name, None if secret is None else secret.encode(errors="surrogateescape"))


def new_job(name: str) -> dict[str, str]:
    """Returns the variables of a new job, for all its workers: a fresh id and a fresh secret.

    Args:
        name: What starts the job, for its id.

    Example:
        >>> first, second = new_job("launch"), new_job("launch")
        >>> sorted(first), first == second
        (['TFMULTIGPU_JOB_ID', 'TFMULTIGPU_JOB_SECRET'], False)
    """
    return {JOB_ID: f"{name} {secrets.token_hex(4)}", JOB_SECRET: secrets.token_hex(32)}


def _wrong(text: str) -> Exception:
    from tfmultigpu.errors import ClusterError

    return ClusterError(text)
