"""A real Slurm of one node on this machine, for as long as a test needs it; as root."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged")
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmctldPort={ports[0]}
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
JobRequeue=1
SchedulerParameters=requeue_delay=1,batch_sched_delay=1
NodeName={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> str:
    """Returns what this machine lacks to start one, or an empty text."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"needs {', '.join(lacking)}: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "needs root, which starts slurmd and munged"


@contextlib.contextmanager
def running(folder: Path) -> Iterator[None]:
    """Starts controller and node in a folder, and ends them after."""
    munge = folder / "munge"
    for path in (munge, folder / "state", folder / "spool"):
        path.mkdir(parents=True)
    munge.chmod(0o700)
    (munge / "key").write_bytes(os.urandom(1024))
    (munge / "key").chmod(0o400)
    with contextlib.ExitStack() as sockets:
        opened = [sockets.enter_context(socket.create_server(("", 0))) for _ in range(2)]
        ports = [one.getsockname()[1] for one in opened]
    host = socket.gethostname().split(".")[0]
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, folder=folder, ports=ports, cpus=os.cpu_count()))
    files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
    programs = (
        ("munged", "--force", "--foreground", f"--socket={munge / 'socket'}", *files),
        ("slurmctld", "-D", "-f", str(conf)),
        ("slurmd", "-D", "-N", host, "-f", str(conf)),
    )
    started: list[subprocess.Popen[bytes]] = []
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(conf)
    try:
        for program in programs:
            with (folder / f"{program[0]}.log").open("wb") as log:
                started.append(subprocess.Popen(program, stdout=log, stderr=log))
            time.sleep(1.0)  # It has no other sign that it is ready.
        wait_until(lambda: "idle" in ask("sinfo", "-h", "-o", "%t"), 60.0)
        yield
    finally:
        ask("scancel", "--partition=all")  # Jobs outlive the daemons.
        wait_until(lambda: not ask("squeue", "-h"), 120.0)
        for process in reversed(started):
            process.terminate()
            process.wait()
        del os.environ["SLURM_CONF"]
        if before is not None:
            os.environ["SLURM_CONF"] = before


def ask(*command: str) -> str:
    """Returns what a command of Slurm prints."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def wait_until(is_so, seconds: float) -> None:  # type: ignore[no-untyped-def]
    """Waits until something is so; fails after the seconds."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, ask("scontrol", "show", "job")
        time.sleep(0.5)
