"""The cluster of a Slurm job step, from the variables that ``srun`` sets for each of its tasks.

TensorFlow's own resolver asks ``nvidia-smi``, which nodes without GPUs lack. It also sorts hosts as
text (``n10`` before ``n9``). Slurm numbers tasks in the order of its list of nodes, and this module
keeps that order.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping

from tfmultigpu.addons.workers.spec import Cluster, ClusterSource
from tfmultigpu.errors import ClusterError

__all__ = ["SLURM", "expand_hosts", "read_slurm", "why_no_slurm"]

# Below the ports that Linux gives to outgoing connections (32768 and up).
_FIRST_PORT, _LAST_PORT = 10240, 32767
_PORTS_OF_A_STEP = 64
_PORT = "TFMULTIGPU_PORT"
# More than any machine has, and still written out in a fraction of a second.
_MOST_HOSTS = 100_000
_LONGEST_LIST = 4_000_000
_LONGEST_SHOWN = 1000
_MOST_DIGITS = 18


def read_slurm(environ: Mapping[str, str]) -> Cluster | None:
    """Reads the cluster from the ``SLURM_*`` variables of a task that ``srun`` started.

    Each task is a worker. Its port follows from the numbers of the job and of the step, so jobs
    that share a node do not meet. ``TFMULTIGPU_PORT`` sets the first port of each node instead.

    Returns:
        The cluster; None outside a job step, and in a step of one task.

    Raises:
        ClusterError: Variables are missing or contradict each other; the message has their names
            and values.

    Example:
        >>> task = {
        ...     "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
        ...     "SLURM_STEP_NODELIST": "n[9-10]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        ...     "SLURM_PROCID": "1",
        ... }
        >>> read_slurm(task).workers
        ('n9:10688', 'n10:10688')
    """
    if "SLURM_STEP_NUM_TASKS" not in environ or "SLURM_PROCID" not in environ:
        return None
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    if tasks == 1:
        return None
    if tasks > _MOST_HOSTS:
        raise _wrong(environ, "SLURM_STEP_NUM_TASKS", f"is more than {_MOST_HOSTS}")
    hosts = expand_hosts(_text(environ, "SLURM_STEP_NODELIST"))
    counts = _tasks_per_node(environ, len(hosts), tasks)
    nodes = _node_of_each_task(environ, counts)
    index = _number(environ, "SLURM_PROCID")
    if index >= tasks:
        raise _wrong(environ, "SLURM_PROCID", f"is not below the number of tasks, {tasks}")
    _check_place(environ, index, nodes)
    first = _first_port(environ, max(counts))
    seen = itertools.count
    places = {node: seen() for node in range(len(hosts))}
    workers = [f"{hosts[node]}:{first + next(places[node])}" for node in nodes]
    return Cluster(workers, index, source=SLURM)


def why_no_slurm(environ: Mapping[str, str]) -> str | None:
    """Returns why a process in a Slurm job has no cluster; None outside such a job.

    Example:
        >>> why_no_slurm({"SLURM_NTASKS": "4"})
        'the Slurm job has 4 tasks, but srun did not start this process'
    """
    tasks = environ.get("SLURM_NTASKS", "")
    number = int(tasks) if tasks.isdecimal() and len(tasks) <= _MOST_DIGITS else 1
    if number == 1 or "SLURM_STEP_NUM_TASKS" in environ:
        return None
    return f"the Slurm job has {number} tasks, but srun did not start this process"


def _job_id(environ: Mapping[str, str]) -> str | None:
    # A job of several components has one number for all of them beside a number for each.
    names = ("SLURM_HET_JOB_ID", "SLURM_JOB_ID")
    number = next((environ[one] for one in names if environ.get(one)), None)
    return None if number is None else f"Slurm job {number}"


SLURM = ClusterSource(
    "Slurm",
    read=read_slurm,
    why_absent=why_no_slurm,
    job_id=_job_id,
    same=f"srun, and the same {_PORT} if any",
    own="SLURM_PROCID",
    start="srun python train.py",
    fix="Start every task of the job with one srun: srun python train.py",
    other_port=f"set the first port with {_PORT}, the same for all tasks of srun",
    variables=("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    hosts=(
        "SLURMD_NODENAME",
        "SLURM_JOB_NODELIST",
        "SLURM_NODELIST",
        "SLURM_STEP_NODELIST",
        "SLURM_SUBMIT_HOST",
    ),
    shown=("SLURM_NTASKS", "SLURM_PROCID"),
)


def expand_hosts(text: str) -> list[str]:
    """Expands Slurm's short form of a list of hosts, in its order.

    Raises:
        ClusterError: The text does not have that form.

    Example:
        >>> expand_hosts("gpu[01-02,7],login")
        ['gpu01', 'gpu02', 'gpu7', 'login']
    """
    hosts: list[str] = []
    if len(text) > _LONGEST_LIST:
        raise _too_many(text)
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|[,\[\]]", text):
        if part != ",":
            hosts += _expand(part, text)
        if len(hosts) > _MOST_HOSTS:
            raise _too_many(text)
    if not hosts:
        raise _malformed(text)
    return hosts


def _expand(part: str, text: str) -> Iterator[str]:
    pieces = re.split(r"(\[[^\[\]]*\])", part)
    choices = [
        list(_numbers(piece[1:-1], text)) if piece.startswith("[") else [piece] for piece in pieces
    ]
    if math.prod(len(one) for one in choices) > _MOST_HOSTS:
        raise _too_many(text)
    found = ["".join(one) for one in itertools.product(*choices)]
    if any(re.fullmatch(r"[A-Za-z0-9._-]+", host) is None for host in found):
        raise _malformed(text)
    return iter(found)


def _numbers(inside: str, text: str) -> Iterator[str]:
    count = 0
    for one in inside.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", one)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _malformed(text)
        count += int(match[2] or match[1]) - int(match[1]) + 1
        if count > _MOST_HOSTS:
            raise _too_many(text)
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            yield f"{number:0{len(match[1])}d}"


def _tasks_per_node(environ: Mapping[str, str], hosts: int, tasks: int) -> list[int]:
    name = "SLURM_STEP_TASKS_PER_NODE"
    counts: list[int] = []
    for one in _text(environ, name).split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", one)
        if match is None:
            raise _wrong(environ, name, 'is not of the form "2(x3),1"')
        if int(match[2] or 1) > hosts:
            raise _wrong(environ, name, f"is for more than the {hosts} nodes of the list")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != hosts:
        nodes = _shortened(environ["SLURM_STEP_NODELIST"])
        raise _wrong(environ, name, f"is for {len(counts)} nodes, SLURM_STEP_NODELIST={nodes!r}")
    if sum(counts) != tasks:
        raise _wrong(environ, name, f"is {sum(counts)} tasks, SLURM_STEP_NUM_TASKS={tasks}")
    return counts


def _node_of_each_task(environ: Mapping[str, str], counts: list[int]) -> list[int]:
    """Returns the node of each task: Slurm fills node by node, or takes turns (``cyclic``)."""
    if environ.get("SLURM_DISTRIBUTION", "block").split(":")[0].split(",")[0] == "cyclic":
        rounds = range(max(counts))
        return [n for turn in rounds for n, count in enumerate(counts) if turn < count]
    return [node for node, count in enumerate(counts) for _ in range(count)]


def _check_place(environ: Mapping[str, str], index: int, nodes: list[int]) -> None:
    if "SLURM_NODEID" in environ and _number(environ, "SLURM_NODEID") != nodes[index]:
        raise _wrong(
            environ,
            "SLURM_NODEID",
            f"is not the node of task {index}, which is node {nodes[index]}. Let Slurm number "
            "the tasks node by node: srun --distribution=block",
        )


def _first_port(environ: Mapping[str, str], most: int) -> int:
    if _PORT in environ:
        first = _number(environ, _PORT)
        if not 1 <= first <= 65535 - most:
            raise _wrong(environ, _PORT, f"leaves no room for {most} ports below 65536")
        return first
    size = max(most, _PORTS_OF_A_STEP)
    slots = (_LAST_PORT + 1 - _FIRST_PORT) // size
    job = _number(environ, "SLURM_JOB_ID")
    step = environ.get("SLURM_STEP_ID", "0")
    # Another step of the same job lands far from the jobs that follow.
    slot = (job + 97 * (int(step[:_MOST_DIGITS]) if step.isdecimal() else 0)) % slots
    return _FIRST_PORT + slot * size


def _text(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise ClusterError(
            f"Slurm: {name} is not set, which srun sets for every task. Start the program with "
            f"srun, or unset SLURM_STEP_NUM_TASKS to train alone. Received: {name}=None"
        )
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise _wrong(environ, name, "must be a whole number, at least 0")
    return int(text)


def _wrong(environ: Mapping[str, str], name: str, what: str) -> ClusterError:
    return ClusterError(f"Slurm: {name} {what}. Received: {name}={_shortened(environ[name])!r}")


def _too_many(text: str) -> ClusterError:
    return ClusterError(
        f"Slurm: SLURM_STEP_NODELIST lists more than {_MOST_HOSTS} hosts. Start the program with "
        f"srun, which sets it. Received: SLURM_STEP_NODELIST={_shortened(text)!r}"
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _malformed(text: str) -> ClusterError:
    return ClusterError(
        'Slurm: SLURM_STEP_NODELIST is not of the form "gpu[01-03,7],login". '
        f"Received: SLURM_STEP_NODELIST={_shortened(text)!r}"
    )
