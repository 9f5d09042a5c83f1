"""The cluster of a Slurm job step, from the variables that ``srun`` sets for each of its tasks.

TensorFlow's own resolver asks ``nvidia-smi``, which nodes without GPUs lack, and sorts hosts as
text (``n10`` before ``n9``). Slurm numbers tasks in the order of its list of nodes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from tfmultigpu.addons.workers.cluster import Cluster
from tfmultigpu.errors import ClusterError

# Below the ports that Linux gives to outgoing connections (32768 and up).
_FIRST_PORT, _LAST_PORT = 10240, 32767
_PORTS_OF_A_STEP = 64
_PORT = "TFMULTIGPU_PORT"


def read_slurm(environ: Mapping[str, str]) -> Cluster | str:
    """Reads the cluster from the ``SLURM_*`` variables of a task that ``srun`` started.

    Each task is a worker. Its port follows from the numbers of the job and of the step, so jobs
    that share a node do not meet. ``TFMULTIGPU_PORT`` sets the first port of each node instead.
    """
    if "SLURM_STEP_NUM_TASKS" not in environ or "SLURM_PROCID" not in environ:
        tasks = environ.get("SLURM_NTASKS", "1")
        if tasks == "1" or "SLURM_STEP_NUM_TASKS" in environ:
            return ""
        what = f"the Slurm job has {tasks} tasks, but srun did not start this process"
        return f"{what}: srun python train.py"
    count = _number(environ, "SLURM_STEP_NUM_TASKS")
    if count == 1:
        return ""
    hosts = list(expand_hosts(_text(environ, "SLURM_STEP_NODELIST")))
    tasks_per_node = _tasks_per_node(environ, len(hosts), count)
    nodes = _node_of_each_task(environ, tasks_per_node)
    index = _number(environ, "SLURM_PROCID")
    if index >= count:
        raise _wrong(environ, "SLURM_PROCID", f"is not below the number of tasks, {count}")
    if "SLURM_NODEID" in environ and _number(environ, "SLURM_NODEID") != nodes[index]:
        what = f"is not the node of task {index}, which is node {nodes[index]}. Let Slurm number "
        what += "the tasks node by node: srun --distribution=block"
        raise _wrong(environ, "SLURM_NODEID", what)
    first = _first_port(environ, max(tasks_per_node))
    ports = [first + nodes[:task].count(node) for task, node in enumerate(nodes)]
    workers = [f"{hosts[node]}:{port}" for node, port in zip(nodes, ports, strict=True)]
    return Cluster(workers, index, source="Slurm")


def expand_hosts(text: str) -> Iterator[str]:
    """Expands Slurm's short form of a list of hosts, in its order."""
    numbers = r"\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]"
    host = rf"(?:[A-Za-z0-9._-]|{numbers})+"
    ranges = re.findall("([0-9]+)-([0-9]+)", " ".join(re.findall(numbers, text)))
    falling = any(int(first) > int(last) for first, last in ranges)
    if falling or re.fullmatch(f"{host}(?:,{host})*", text) is None:
        raise ClusterError(
            'Slurm: SLURM_STEP_NODELIST is not of the form "gpu[01-03,7],login". '
            f"Received: SLURM_STEP_NODELIST={text!r:.1000}"
        )
    for part in re.findall(host, text):
        pieces = re.split(f"({numbers})", part)
        choices = [_numbers(piece) if piece.startswith("[") else [piece] for piece in pieces]
        yield from map("".join, itertools.product(*choices))


def _numbers(brackets: str) -> Iterator[str]:
    for part in brackets[1:-1].split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}d}"


def _tasks_per_node(environ: Mapping[str, str], hosts: int, tasks: int) -> list[int]:
    name = "SLURM_STEP_TASKS_PER_NODE"
    parts = [re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", part)
             for part in _text(environ, name).split(",")]  # fmt: skip
    if None in parts:
        raise _wrong(environ, name, 'is not of the form "2(x3),1"')
    counts = [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
    if (len(counts), sum(counts)) != (hosts, tasks):
        what = f"is {sum(counts)} tasks on {len(counts)} nodes. There are {tasks} on {hosts}"
        raise _wrong(environ, name, what)
    return counts


def _node_of_each_task(environ: Mapping[str, str], counts: list[int]) -> list[int]:
    """Returns the node of each task: Slurm fills node by node, or takes turns (``cyclic``)."""
    if environ.get("SLURM_DISTRIBUTION", "block").split(":")[0].split(",")[0] == "cyclic":
        rounds = range(max(counts))
        return [n for turn in rounds for n, count in enumerate(counts) if turn < count]
    return [node for node, count in enumerate(counts) for _ in range(count)]


def _first_port(environ: Mapping[str, str], count: int) -> int:
    if _PORT in environ:
        first = _number(environ, _PORT)
        if not 1 <= first <= 65535 - count:
            raise _wrong(environ, _PORT, f"leaves no room for {count} ports below 65536")
        return first
    size = max(count, _PORTS_OF_A_STEP)
    slots = (_LAST_PORT + 1 - _FIRST_PORT) // size
    step = environ.get("SLURM_STEP_ID", "0")
    # Another step of the same job lands far from the jobs that follow.
    slot = _number(environ, "SLURM_JOB_ID") + 97 * (int(step) if step.isdecimal() else 0)
    return _FIRST_PORT + slot % slots * size


def _text(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise ClusterError(
            f"Slurm: {name} is not set, which srun sets for every task. Start the program with "
            f"srun, or unset SLURM_STEP_NUM_TASKS to train alone. Received: {name}=None"
        )
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if re.fullmatch("[0-9]{1,18}", text) is None:
        raise _wrong(environ, name, "must be a whole number, at least 0")
    return int(text)


def _wrong(environ: Mapping[str, str], name: str, what: str) -> ClusterError:
    return ClusterError(f"Slurm: {name} {what}. Received: {name}={environ[name]!r:.1000}")
