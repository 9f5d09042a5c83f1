"""A real Slurm of one node on this machine, for as long as a test needs it; as root."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged", "setpriv")
# The ports of a job follow from its number, which is to differ between runs of the tests. By
# default a job that is requeued waits for two minutes: until credentials of two minutes expire.
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
SlurmctldPort={ports[0]}
FirstJobId={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=60
SchedulerParameters=batch_sched_delay=1
NodeName={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> str:
    """Returns what this machine lacks to start Slurm, or an empty text."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"needs {', '.join(lacking)}: apt-get install slurm-wlm munge util-linux"
    return "" if os.geteuid() == 0 else "needs root, which starts slurmd and munged"


@contextlib.contextmanager
def running(folder: Path) -> Iterator[None]:
    """Starts controller and node in a folder; ends jobs and daemons after."""
    munge = folder / "munge"
    for path in (munge, folder / "state", folder / "spool"):
        path.mkdir(parents=True)
    munge.chmod(0o700)
    (munge / "key").write_bytes(os.urandom(1024))
    (munge / "key").chmod(0o400)
    with socket.create_server(("", 0)) as first, socket.create_server(("", 0)) as second:
        ports = [server.getsockname()[1] for server in (first, second)]
    host = socket.gethostname().split(".")[0]
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, folder=folder, ports=ports, cpus=os.cpu_count()))
    files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
    programs = (
        ("munged", "--force", "--foreground", f"--socket={munge / 'socket'}", *files),
        ("slurmctld", "-D", "-f", str(conf)),
        ("slurmd", "-D", "-N", host, "-f", str(conf)),
    )
    with contextlib.ExitStack() as ending:
        environ = ending.enter_context(pytest.MonkeyPatch.context())
        environ.setenv("SLURM_CONF", str(conf))
        for program in programs:
            ending.callback(_end, _start(program, folder / f"{program[0]}.log"))
            time.sleep(1.0)  # They have no other sign of being ready.
        wait_until(lambda: "idle" in ask("sinfo", "-h", "-o", "%t"), 60.0)
        ending.callback(_end_jobs)  # Before the daemons, which jobs outlive.
        yield


def _start(program: tuple[str, ...], log: Path) -> subprocess.Popen[bytes]:
    # It ends with the process of the tests, also when that is killed.
    with log.open("wb") as out:
        command = ("setpriv", "--pdeathsig", "TERM", *program)
        return subprocess.Popen(command, stdout=out, stderr=out)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_jobs() -> None:
    ask("scancel", "--full", "--signal=KILL", "--partition=all", "--state=RUNNING")
    ask("scancel", "--partition=all")
    wait_until(lambda: not ask("squeue", "-h"), 120.0)


def ask(*command: str) -> str:
    """Returns what a command of Slurm prints."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    """Waits until something is so; fails after the seconds."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, ask("scontrol", "show", "job")
        time.sleep(0.5)
