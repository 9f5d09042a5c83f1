"""Finding the first layer or loss whose result depends on the cut, and the line to write."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfmultigpu._patch import patching
from tfmultigpu.addons.verification.compare import Quantity, Verification, furthest
from tfmultigpu.addons.verification.one_device import OneDevice, Step, dense
from tfmultigpu.addons.verification.putting_back import putting_back
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import any_rows, cast_all
from tfmultigpu.steps.assignments import DeferredAssignments
from tfmultigpu.steps.batches import cut_batch, shards_of
from tfmultigpu.steps.features.draws import sharing_seeds
from tfmultigpu.steps.features.micro_batches import MicroBatches
from tfmultigpu.steps.replicas import on_replicas, tracing_model
from tfmultigpu.steps.values import Rows, Trace
from tfmultigpu.strategies.topology import local_replicas
from tfmultigpu.types import Array, Function, KerasLayer, Nested, Shard, Tensor

_ROWS = 4  # Of each replica.
_LOSS = (
    "What is computed for a row, its loss included, must depend on that row alone. Write a loss "
    "over the whole batch with tmg.gather_rows(tensor), which returns the rows of all replicas "
    "(docs/coupled-losses.md). Replicas add sums, with what divides them: "
    "tmg.LossSum(tf.reduce_sum(values), tf.size(values)); self.add_loss(values) takes one for each "
    "row."
)
_WEIGHT = (
    "Replicas add the weights of their LossSums, and the sum of losses is divided by that: it is "
    "the number of rows or elements of this replica, not 1 nor that of the global batch. Write "
    "tmg.LossSum(tf.reduce_sum(values), tf.size(values)) with a value for each row."
)
_STATE = (
    "Replicas add sums. Give a metric values of rows, not a mean; in one of your own keep sums and "
    "counts. A layer adds them before it assigns: total, count = "
    "tf.distribute.get_replica_context().all_reduce('SUM', [total, count])."
)
_OWN = (
    "Each replica assigns its own copy, for its own rows. Create the variable by add_variable of a "
    "metric, or by add_weight of a layer, and add over the replicas before you assign: total = "
    "tf.distribute.get_replica_context().all_reduce('SUM', total)."
)
_TABLE = (
    "Each replica writes to the table for its own rows, in turn. Write what does not depend on the "
    "cut: count rows, not calls. Or write once for each global batch, outside of the step: "
    "table.insert(keys, values) in a loop or a callback."
)
_UPDATE = (
    "The loss and the gradient are those of one device. What becomes of the gradient of the global "
    "batch, in on_gradient of a feature or in an optimizer of your own, must not depend on the "
    "replicas."
)
_NORM = (
    "BatchNormalization sees only the rows of its own replica. Write "
    "keras.layers.BatchNormalization(synchronized=True), or for a model you did not write "
    "tmg.synchronize_batch_norm(model)."
)
_DRAWS = (
    "It draws for rows in another order than that of the batch, such as those of "
    "tf.concat([real, fake], 0), or mixes rows. Call the model for each: model(real), model(fake); "
    "mix global batches: dataset.map(lambda x, y: (layer(x, training=True), y))."
)
_LAYER = (
    "It computes with several rows at once. Let it look at one row at a time (axis=-1), apply it "
    "to global batches in dataset.map, or compute it in forward= from the rows of all replicas: "
    "tmg.gather_rows(tensor)."
)
_IN_PARTS = (
    "A layer or loss that computes with several rows at once sees those of one micro-batch. Write "
    "micro_batches=1, or take what looks at one row at a time, such as "
    "keras.layers.GroupNormalization in place of BatchNormalization."
)


def explain(found: Sequence[Quantity], layer: KerasLayer, step: Step) -> tuple[str, str]:
    """Returns the first thing that depends on the cut, and the line to write."""
    import keras

    if layer is not None:
        path = getattr(layer, "path", None) or getattr(layer, "name", "")
        advice = _LAYER
        if getattr(layer, "seed_generator", None) is not None:
            advice = _DRAWS
        elif isinstance(layer, keras.layers.BatchNormalization):
            advice = _NORM
        return f"{type(layer).__name__} {path!r}", advice
    # On one device it would be another number, which no layer can change.
    if any(quantity.key == "weight" for quantity in found):
        return "the weight of the loss", _WEIGHT
    kind = name = ""
    if found:
        kind, name = found[0].key.split()[0], found[0].name
    known = {"state": _STATE, "own": _OWN, "table": _TABLE, "update": _UPDATE}
    if kind in known:
        return name, known[kind]
    if any(isinstance(feature, MicroBatches) for feature in step.features):
        return "", _IN_PARTS
    if kind == "gradient_norm":  # All layers agree.
        name = ""
    return name, _LOSS


def explain_norms(layers: Sequence[KerasLayer]) -> Verification:
    """Returns what to say of layers that normalize by the rows of their replica."""
    culprit = f"{type(layers[0]).__name__} {layers[0].path!r}"
    if len(layers) > 1:
        culprit += f" and {len(layers) - 1} more"
    difference = "each replica normalizes by the mean and variance of its own rows"
    return Verification("different", "", (difference,), culprit, _NORM)


def locate(
    step: Step, device: OneDevice, join: Function, local: list[Shard], offsets: Array, bound: float
) -> KerasLayer:
    """Returns the first layer or operation of Keras that depends on the cut; None if all agree.

    It runs a forward pass over a few rows in one piece and cut, and compares layer by layer; all
    workers call it. With the weights as they are now: what depends on the cut does so with any.
    """
    counts = np.minimum(np.diff(offsets), _ROWS)
    few: list[Shard] = []
    for number, shard in zip(local_replicas(step.strategy), local, strict=True):
        few.append(partition.slice_rows(shard, 0, int(counts[number])))
    places = tf.constant(np.insert(np.cumsum(counts), 0, 0), tf.int64)
    batch = cut_batch(device.twin.strategy, join(few))
    layers, ((_, _, whole),) = _outputs(step, device.twin, *batch)
    others, pieces = _outputs(step, step, few, places)
    if layers != others:
        return None
    for number, layer in enumerate(layers):
        for first, count, outputs in pieces:
            place = first, first + count, int(places[-1])
            if not _agrees(whole[number], outputs[number], place, bound):
                return layer
    return None


def _outputs(
    step: Step, runs: Step, local: list[Shard], offsets: Tensor
) -> tuple[list[KerasLayer], Nested]:
    """Returns the layers that are called; for each shard its place, and their outputs."""
    import keras

    layers: list[KerasLayer] = []  # For each output of the last trace.

    def replica(shard: Shard, rows: Rows, *_: object, trace: Trace) -> Nested:
        graph, kept = tf.compat.v1.get_default_graph(), []
        layers.clear()

        def call(original: Function, layer: KerasLayer, *args: object, **kwargs: object) -> Nested:
            result = original(layer, *args, **kwargs)
            for tensor in dense(result):
                if tensor.graph is graph:
                    layers.append(layer)
                    kept.append(tensor)
            return result

        # Keras offers no access to the outputs of layers inside a subclassed model.
        tracing = tracing_model(runs, rows)
        noting = patching(keras.Operation, "__call__", call)
        with tracing, DeferredAssignments((), rows.counts()), noting:
            step.run_model(shard)
        return rows.first, rows.count, cast_all(kept, tf.float64)

    def run(local: list[Shard], offsets: Tensor) -> Nested:
        phase: Function = functools.partial(on_replicas, runs.strategy, replica)
        for feature in runs.features:
            if not isinstance(feature, MicroBatches):  # In one part.
                phase = feature.around_phase(phase)
        with sharing_seeds(step.strategy):
            return phase(shards_of(runs.strategy, local, offsets), Trace())

    specs = tf.nest.map_structure(any_rows, (local, offsets))
    concrete = tf.function(run, autograph=False).get_concrete_function(*specs)
    with putting_back(step, concrete):
        outputs = concrete(local, offsets)
    return layers, tf.nest.map_structure(lambda tensor: tensor.numpy(), outputs)


def _agrees(whole: Array, piece: Array, place: tuple[int, int, int], bound: float) -> bool:
    """Returns whether a piece has the values of these rows in the whole."""
    begin, end, rows = place
    candidates = [whole]
    if whole.ndim and whole.shape[0] and whole.shape[0] % rows == 0:
        # Several rows of a layer for one of the batch: side by side, or block after block.
        times = whole.shape[0] // rows
        blocks = whole.reshape(times, rows, *whole.shape[1:])[:, begin:end]
        candidates += [whole[begin * times : end * times], blocks.reshape(-1, *whole.shape[1:])]
    return any(furthest(each, piece, bound) is None for each in candidates)
