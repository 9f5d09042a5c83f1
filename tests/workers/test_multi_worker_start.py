"""Real processes on localhost: they start together, or each says why not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tfmultigpu.addons.workers.processes import free_addresses

pytestmark = pytest.mark.slow

WORKER = """
import sys
import tensorflow as tf
from tfmultigpu.errors import ClusterError
from tfmultigpu.strategies.factory import create_strategy

LOCAL
try:
    strategy = create_strategy(**ARGUMENTS)
except ClusterError as error:
    print("ERROR", error)
    sys.exit(3)
context = tf.distribute.get_replica_context


@tf.function
def add():
    def replica():
        rank = tf.cast(context().replica_id_in_sync_group, tf.float32)
        return context().all_reduce(tf.distribute.ReduceOp.SUM, rank + 1.0)

    return strategy.run(replica)


print("SUM", float(add()))
print("REPLICAS", strategy.num_replicas_in_sync)
AFTER
"""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str

    @property
    def error(self) -> str:
        assert self.code == 3, self.out
        return self.out.split("ERROR ", 1)[1].strip()


def tf_config(cluster: Any, index: int, kind: str = "worker") -> str:
    if isinstance(cluster, list):
        cluster = {"worker": cluster}
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


def run_workers(
    configs: Sequence[str],
    *,
    local: Sequence[str] = (),
    after: str = "",
    **arguments: Any,
) -> list[Ended]:
    """Run one process for each TF_CONFIG, all at once, and wait for them."""
    processes = []
    for place, config in enumerate(configs):
        script = WORKER.replace("LOCAL", local[place] if local else "")
        script = script.replace("ARGUMENTS", repr(arguments))
        script = script.replace("AFTER", textwrap.dedent(after))
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", script],
                env={**os.environ, "TF_CONFIG": config},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    ended = []
    deadline = time.monotonic() + 300.0
    try:
        for process in processes:
            out, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            ended.append(Ended(process.returncode, out))
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    return ended


def test_two_workers_start_and_add_once_in_a_process() -> None:
    addresses = free_addresses(2)
    ended = run_workers(
        [
            tf_config({"chief": addresses[:1], "worker": addresses[1:]}, 0, "chief"),
            tf_config({"chief": addresses[:1], "worker": addresses[1:]}, 0, "worker"),
        ],
        after="""
        try:
            create_strategy()
        except ClusterError as error:
            print("AGAIN", error)
        print("ALONE", create_strategy(prefer="one_device").run(lambda: tf.ones([]) + 1.0))
        """,
    )
    for index, one in enumerate(ended):
        assert one.code == 0, one.out
        assert "SUM 3.0\nREPLICAS 2" in one.out
        joined = f"has joined a cluster already, as worker {index} of 2 at {addresses[index]}"
        assert joined in one.out.split("AGAIN ")[1]
        assert "ALONE tf.Tensor(2.0" in one.out


def test_a_missing_worker_is_named_at_the_timeout() -> None:
    addresses = free_addresses(2)
    (one,) = run_workers([tf_config(addresses, 0)], startup_timeout=3.0)
    assert "1 of 2 workers did not come within 3 s" in one.error
    assert f"worker 1 at {addresses[1]} (nothing listens there)" in one.error


def test_workers_that_disagree_on_the_cluster_are_both_told() -> None:
    first, second, third = free_addresses(3)
    ended = run_workers([tf_config([first, second], 0), tf_config([first, second, third], 1)])
    for one in ended:
        assert "The workers disagree about the cluster" in one.error
        assert f"worker 0 at {first} has worker ['{first}', '{second}'] (" in one.error
        assert f"worker 1 at {second} has worker ['{first}', '{second}', '{third}'] (" in one.error
        assert 'Give every worker the same "cluster" in TF_CONFIG' in one.error


def test_a_taken_port_is_told_to_both() -> None:
    addresses = free_addresses(2)
    port = int(addresses[1].rpartition(":")[2])
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        ended = run_workers([tf_config(addresses, index) for index in range(2)])
    for one in ended:
        assert f"worker 1 at {addresses[1]} cannot start: port {port} is taken" in one.error
        assert "list another port in TF_CONFIG on every worker" in one.error


def test_a_worker_that_leaves_after_the_meeting_does_not_hang_the_other() -> None:
    addresses = free_addresses(2)
    leave = """
from tfmultigpu.strategies import factory as strategies
strategies.preflight = lambda *asked, **named: (meet(*asked, **named), sys.exit(5))
from tfmultigpu.addons.workers.preflight import preflight as meet
"""
    soon = "from tfmultigpu.strategies import factory; factory._JOIN_SECONDS = 20.0"
    stays, left = run_workers(
        [tf_config(addresses, index) for index in range(2)],
        local=[soon, leave],
        startup_timeout=20.0,
    )
    assert left.code == 5, left.out
    assert stays.code == 1
    assert "Timeout (0:00:20)!" in stays.out
    assert "in _join" in stays.out
