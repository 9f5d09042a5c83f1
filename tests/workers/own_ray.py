"""The program of docs/how-to/ray.md on a real Ray of this machine, whose nodes come and go.

``python own_ray.py FOLDER EVENT ...`` writes what each event gave to ``FOLDER/results.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import ray_train
from ray import train
from ray.cluster_utils import Cluster
from ray.train import FailureConfig

STORE = 80 * 2**20  # Bytes, the least that Ray takes.
EPOCHS, STEPS = 4, 4  # Steps of an epoch.


def note(config: dict[str, Any], step: int) -> tuple[int, int]:
    """Notes that this worker has made a step; returns how many workers there are, and its rank."""
    context = train.get_context()
    workers, rank = context.get_world_size(), context.get_world_rank()
    node = ray.get_runtime_context().get_node_id()
    with Path(config["folder"], "steps").open("a") as file:
        file.write(f"{workers} {rank} {step} {node} {time.time():.2f}\n")
    return workers, rank


def disturb(config: dict[str, Any], step: int) -> None:
    """Ends this worker, or waits for the end that comes from outside, once for each event."""
    workers, rank = note(config, step)
    for number, (of_workers, of_rank, at, event) in enumerate(config["events"]):
        done = Path(config["folder"], f"done-{number}")
        if (workers, rank, step) == (of_workers, of_rank, at) and not done.exists():
            done.touch()
            if event == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600.0)


def by_keras(config: dict[str, Any]) -> None:
    """Runs the program of the page, and notes its steps and a digest of its result."""
    import keras
    import numpy as np

    import tfmultigpu as tmg

    class Disturb(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            disturb(config, int(np.asarray(self.model.optimizer.iterations)))

    def fit(*arguments: Any, callbacks: Any, **options: Any) -> Any:
        return plain(*arguments, callbacks=[Disturb(), *callbacks], **options)

    plain, tmg.fit = tmg.fit, fit
    model = PROGRAM(config)
    write_digest(config, [*model.variables, *model.optimizer.variables])


def by_hand(config: dict[str, Any]) -> None:
    """Trains in a loop of its own, which reports each epoch once."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfmultigpu as tmg

    strategy = tmg.create_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.2)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        optimizer, mean = keras.optimizers.Adam(), keras.metrics.MeanSquaredError()
    step = tmg.make_train_step(
        model, optimizer, "mse", strategy, metrics=[mean], logical_replicas=4
    )
    x = np.random.default_rng(0).normal(size=(250, 4)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(250, seed=2).batch(64)
    checkpoints = tmg.Checkpoints(config["checkpoints"], train_step=step, data=data)
    checkpoints.restore()
    for epoch in checkpoints.epochs(EPOCHS):
        if checkpoints.step_in_epoch == 0:
            mean.reset_state()
        for batch in checkpoints.data:
            step(batch)
            checkpoints.after_step()
            disturb(config, checkpoints.step)
            if checkpoints.step % 2 == 0:
                checkpoints.save()
        reported = train.get_all_reported_checkpoints()
        if epoch > max((r.metrics["epoch"] for r in reported), default=-1):
            ray_train_report(config, {"epoch": epoch, "loss": float(mean.result())})
    write_digest(config, [*model.variables, *optimizer.variables])


def ray_train_report(config: dict[str, Any], row: dict[str, Any]) -> None:
    """Reports a row with a checkpoint of Ray's, which is the file that this library has saved."""
    checkpoint = None
    if train.get_context().get_world_rank() == 0:
        checkpoint = train.Checkpoint.from_directory(config["checkpoints"])
    train.report(row, checkpoint=checkpoint)


def write_digest(config: dict[str, Any], variables: list[Any]) -> None:
    import numpy as np

    digest = hashlib.sha256()
    for variable in variables:
        digest.update(np.asarray(variable).tobytes())
    rank = train.get_context().get_world_rank()
    Path(config["folder"], f"digest-{rank}").write_text(digest.hexdigest())


PROGRAM = ray_train.train_on_worker


class Nodes:
    """The nodes of the cluster, each with some processors, besides one that trains nothing."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: list[tuple[Any, int]] = []
        ray.init(address=self._cluster.address, logging_level="warning")

    def set(self, *cpus: int) -> None:
        """Has nodes with these numbers of processors; those that fit stay."""
        missing = [*cpus]
        for node, number in [*self._nodes]:
            if number in missing:
                missing.remove(number)
            else:
                self.remove(node.node_id, graceful=True)
        for number in missing:
            self.add(number)

    def add(self, cpus: int = 1) -> None:
        node = self._cluster.add_node(num_cpus=cpus, object_store_memory=STORE)
        self._nodes.append((node, cpus))

    def remove(self, node_id: str, graceful: bool = False) -> None:
        (found,) = [pair for pair in self._nodes if pair[0].node_id == node_id]
        self._nodes.remove(found)
        self._cluster.remove_node(found[0], allow_graceful=graceful)


def run(
    folder: Path,
    program: Callable[..., None],
    scaling: dict[str, Any],
    events: Sequence[tuple[int, int, int, str]] = (),
    happens: Callable[[str, str], None] = lambda event, node: None,
    failures: int = 3,
) -> dict[str, Any]:
    """Trains until the end; returns what a user sees, and the seconds.

    Args:
        folder: Where everything is written.
        program: What each worker runs.
        scaling: Arguments of Ray's ``ScalingConfig``.
        events: The workers, the rank and the step after which something happens, and what.
        happens: Makes it happen to a node.
        failures: Ray's ``max_failures``.
    """
    folder.mkdir()
    ray_train.train_on_worker = program
    trainer = ray_train.trainer(str(folder), **scaling)
    trainer.train_loop_config |= {"folder": str(folder), "events": list(events)}
    trainer.run_config.failure_config = FailureConfig(max_failures=failures)
    raised: list[Exception] = []
    results: list[Any] = []

    def fit() -> None:
        try:
            results.append(trainer.fit())
        except Exception as error:
            raised.append(error)

    # Ray adds nodes in the main thread only.
    began, training = time.time(), threading.Thread(target=fit)
    training.start()
    for number, (*place, event) in enumerate(events):
        while training.is_alive() and not (folder / f"done-{number}").exists():
            time.sleep(0.1)
        if event != "kill" and training.is_alive():
            rows = [line.split() for line in (folder / "steps").read_text().splitlines()]
            (node, *_) = [row[3] for row in rows[::-1] if [*map(int, row[:3])] == place]
            happens(event, node)
    training.join()
    seconds = time.time() - began
    steps = [line.split() for line in (folder / "steps").read_text().splitlines()]
    reported = [row for result in results for _, row in result.best_checkpoints]
    return {
        "digests": sorted(path.read_text() for path in folder.glob("digest-*")),
        "starts": starts(steps),
        "epochs": [row["epoch"] for row in reported],
        "losses": [row["loss"] for row in reported],
        "error": "".join(f"{type(error).__name__}: {error}" for error in raised),
        "seconds": seconds,
    }


def starts(steps: list[list[str]]) -> list[tuple[int, int, float]]:
    """Returns for each start the workers, its first step, and when that was made."""
    found: list[tuple[int, int, float]] = []
    before = (0, 99)
    for workers, rank, step, _, at in steps:
        now = int(workers), int(step)
        if rank == "0":
            if now[0] != before[0] or now[1] != before[1] + 1:
                found.append((*now, float(at)))
            before = now
    return found


def main(folder: Path, names: list[str]) -> None:
    nodes = Nodes()

    def happens(event: str, node: str) -> None:
        if "remove" in event:
            nodes.remove(node)
        if "add" in event:
            nodes.add()

    elastic = {"num_workers": (1, 2), "elastic_resize_monitor_interval_s": 5.0}
    runs: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
        "one": ((1,), {"program": by_keras, "scaling": {"num_workers": 1}}),
        "killed": (
            (1, 1),
            {"program": by_keras, "scaling": {"num_workers": 2}, "events": [(2, 1, 5, "kill")]},
        ),
        "removed and added": (
            (1, 1),
            {
                "program": by_keras,
                "scaling": elastic,
                "events": [(2, 1, 5, "remove"), (1, 0, 9, "add")],
            },
        ),
        "replaced": (
            (1, 1),
            {"program": by_keras, "scaling": elastic, "events": [(2, 1, 5, "remove add")]},
        ),
        "two of four": (
            (2, 2),
            {
                "program": by_keras,
                "scaling": {**elastic, "num_workers": (2, 4)},
                "events": [(4, 3, 5, "remove")],
            },
        ),
        "by hand on one": ((1,), {"program": by_hand, "scaling": {"num_workers": 1}}),
        "by hand": (
            (1, 1),
            {"program": by_hand, "scaling": elastic, "events": [(2, 0, 5, "remove")]},
        ),
        "no failure allowed": (
            (1,),
            {
                "program": by_hand,
                "scaling": {"num_workers": 1},
                "events": [(1, 0, 5, "kill")],
                "failures": 0,
            },
        ),
    }
    results = {}
    for name in names or runs:
        cpus, arguments = runs[name]
        nodes.set(*cpus)
        results[name] = run(folder / name, happens=happens, **arguments)
        print(name, json.dumps(results[name], indent=1), flush=True)
        (folder / "results.json").write_text(json.dumps(results))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
