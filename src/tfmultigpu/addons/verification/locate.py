"""Finding the first draw, layer or loss that depends on the cut, and the line to write."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmultigpu._patch import patching
from tfmultigpu.addons.verification.compare import Quantity, Verification, furthest
from tfmultigpu.addons.verification.one_device import OneDevice, Step, dense
from tfmultigpu.addons.verification.putting_back import putting_back
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import any_rows, cast_all
from tfmultigpu.steps.assignments import DeferredAssignments, is_added
from tfmultigpu.steps.batches import cut_batch, shards_of
from tfmultigpu.steps.features.draws import sharing_seeds, watching_draws
from tfmultigpu.steps.features.micro_batches import MicroBatches
from tfmultigpu.steps.replicas import for_all_replicas, tracing_model
from tfmultigpu.steps.values import Rows, Trace
from tfmultigpu.strategies.topology import local_replicas
from tfmultigpu.strategies.worker_exchange import WorkerExchange
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
_SUMMED = (
    "The values of all replicas are added, because it has aggregation='sum', and each contains the "
    "value before. Write weight.assign_add(value) with a value of the rows of this replica; or "
    "leave aggregation out, and add over the replicas before you assign: total = "
    "tf.distribute.get_replica_context().all_reduce('SUM', total)."
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
_BLOCKS = (
    "A replica takes the entries of one row to lie side by side, and in tf.concat([fake, real], 0) "
    "they are a batch apart. Draw once for each part, with rows = tf.shape(x)[0]: "
    "tf.concat([keras.random.normal((rows, 4), seed=seeds) for _ in range({times})], 0)."
)
_REST = (
    "A replica draws the first of these numbers, not those of its rows. Draw for the rows alone, "
    "keras.random.normal((rows, 4), seed=seeds) with rows = tf.shape(x)[0], and by a call of its "
    "own what belongs to no row."
)
_GENERATOR = (
    "Each replica draws by a state of its own. Create seeds = keras.random.SeedGenerator(1) in the "
    "scope, and write keras.random.normal((rows, 4), seed=seeds): each replica then draws the rows "
    "of one device."
)
_OF_GENERATOR = "RngReadAndSkip"  # The operation by which it counts on.
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


@dataclasses.dataclass(frozen=True)
class Culprit:
    """The part of a step that depends on the cut, as a forward pass over a few rows shows it.

    Attributes:
        layer: The first layer or operation of Keras that does; None if all agree.
        draw: A draw that is not of the rows of its replica, in words; "" for none.
        advice: The line to write in place of the draw.
    """

    layer: KerasLayer = None
    draw: str = ""
    advice: str = ""


def explain(found: Sequence[Quantity], culprit: Culprit, step: Step) -> tuple[str, str]:
    """Returns the first thing that depends on the cut, and the line to write."""
    import keras

    if culprit.draw:
        return culprit.draw, culprit.advice
    layer = culprit.layer
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
    if kind == "state" and is_added(step.runner.trace.state[int(found[0].key.split()[1])]):
        return name, _SUMMED
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


class _Piece(NamedTuple):
    """The results of a forward pass over some rows.

    Attributes:
        first: The number of the first row.
        rows: How many rows there are.
        outputs: What the layers returned, in order.
        sums: The sum of each term of the loss.
        sizes: For each draw whose first axis is open the length of that.
    """

    first: Array
    rows: Array
    outputs: list[Array]
    sums: list[Array]
    sizes: list[Array]


@dataclasses.dataclass(frozen=True)
class _Passes:
    """The forward passes of all replicas of this process, or of one device.

    Attributes:
        layers: The layers that were called, for each of the outputs.
        draws: For each draw the line of the user that makes it.
        pieces: One for each replica.
    """

    layers: list[KerasLayer]
    draws: list[str]
    pieces: list[_Piece]


def locate(
    step: Step, device: OneDevice, join: Function, local: list[Shard], offsets: Array, bound: float
) -> Culprit:
    """Returns the first draw, layer or operation of Keras that depends on the cut.

    It runs a forward pass over a few rows in one piece and cut, and compares layer by layer; all
    workers call it. With the weights as they are now: what depends on the cut does so with any.
    """
    counts = np.minimum(np.diff(offsets), _ROWS)
    few: list[Shard] = []
    for number, shard in zip(local_replicas(step.strategy), local, strict=True):
        few.append(partition.slice_rows(shard, 0, int(counts[number])))
    places = tf.constant(np.insert(np.cumsum(counts), 0, 0), tf.int64)
    batch = cut_batch(device.twin.strategy, join(few))
    exchange = WorkerExchange(step.strategy)

    def forward() -> tuple[_Passes, _Passes]:
        return _forward(step, device.twin, *batch), _forward(step, step, few, places)

    one, cut = exchange.together("a forward pass over a few rows", forward)
    if cut.layers != one.layers:
        return Culprit()
    # Workers have other rows, and what they exchange next depends on what all of them see.
    number = exchange("the first layer apart", [_first_apart(one, cut, bound)]).min()
    layer = [*one.layers, None][number]
    is_draw = getattr(layer, "seed_generator", None) is not None
    if is_draw or cut.draws != one.draws:
        return Culprit(layer)

    for place, (times, added) in zip(one.draws, _lengths(exchange, one, cut), strict=True):
        if times > 0 and added:
            sign = "-" if added < 0 else "+"
            draw = f"the draw in {place}, whose first axis is {times} * rows {sign} {abs(added)}"
            return Culprit(draw=draw.replace(" 1 * rows", " rows"), advice=_REST)
        if times > 1:
            # Nothing tells how its rows lie, so it is tried: all workers find the same draws.
            in_blocks = functools.partial(_forward, step, step, few, places, in_blocks=True)
            blocks = exchange.together("a forward pass in blocks", in_blocks)
            before, after = (_sums_apart(exchange, one, passes) for passes in (cut, blocks))
            if before > 16.0 * bound**2 and before > 16.0 * after:
                draw = f"the draw in {place}, whose first axis is {times} * rows"
                return Culprit(draw=draw, advice=_BLOCKS.format(times=times))
            break
    if any(_OF_GENERATOR in state.operation for state in step.runner.touched.states):
        return Culprit(draw="a draw of tf.random.Generator", advice=_GENERATOR)
    return Culprit(layer)


def _first_apart(one: _Passes, cut: _Passes, bound: float) -> int:
    """Returns the number of the first layer of which a replica has other values than one device.

    The number of all layers, if none has.
    """
    (whole,) = one.pieces
    for number in range(len(one.layers)):
        for piece in cut.pieces:
            place = int(piece.first), int(piece.first + piece.rows), int(whole.rows)
            if not _agrees(whole.outputs[number], piece.outputs[number], place, bound):
                return number
    return len(one.layers)


def _lengths(exchange: WorkerExchange, one: _Passes, cut: _Passes) -> list[tuple[int, int]]:
    """Returns ``_length`` of each draw, or zeros if workers find another; all workers call it."""
    lengths: list[tuple[int, int]] = []
    for number in range(len(one.draws)):
        lengths.append(_length(one, cut, number))
    told = exchange("the lengths of draws", [size for pair in lengths for size in pair])
    for number in range(len(lengths)):
        of_draw = told[:, 2 * number : 2 * number + 2]
        if (of_draw != of_draw[0]).any():
            lengths[number] = 0, 0
    return lengths


def _length(one: _Passes, cut: _Passes, number: int) -> tuple[int, int]:
    """Returns how many times the rows, and how many more, a draw has on its first axis.

    Zeros, if that is not the same for all: then it is not a draw for rows.
    """
    (whole,), piece = one.pieces, cut.pieces[0]
    size, rows = int(whole.sizes[number]), int(whole.rows)
    if piece.rows == rows:  # One replica, which computes micro-batches.
        return 0, 0
    times = (size - int(piece.sizes[number])) // (rows - int(piece.rows))
    added = size - times * rows
    for piece in cut.pieces:
        if piece.sizes[number] != times * piece.rows + added:
            return 0, 0
    return times, added


def _sums_apart(exchange: WorkerExchange, one: _Passes, cut: _Passes) -> float:
    """Returns how far the added losses of all replicas are from one device's; all workers call it.

    It is relative to the largest.
    """
    whole = np.asarray(one.pieces[0].sums)
    here = np.sum([piece.sums for piece in cut.pieces], axis=0)
    everywhere = exchange.floats("the loss of a few rows", here)
    apart = np.abs(everywhere.sum(axis=0) - whole)
    return float(np.max(apart, initial=0.0) / max(np.max(np.abs(whole), initial=0.0), 1e-30))


def _forward(
    step: Step, runs: Step, local: list[Shard], offsets: Tensor, *, in_blocks: bool = False
) -> _Passes:
    """Runs the model on shards.

    Args:
        step: The step on the replicas.
        runs: The step that runs, the same or its twin on one device.
        local: The shards of this process.
        offsets: The offsets of all shards.
        in_blocks: How the entries of draws are taken to lie, as of ``watching_draws``.
    """
    import keras

    layers: list[KerasLayer] = []  # For each output of the last trace.
    draws: list[str] = []

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
        watching = watching_draws(in_blocks=in_blocks)
        with watching as drawn, tracing, DeferredAssignments((), rows.counts()), noting:
            sums = step.run_model(shard)
        # A size inside of a loop or a branch does not leave it.
        seen = [draw for draw in drawn if draw.size.graph is graph]
        draws[:] = [draw.place for draw in seen]
        sizes = cast_all([draw.size for draw in seen], tf.int64)
        outputs, losses = cast_all(kept, tf.float64), cast_all(sums, tf.float64)
        return _Piece(rows.first, rows.count, outputs, losses, sizes)

    def run(local: list[Shard], offsets: Tensor) -> Nested:
        in_one_part = [part for part in runs.features if not isinstance(part, MicroBatches)]
        with sharing_seeds(step.strategy), runs.around_trace():
            phase = for_all_replicas(runs, replica, in_one_part)
            return phase(shards_of(runs.strategy, local, offsets), Trace())

    specs = tf.nest.map_structure(any_rows, (local, offsets))
    concrete = tf.function(run, autograph=False).get_concrete_function(*specs)
    with putting_back(step, concrete):
        pieces = concrete(local, offsets)
    return _Passes(layers, draws, tf.nest.map_structure(lambda tensor: tensor.numpy(), pieces))


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
