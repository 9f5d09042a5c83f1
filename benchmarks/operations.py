"""Counts the operations of a step after TensorFlow's own optimisation: ours and by hand.

``python benchmarks/operations.py`` prints a line for each configuration, and with ``--kinds`` how
many operations of each kind ours has more. A GPU step of many small operations takes as long as the
host needs to start them, so their number is what can be compared without a GPU. The numbers do not
depend on how busy a machine is.

Both train one transformer on the same batches, whose number of rows TensorFlow knows; ours computes
the norm of the gradient besides, for its logs, but for ``fit``, whose loop is held to one by hand.
Constants and operations that only order others are left out: nothing is run for them.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

ROWS, LENGTH, WORDS, CLASSES = 16, 16, 100, 10
CLIP_NORM = 1.0
NOT_RUN = ("Const", "NoOp")
OPTIONS = ("clipped", "scaled", "metrics")  # Each by itself, and all together.
CASES = {"plain": (), "fit": (), **{option: (option,) for option in OPTIONS}, "all": OPTIONS}
RECORD = Path(__file__).parents[1] / "build" / "operations.json"

Kinds = collections.Counter[str]


def main() -> int:
    """Returns 0, or 1 if ours has more than 1.01 times the operations of a loop by hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--precision", nargs="+", default=["float32", "mixed_bfloat16"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--kinds", action="store_true", help="what ours has more, by kind")
    asked = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    RECORD.parent.mkdir(exist_ok=True)
    is_more = False
    with RECORD.open("w") as file:
        for replicas, precision in itertools.product(asked.replicas, asked.precision):
            arguments = replicas, precision, asked.cases, asked.layers
            with get_context("spawn").Pool(1) as pool:
                counts = pool.apply(measure, arguments)
            for case, (by_hand, ours) in counts.items():
                ratio = ours.total() / by_hand.total()
                is_more |= ratio > 1.01
                name = f"N = {replicas}, {precision}, {case}"
                counted_both = f"{by_hand.total()} by hand, {ours.total()} ours"
                print(f"{name}: {counted_both}, {ratio:.3f}", flush=True)
                record = {"case": name, "by hand": by_hand, "ours": ours}
                file.write(json.dumps(record) + "\n")
                if asked.kinds:
                    print(*_differences(by_hand, ours), sep="\n")
    return int(is_more)


def measure(
    replicas: int, precision: str, cases: list[str], layers: int
) -> dict[str, tuple[Kinds, Kinds]]:
    """Returns for each case the operations by hand and of ours; call it in a new process."""
    import keras

    import tfmultigpu as tmg
    from tfmultigpu.steps import batches

    batches._forced = True  # As on a GPU.
    if replicas > 1:
        tmg.split_device("CPU:0", parts=replicas)
    keras.mixed_precision.set_dtype_policy(precision)
    strategy = tmg.create_strategy(devices=replicas)
    counts: dict[str, tuple[Kinds, Kinds]] = {}
    for case in cases:
        by_hand = counted(_by_hand(strategy, CASES[case], layers, loops=case == "fit"))
        ours = _fit if case == "fit" else _ours
        counts[case] = by_hand, counted(ours(strategy, CASES[case], layers))
    return counts


def counted(call: Callable[[], Any]) -> Kinds:
    """Returns how many operations of each kind the largest function of a first call runs."""
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as folder:
        writer = tf.summary.create_file_writer(folder)
        tf.summary.trace_on(graph=True, profiler=False)
        call()
        with writer.as_default():
            tf.summary.trace_export("step", step=0)
        writer.close()
        graphs = [_kinds(graph) for graph in _graphs_in(Path(folder))]
    return max(graphs, key=collections.Counter.total)


def _graphs_in(folder: Path) -> Iterator[Any]:
    import tensorflow as tf

    files = [str(file) for file in folder.iterdir()]
    for record in tf.data.TFRecordDataset(files).as_numpy_iterator():
        event = tf.compat.v1.Event.FromString(record)
        for value in event.summary.value:
            metadata = tf.compat.v1.RunMetadata.FromString(value.tensor.string_val[0])
            yield from metadata.function_graphs


def _kinds(function: Any) -> Kinds:
    """Returns the kinds of one function, as it is cut between the devices to be run."""
    kinds: Kinds = collections.Counter()
    for partition in function.partition_graphs:
        kinds.update(node.op for node in partition.node)
    for kind in NOT_RUN:
        del kinds[kind]
    return kinds


def _differences(by_hand: Kinds, ours: Kinds) -> Iterator[str]:
    kinds = sorted(by_hand | ours, key=lambda kind: by_hand[kind] - ours[kind])
    for kind in kinds:
        if by_hand[kind] != ours[kind]:
            more = ours[kind] - by_hand[kind]
            yield f"    {more:+6} {kind}: {by_hand[kind]} by hand, {ours[kind]} ours"


# The contenders -----------------------------------------------------------------------------------


def _model(layers: int) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    ids = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, 64)(ids)
    for _ in range(layers):
        attended = keras.layers.MultiHeadAttention(4, 16)(x, x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(0.1)(attended))
        hidden = keras.layers.Dense(128, "gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(64)(hidden))
    pooled = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(ids, keras.layers.Dense(CLASSES, dtype="float32")(pooled))


def _dataset() -> Any:
    import tensorflow as tf

    random = np.random.default_rng(0)
    x = random.integers(0, WORDS, (ROWS, LENGTH), dtype=np.int32)
    y = random.integers(0, CLASSES, ROWS, dtype=np.int32)
    return tf.data.Dataset.from_tensors((x, y)).repeat()


def _ours(strategy: Any, options: tuple[str, ...], layers: int) -> Callable[[], Any]:
    import keras

    import tfmultigpu as tmg

    with strategy.scope():
        model, optimizer = _model(layers), keras.optimizers.Adam()
        metrics = [keras.metrics.SparseCategoricalAccuracy()] if "metrics" in options else []
    step = tmg.make_train_step(
        model,
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        strategy,
        metrics=metrics,
        clip_norm=CLIP_NORM if "clipped" in options else None,
        loss_scale="dynamic" if "scaled" in options else None,
        verify=False,
        shard_update=False,  # By hand each replica updates all variables, too.
    )
    batches = iter(tmg.distribute_dataset(_dataset(), strategy))
    return lambda: step(next(batches))


def _fit(strategy: Any, options: tuple[str, ...], layers: int) -> Callable[[], Any]:
    import keras

    import tfmultigpu as tmg

    with strategy.scope():
        model = _model(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(), loss)
    options_of_fit = {"steps_per_epoch": 1, "verbose": 0, "verify": False, "shard_update": False}
    return lambda: tmg.fit(model, _dataset(), **options_of_fit)


def _by_hand(
    strategy: Any, options: tuple[str, ...], layers: int, *, loops: bool
) -> Callable[[], Any]:
    import keras
    import tensorflow as tf

    with strategy.scope():
        model, optimizer = _model(layers), keras.optimizers.Adam()
        if "scaled" in options:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        optimizer.build(model.trainable_variables)
        metric = keras.metrics.SparseCategoricalAccuracy()
    sums_once = "clipped" in options and strategy.num_replicas_in_sync > 1
    if sums_once:  # Keras would add over the replicas what was added and clipped.
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        inner._all_reduce_sum_gradients = lambda gradients: gradients

    def replica(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = tf.reduce_sum(losses) / ROWS
            target = optimizer.scale_loss(loss) if "scaled" in options else loss
        gradients = tape.gradient(target, model.trainable_variables)
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        if sums_once:
            gradients = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
        if "clipped" in options:
            limit = CLIP_NORM
            if "scaled" in options:  # The optimizer divides by the scale.
                limit = CLIP_NORM * tf.convert_to_tensor(optimizer.dynamic_scale)
            gradients, _ = tf.clip_by_global_norm(gradients, limit)
        optimizer.apply(gradients)
        if "metrics" in options:
            metric.update_state(y, logits)
        return loss

    @tf.function
    def step(x: Any, y: Any) -> Any:
        losses = strategy.run(replica, args=(x, y))
        return strategy.reduce("SUM", losses, axis=None)

    @tf.function
    def steps(iterator: Any, count: Any) -> Any:
        loss = tf.zeros([])
        for _ in tf.range(count):
            loss = step(*next(iterator))
        return loss

    batches = iter(strategy.experimental_distribute_dataset(_dataset()))
    if loops:
        return lambda: steps(batches, tf.constant(1))
    return lambda: step(*next(batches))


if __name__ == "__main__":
    raise SystemExit(main())
