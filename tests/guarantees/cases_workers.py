"""Several workers: starting."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from guarantee import Case, Difference
from recipes import (
    Problem,
    Trained,
    compiled,
    crossentropy,
    fresh,
    one_device,
    rows,
    weights,
    weights_of,
)

import tfmultigpu as tmg

# A process of its own for each side: TensorFlow joins a cluster once in a process.
Worker = functools.partial(
    Case,
    section="Several workers: starting",
    alone=True,
    ours_alone=True,
    virtual_cpus=0,
    ours_kind="error",
    ours_says="ClusterError",
    patience=30.0,
)
EVEN = Problem(rows(128))
TIMEOUT = 3.0


def addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


def started(how: Callable[[], Any]) -> Difference:
    return Difference(2 - how().num_replicas_in_sync, "replicas missing, of 2")


def ours() -> Any:
    return tmg.create_strategy(prefer="multi_worker", fallback=False, startup_timeout=TIMEOUT)


def with_config(how: Callable[[], Any], config: Callable[[], Any]) -> Difference:
    found = config()
    os.environ["TF_CONFIG"] = found if isinstance(found, str) else json.dumps(found)
    return started(how)


def case(name: str, title: str, config: Callable[[], Any], **options: Any) -> Case:
    return Worker(
        name=f"start-{name}",
        title=title,
        plain=lambda: with_config(tf.distribute.MultiWorkerMirroredStrategy, config),
        ours=lambda: with_config(ours, config),
        **options,
    )


def cluster(workers: list[str], index: int = 0, kind: str = "worker", **others: Any) -> Any:
    return {"cluster": {"worker": workers, **others}, "task": {"type": kind, "index": index}}


def same_address() -> Any:
    (one,) = addresses(1)
    return cluster([one, one])


def after_a_tensor(how: Callable[[], Any]) -> Difference:
    os.environ["TF_CONFIG"] = json.dumps(cluster(addresses(2)))
    tf.constant(1.0)
    return started(how)


def port_in_use(how: Callable[[], Any]) -> Difference:
    """What the other worker sees, whose own port is free."""
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    both = [f"127.0.0.1:{taken.getsockname()[1]}", *addresses(1)]
    if os.fork() == 0:
        os.environ["TF_CONFIG"] = json.dumps(cluster(both, 0))
        with contextlib.suppress(Exception):
            how()
        os._exit(0)
    taken.close()
    return with_config(how, lambda: cluster(both, 1))


def in_two_workers(train: Callable[[], Difference]) -> Difference:
    """Runs the other worker in a copy of this process."""
    both = addresses(2)
    child = os.fork()
    os.environ["TF_CONFIG"] = json.dumps(cluster(both, 0 if child else 1))
    if child == 0:
        with contextlib.suppress(Exception):
            train()
        os._exit(0)
    found = train()
    os.waitpid(child, 0)
    return found


def fit_of_keras() -> Difference:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    model = compiled(EVEN, strategy)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    model.fit(EVEN.dataset().with_options(options), verbose=0, shuffle=False)
    return weights(Trained(weights_of(model, strategy), []), one_device(EVEN))


def files(problem: Problem, folder: str) -> tf.data.Dataset:
    """One file of rows, for two workers."""
    path = f"{folder}/rows-{os.getpid()}.tfrecord"
    with tf.io.TFRecordWriter(path) as writer:
        for x in problem.arrays[0]:
            writer.write(x.tobytes())
    data = tf.data.TFRecordDataset([path])
    data = data.map(lambda row: tf.reshape(tf.io.decode_raw(row, tf.float32), [6]))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    return data.batch(problem.batch_size).with_options(options)


def rows_read(how: Callable[[], Any], distribute: Callable[[Any, Any], Any]) -> Difference:
    strategy = how()
    with tempfile.TemporaryDirectory() as folder:
        seen = 0
        for batch in distribute(strategy, files(EVEN, folder)):
            here = strategy.experimental_local_results(batch)
            seen += sum(len(shard) for shard in here)
    total = strategy.reduce("SUM", strategy.run(lambda: tf.constant(float(seen))), axis=None)
    return Difference(abs(float(total) - 128.0), "rows")


def trained_by_us() -> Difference:
    strategy = ours()
    with strategy.scope():
        model, optimizer = fresh(EVEN)
    step = tmg.make_train_step(model, optimizer, crossentropy(), strategy)
    for batch in tmg.distribute_dataset(EVEN.dataset(), strategy):
        step(batch)
    found = Trained(weights_of(model, strategy), [])
    with tf.device("CPU:0"):
        return weights(found, one_device(EVEN))


def summed(strategy: Any, size: int) -> float:
    """How many replicas add a vector of ones."""

    @tf.function
    def add() -> Any:
        def replica() -> Any:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.ones([size]))

        return strategy.run(replica)

    return float(add()[0])


def twice(how: Callable[[], Any]) -> Difference:
    def both() -> Difference:
        summed(how(), 3)
        return Difference(abs(summed(how(), 5) - 2.0), "replicas in a sum")

    return in_two_workers(both)


def disagreeing(how: Callable[[], Any]) -> Difference:
    """The other worker lists a third one."""
    both = addresses(2)
    if os.fork() == 0:
        os.environ["TF_CONFIG"] = json.dumps(cluster([*both, *addresses(1)], 1))
        with contextlib.suppress(Exception):
            summed(how(), 3)
        os._exit(0)
    os.environ["TF_CONFIG"] = json.dumps(cluster(both, 0))
    return Difference(abs(summed(how(), 3) - 2.0), "replicas in a sum")


def evaluator_config() -> Any:
    return cluster(addresses(2), 0, "evaluator")


def evaluator(how: Callable[[], Any]) -> Difference:
    os.environ["TF_CONFIG"] = json.dumps(evaluator_config())
    return Difference(abs(how().num_replicas_in_sync - 1), "replicas too many")


SAID = "the error names the field and its value, before TensorFlow is asked"
NAMED = "the error names who is missing, or what disagrees"
NOT_JSON = '{"cluster": {"worker": ["a:1", "b:2"]}'
CASES = [
    case("not-json", "TF_CONFIG is not JSON", lambda: NOT_JSON, reason=SAID),
    case(
        "no-task",
        "TF_CONFIG without a task",
        lambda: {"cluster": {"worker": addresses(2)}},
        reason=SAID,
    ),
    case(
        "index-too-large",
        "The index of the task is too large",
        lambda: cluster(addresses(2), 2),
        reason=SAID,
    ),
    case(
        "index-negative",
        "The index of the task is negative",
        lambda: cluster(addresses(2), -1),
        reason=SAID,
    ),
    case(
        "no-port",
        "An address without a port",
        lambda: cluster(["127.0.0.1", *addresses(1)]),
        reason=SAID,
    ),
    case(
        "http",
        "An address that begins with `http://`",
        lambda: cluster([f"http://{one}" for one in addresses(2)]),
        reason=SAID,
    ),
    case("empty", "TF_CONFIG is `{}`", lambda: {}, reason=SAID),
    case("list", "TF_CONFIG is `[1, 2]`", lambda: [1, 2], reason=SAID),
    case(
        "sparse-cluster",
        "The `sparseCluster` of Kubeflow",
        lambda: {
            "sparseCluster": {"worker": {"0": "127.0.0.1:1"}},
            "task": {"type": "worker", "index": 0},
        },
        reason=SAID,
    ),
    case(
        "same-address",
        "Two tasks with one address",
        same_address,
        reason=SAID,
        sleeps=True,
        patience=12.0,
    ),
    case(
        "parameter-server",
        "A parameter server in the cluster",
        lambda: cluster(addresses(2), ps=addresses(1)),
        reason=SAID,
        sleeps=True,
        patience=12.0,
    ),
    case(
        "missing-worker",
        "A worker that never starts",
        lambda: cluster(addresses(2)),
        reason=f"{NAMED}; here after the {TIMEOUT:.0f} s that were set",
        sleeps=True,
        patience=12.0,
    ),
    Worker(
        name="start-port-in-use",
        title="The port of one worker is in use: what the other one sees",
        plain=lambda: port_in_use(tf.distribute.MultiWorkerMirroredStrategy),
        ours=lambda: port_in_use(ours),
        reason=NAMED,
        sleeps=True,
        patience=12.0,
    ),
    Worker(
        name="start-disagree",
        title="Two workers that list different clusters",
        plain=lambda: disagreeing(tf.distribute.MultiWorkerMirroredStrategy),
        plain_kinds=("error", "hang", "abort"),
        plain_says="Collective ops is aborted",
        ours=lambda: disagreeing(ours),
        reason=NAMED,
        sleeps=True,
        patience=12.0,
    ),
    Worker(
        name="start-late",
        title="The strategy is created after TensorFlow has started",
        plain=lambda: after_a_tensor(tf.distribute.MultiWorkerMirroredStrategy),
        ours=lambda: after_a_tensor(ours),
        reason="TensorFlow cannot do it any more; the error names the earlier line",
    ),
    Worker(
        name="start-twice",
        title="The strategy is created twice in one process, on two workers",
        plain=lambda: twice(tf.distribute.MultiWorkerMirroredStrategy),
        ours=lambda: twice(ours),
        reason="TensorFlow joins a cluster once in a process; the error names the first",
        sleeps=True,
        patience=20.0,
    ),
    Worker(
        name="start-evaluator",
        title="The evaluator of a cluster that does not list it (Kubeflow's form)",
        plain=lambda: evaluator(tf.distribute.MultiWorkerMirroredStrategy),
        ours=lambda: evaluator(tmg.create_strategy),
        ours_kind="same",
        ours_says="",
    ),
    Worker(
        name="workers-training",
        title="Training on two workers: Keras `fit`; our step",
        plain=lambda: in_two_workers(fit_of_keras),
        ours=lambda: in_two_workers(trained_by_us),
        ours_kind="same",
        ours_says="",
        links=("k#20585", "tf#72388"),
    ),
    Worker(
        name="workers-one-file",
        title="Two workers, one file, sharding by files",
        plain=lambda: in_two_workers(
            lambda: rows_read(
                tf.distribute.MultiWorkerMirroredStrategy,
                lambda strategy, data: strategy.experimental_distribute_dataset(data),
            )
        ),
        ours=lambda: in_two_workers(
            lambda: rows_read(ours, lambda strategy, data: tmg.distribute_dataset(data, strategy))
        ),
        ours_kind="same",
        ours_says="",
        links=("tf#36846",),
        plain_says="FILE based sharding",
    ),
]
