"""The cluster of a Slurm job step, from the variables that ``srun`` sets for each of its tasks.

TensorFlow's own resolver asks ``nvidia-smi``, which nodes without GPUs lack, and sorts hosts as
text (``n10`` before ``n9``). Slurm numbers tasks in the order of its list of nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfmultigpu.clusters import Cluster, Scheduler
from tfmultigpu.errors import ClusterError

_READ = (
    *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_ID"),
    *("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NODEID", "TFMULTIGPU_PORT"),
)
# Below the ports that Linux gives to outgoing connections (32768 and up).
_FIRST_PORT, _LAST_PORT = 10240, 32767
_PORTS_OF_A_STEP = 64


class Slurm(Scheduler):
    """Slurm: each task of a step that ``srun`` started is a worker.

    Its port follows from the numbers of the job and of the step, so jobs that share a node do not
    meet. ``TFMULTIGPU_PORT`` sets the first port of each node instead.
    """

    name = "Slurm"
    variables = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    shown = ("SLURM_NTASKS",)
    secret = ("SLURM_STEP_NODELIST",)
    port_advice = "Set the first port with TFMULTIGPU_PORT, the same for all tasks of srun."

    def described_by(self, environ: Mapping[str, str]) -> str:
        """Returns the variable of the tasks of a job, which ``sbatch`` sets too."""
        return "" if environ.get("SLURM_NTASKS", "1") == "1" else "SLURM_NTASKS"

    def job_id(self, environ: Mapping[str, str]) -> str:
        """Returns the number of the job, or of the whole heterogeneous job."""
        return environ.get("SLURM_HET_JOB_ID", environ.get("SLURM_JOB_ID", ""))

    def read(self, environ: Mapping[str, str]) -> Cluster | None:
        """Reads the cluster from the variables of a task."""
        is_task = all(name in environ for name in self.variables)
        if not is_task or environ["SLURM_STEP_NUM_TASKS"] == "1":
            return None
        try:
            return _read_task(environ)
        except (KeyError, ValueError) as error:
            what, received = _what_is_wrong(error, environ)
            raise ClusterError(
                what,
                received,
                "Start the program with srun, which sets these variables, or unset "
                "SLURM_STEP_NUM_TASKS to train alone.",
            ) from error

    def why_not(self, environ: Mapping[str, str]) -> str:
        """Returns that a job of several tasks was started without ``srun``."""
        tasks = environ.get("SLURM_NTASKS", "1")
        if tasks == "1" or "SLURM_STEP_NUM_TASKS" in environ:
            return ""
        found = f"the Slurm job has {tasks} tasks, but srun did not start this process"
        return f"{found}: srun python train.py"


def _what_is_wrong(error: Exception, environ: Mapping[str, str]) -> tuple[str, str]:
    """Returns what is wrong with the variables, and their values."""
    values = str({name: environ.get(name) for name in _READ})[:2000]
    if isinstance(error, ClusterError):
        return f"{error.what} {error.write}", f"{error.received}, of {values}"
    if isinstance(error, KeyError):
        return f"Slurm: {error.args[0]} is not set.", values
    return f"Slurm: {error}.", values


def _read_task(step: Mapping[str, str]) -> Cluster:
    from tfmultigpu._compat import expand_slurm  # The launcher needs no TensorFlow.

    hosts, tasks = expand_slurm(step["SLURM_STEP_NODELIST"], step["SLURM_STEP_TASKS_PER_NODE"])
    node_of_task: list[int] = []
    for node, tasks_there in enumerate(tasks):
        node_of_task += [node] * tasks_there
    count, index = int(step["SLURM_STEP_NUM_TASKS"]), int(step["SLURM_PROCID"])
    if len(hosts) != len(tasks) or len(node_of_task) != count:
        here = f"{len(node_of_task)} tasks on {len(tasks)} nodes"
        raise ValueError(f"there are {count} tasks on {len(hosts)} nodes, and not {here}")
    first = _first_port(step, max(tasks))
    workers = []
    for task, node in enumerate(node_of_task):
        port = first + node_of_task[:task].count(node)  # Tasks of one node take ports in a row.
        workers.append(f"{hosts[node]}:{port}")
    cluster = Cluster(workers, index, source="Slurm")
    node = node_of_task[index]
    if int(step.get("SLURM_NODEID", node)) != node:
        raise ValueError(
            f"task {index} is not on node {node}, as if Slurm had not numbered the tasks node by "
            "node. Write srun --distribution=block"
        )
    return cluster


def _first_port(step: Mapping[str, str], count: int) -> int:
    if "TFMULTIGPU_PORT" in step:
        return int(step["TFMULTIGPU_PORT"])
    size = max(count, _PORTS_OF_A_STEP)
    slots = (_LAST_PORT + 1 - _FIRST_PORT) // size
    number = step.get("SLURM_STEP_ID", "0")
    slot = int(step["SLURM_JOB_ID"])
    if number.isdecimal():
        # Another step of the same job lands far from the jobs that follow.
        slot += 97 * int(number)
    return _FIRST_PORT + slot % slots * size
