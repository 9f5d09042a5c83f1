"""Finding the first draw, layer or loss that depends on the cut, and the line to write."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfmultigpu._patch import patching
from tfmultigpu.addons.verification.compare import Quantity, Verification, beyond_bounds
from tfmultigpu.addons.verification.one_device import OneDevice, dense
from tfmultigpu.addons.verification.putting_back import Kept
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import any_rows, cast_all, count_rows
from tfmultigpu.lists import of_type
from tfmultigpu.steps.assignments import DeferredAssignments, is_added
from tfmultigpu.steps.batches import cut_batch, shards_of
from tfmultigpu.steps.features.draws import sharing_seeds, watching_draws
from tfmultigpu.steps.features.logical_replicas import LogicalReplicas
from tfmultigpu.steps.features.micro_batches import MicroBatches
from tfmultigpu.steps.replicas import for_all_replicas, tracing_model
from tfmultigpu.steps.tally import OF_GRADIENT
from tfmultigpu.steps.values import Phase, Rows, Shards, Trace
from tfmultigpu.strategies.topology import local_replicas
from tfmultigpu.strategies.worker_exchange import WorkerExchange
from tfmultigpu.types import Array, Function, KerasLayer, Nested, Shard, Tensor

_ROWS = 4  # Of each replica.
_LOSS = (
    "What is computed for a row, its loss included, must depend on that row alone. Write a loss "
    "over the whole batch with tmg.gather_rows(tensor), which returns the rows of all replicas "
    "(docs/coupled-losses.md). Replicas add sums, with what divides them: "
    "tmg.LossSum(tf.reduce_sum(values), tf.size(values))."
)
_ADDED = (
    "self.add_loss(values) takes one for each row; or one number for the batch, which is alike on "
    "all replicas if it is computed from the rows of all of them: write every = "
    "tmg.gather_rows(tensor) in the layer, and compute with every what looks at several rows."
)
_BACKWARD = (
    "The losses agree, and the gradient does not: something computes with several rows at once on "
    "the way back, such as a custom gradient that clips. Let the gradient of a row depend on that "
    "row alone (axes=-1), or clip that of the global batch: clip_norm=1.0. Write what looks at "
    "several rows with tmg.gather_rows(tensor), which returns the rows of all replicas."
)
_WEIGHT = (
    "Replicas add the weights of their LossSums, and the sum of losses is divided by that: it is "
    "the number of rows or elements of this replica, not 1 nor that of the global batch. Write "
    "tmg.LossSum(tf.reduce_sum(values), tf.size(values)) with a value for each row."
)
_METRIC = (
    "Replicas add the states of metrics. Give a metric values of rows, not a mean; in one of your "
    "own keep sums and counts, and divide in result()."
)
_STATE = (
    "Each replica assigns what it computes from its own rows, and what is kept must be alike on "
    "all replicas. Write every = tmg.gather_rows(tensor) in the layer, which returns the rows of "
    "all replicas, and compute from every what it assigns: "
    "self.mean.assign(tf.reduce_mean(every, 0))."
)
_EACH_PART = (
    "It changes with each micro-batch. Write micro_batches=1; or change it once for each global "
    "batch, outside of the step: layer.steps.assign_add(1) in on_train_batch_begin of a callback, "
    "or in your loop."
)
_SUMMED = (
    "The values of all replicas are added, because it has aggregation='sum', and each contains the "
    "value before. Write weight.assign_add(value) with a value of the rows of this replica; or "
    "leave aggregation out, and add over the replicas before you assign: total = "
    "tf.distribute.get_replica_context().all_reduce('SUM', total)."
)
_OWN = (
    "All replicas assign it in turn, or each its own copy. Create the variable by add_variable of "
    "a metric, or by add_weight of a layer, or for a loss or a forward by keras.Variable(0.5, "
    "trainable=False) in strategy.scope(). What it is assigned must be alike on all replicas: "
    "compute what looks at rows from those of all, tmg.gather_rows(tensor)."
)
_OTHER_CODE = (
    "For the same rows the replicas compute something else than one device: each has a trace of "
    "its own, in which Python that counts or draws gives another number, or asks for the number "
    "of its replica. Count in a weight, self.steps = self.add_weight(shape=(), "
    'initializer="zeros", trainable=False) and self.steps.assign_add(1.0); draw by keras.random.'
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
    "Several rows meet in it, and a replica has only some. Let it look at one row at a time "
    "(axis=-1), apply it to global batches in dataset.map, or compute it with the rows of all "
    "replicas, every = tmg.gather_rows(tensor), and so what it assigns."
)
_ONE_PART = "A micro-batch has only some rows, too, so write micro_batches=1 first. "
_IN_PARTS = (
    "A layer or loss that computes with several rows at once sees those of one micro-batch. Write "
    "micro_batches=1, or take what looks at one row at a time, such as "
    "keras.layers.GroupNormalization in place of BatchNormalization."
)


class _Point(NamedTuple):
    """A place in a forward pass: what a layer returns, or is given."""

    layer: KerasLayer
    is_input: bool


@dataclasses.dataclass(frozen=True)
class Culprit:
    """The part of a step that depends on the cut, as a forward pass over a few rows shows it.

    Attributes:
        layer: The first layer or operation of Keras that does; None if all agree.
        is_input: Whether what it is given does already, which no layer computes.
        is_of_rows: Whether one device gives another output for some rows than for all, too.
        adds: The first layer that does in what it adds to the loss; None if all agree.
        draw: A draw that is not of the rows of its replica, in words; "" for none.
        advice: The line to write in place of the draw.
    """

    layer: KerasLayer = None
    is_input: bool = False
    is_of_rows: bool = True
    adds: KerasLayer = None
    draw: str = ""
    advice: str = ""

    @property
    def draws(self) -> bool:
        """Whether it is a layer that draws random numbers, such as dropout."""
        return not self.is_input and getattr(self.layer, "seed_generator", None) is not None


def explain(found: Sequence[Quantity], culprit: Culprit, device: OneDevice) -> tuple[str, str]:
    """Returns the first thing that depends on the cut, and the line to write.

    A variable that is assigned comes before the layer that reads it, and a layer before what is
    computed from it.
    """
    first: dict[str, Quantity] = {}
    for quantity in found:
        first.setdefault(quantity.kind, quantity)
    in_parts = any(isinstance(feature, MicroBatches) for feature in device.step.features)
    one_part = _ONE_PART if in_parts else ""

    if culprit.draw:
        return culprit.draw, culprit.advice
    if "own" in first:
        alone = device.strategy.num_replicas_in_sync == 1
        return first["own"].name, _EACH_PART if alone else _OWN
    if culprit.layer is not None:
        name = _shown(culprit.layer)
        if culprit.is_input:
            name = f"the input of {name}"
        return name, one_part + _advice_on(culprit)
    if culprit.adds is not None:
        return f"what {_shown(culprit.adds)} adds to the loss", one_part + _ADDED
    # On one device it would be another number, which no layer can change.
    if "weight" in first:
        return "the weight of the loss", _WEIGHT
    # All layers agree: with micro-batches they do so in one part.
    if in_parts and "state" in first:
        return first["state"].name, _EACH_PART
    kind = name = ""
    if found:
        kind, name = found[0].kind, found[0].name
    if kind == "state" and is_added(device.states[int(found[0].key.split()[1])]):
        return name, _SUMMED
    known = {"state": _STATE, "metric": _METRIC, "table": _TABLE, "update": _UPDATE}
    if kind in known:
        return name, known[kind]
    if in_parts:
        return "", _IN_PARTS
    if kind in OF_GRADIENT:
        return "", _BACKWARD
    return name, _LOSS


def _advice_on(culprit: Culprit) -> str:
    """Returns the line to write in place of a layer."""
    if culprit.draws:
        return _DRAWS
    if isinstance(culprit.layer, keras.layers.BatchNormalization) and not culprit.is_input:
        return _NORM
    return _LAYER if culprit.is_of_rows else _OTHER_CODE


def _shown(layer: KerasLayer) -> str:
    path = getattr(layer, "path", None) or getattr(layer, "name", "")
    return f"{type(layer).__name__} {path!r}"


def explain_norms(layers: Sequence[KerasLayer]) -> Verification:
    """Returns what to say of layers that normalize by the rows of their replica."""
    culprit = _shown(layers[0])
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
        added: What each call of ``add_loss`` adds to that.
        sizes: For each draw whose first axis is open the length of that.
    """

    first: Array
    rows: Array
    outputs: list[Array]
    sums: list[Array]
    added: list[Array]
    sizes: list[Array]


@dataclasses.dataclass(frozen=True)
class _Passes:
    """The forward passes of all replicas of this process, or of one device.

    Attributes:
        points: What layers were given or returned, for each of the outputs.
        adders: The layers that add to the loss, for each call of ``add_loss``.
        draws: For each draw the line of the user that makes it.
        run: Computes the pieces for some shards and their offsets.
        pieces: One for each replica, or logical replica.
    """

    points: list[_Point]
    adders: list[KerasLayer]
    draws: list[str]
    run: Callable[[list[Shard], Tensor], list[_Piece]]
    pieces: list[_Piece]


def locate(
    step: Any, device: OneDevice, join: Function, local: list[Shard], offsets: Array, bound: float
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
    if (cut.points, cut.adders) != (one.points, one.adders):
        return Culprit()
    adds = None
    for adder, apart in zip(one.adders, _apart(exchange, one, cut, "added"), strict=True):
        if adds is None and apart > bound:
            adds = adder
    # Workers have other rows, and what they exchange next depends on what all of them see.
    found, order = _first_apart(one, cut, bound)
    first = int(exchange("the first layer apart", [found]).min())

    def meet() -> bool:
        """Returns whether one device shows, for these rows alone, that others are missing."""
        if found != first:
            return True
        piece = cut.pieces[order]
        bounds = tf.cast(tf.stack([piece.first, piece.first + piece.rows]), tf.int64)
        alone = dataclasses.replace(one, pieces=one.run([few[order]], bounds))
        return _first_apart(one, alone, bound)[0] <= first

    culprit = Culprit(adds=adds)
    if first < len(one.points):
        culprit = Culprit(*one.points[first])
    if culprit.layer is not None:
        is_of_rows = exchange.together("a forward pass over the rows of a replica", meet)
        culprit = dataclasses.replace(culprit, is_of_rows=is_of_rows)
    if culprit.draws or cut.draws != one.draws:
        return culprit

    for place, (times, added) in zip(one.draws, _lengths(exchange, one, cut), strict=True):
        if times > 0 and added:
            sign = "-" if added < 0 else "+"
            draw = f"the draw in {place}, whose first axis is {times} * rows {sign} {abs(added)}"
            return Culprit(draw=draw.replace(" 1 * rows", " rows"), advice=_REST)
        if times > 1:
            # Nothing tells how its rows lie, so it is tried: all workers find the same draws.
            in_blocks = functools.partial(_forward, step, step, few, places, in_blocks=True)
            blocks = exchange.together("a forward pass in blocks", in_blocks)
            before, after = (
                max(_apart(exchange, one, passes, "sums"), default=0.0) for passes in (cut, blocks)
            )
            if before > 16.0 * bound**2 and before > 16.0 * after:
                draw = f"the draw in {place}, whose first axis is {times} * rows"
                return Culprit(draw=draw, advice=_BLOCKS.format(times=times))
            break
    if any(_OF_GENERATOR in state.operation for state in step.runner.touched.states):
        return Culprit(draw="a draw of tf.random.Generator", advice=_GENERATOR)
    return culprit


def locate_bits(step: Any, device: OneDevice, whole: Shard) -> Culprit:
    """Returns the first layer of which a logical replica has other bits than on one device.

    It runs a forward pass over a few rows of each; all workers call it.
    """
    rows = min(int(count_rows(whole)), _ROWS * step.logical_replicas)
    few = partition.slice_rows(whole, 0, rows)
    exchange = WorkerExchange(step.strategy)

    def forward() -> tuple[_Passes, _Passes]:
        one = _forward(step, device.twin, *cut_batch(device.twin.strategy, few))
        return one, _forward(step, step, *cut_batch(step.strategy, few))

    one, cut = exchange.together("a forward pass over a few rows", forward)
    if cut.points != one.points:
        return Culprit()
    # Of several workers each has the next ones.
    begin = local_replicas(step.strategy)[0] * len(one.pieces) // step.strategy.num_replicas_in_sync
    alike = one.pieces[begin : begin + len(cut.pieces)]
    found = 0
    while found < len(one.points) and _same_bits(alike, cut.pieces, found):
        found += 1
    first = int(exchange("the first layer apart", [found]).min())
    if first == len(one.points):
        return Culprit()
    return Culprit(*one.points[first])


def _same_bits(pieces: Sequence[_Piece], others: Sequence[_Piece], number: int) -> bool:
    """Returns whether pieces of the same rows have the same values at a point."""
    for piece, other in zip(pieces, others, strict=True):
        if not np.array_equal(piece.outputs[number], other.outputs[number], equal_nan=True):
            return False
    return True


def _first_apart(one: _Passes, cut: _Passes, bound: float) -> tuple[int, int]:
    """Returns the number of the first point at which a piece has other values, and of the piece.

    If all agree, that is the number of points.
    """
    (whole,) = one.pieces
    for number in range(len(one.points)):
        for order, piece in enumerate(cut.pieces):
            place = int(piece.first), int(piece.first + piece.rows), int(whole.rows)
            if not _agrees(whole.outputs[number], piece.outputs[number], place, bound):
                return number, order
    return len(one.points), 0


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


def _apart(
    exchange: WorkerExchange, one: _Passes, cut: _Passes, name: Literal["sums", "added"]
) -> list[float]:
    """Returns how far losses, added over all replicas, are from one device's; for all workers.

    Each is relative to the largest.
    """
    whole = np.asarray(getattr(one.pieces[0], name))
    here = np.sum([getattr(piece, name) for piece in cut.pieces], axis=0)
    everywhere = exchange.floats("the loss of a few rows", here)
    apart = np.abs(everywhere.sum(axis=0) - whole)
    largest = max(np.max(np.abs(whole), initial=0.0), 1e-30)
    return [float(each) for each in apart / largest]


def _forward(
    step: Any, runs: Any, local: list[Shard], offsets: Tensor, *, in_blocks: bool = False
) -> _Passes:
    """Runs the model on shards.

    Args:
        step: The step on the replicas.
        runs: The step that runs, the same or its twin on one device.
        local: The shards of this process.
        offsets: The offsets of all shards.
        in_blocks: How the entries of draws are taken to lie, as of ``watching_draws``.
    """
    points: list[_Point] = []  # For each output of the last trace,
    adders: list[KerasLayer] = []  # and for each loss that a layer adds.
    draws: list[str] = []

    def replica(shard: Shard, rows: Rows, *_: object, trace: Trace) -> Nested:
        graph = tf.compat.v1.get_default_graph()
        kept: list[Tensor] = []
        added: list[Tensor] = []
        points.clear()
        adders.clear()

        def keep(point: _Point, tensors: Nested) -> None:
            for tensor in dense(tensors):
                known = point.is_input and id(tensor) in map(id, kept)
                if tensor.graph is graph and not known:
                    points.append(point)
                    kept.append(tensor)

        def call(original: Function, layer: KerasLayer, *args: object, **kwargs: object) -> Nested:
            keep(_Point(layer, is_input=True), (args, kwargs))
            result = original(layer, *args, **kwargs)
            keep(_Point(layer, is_input=False), result)
            return result

        def add(original: Function, layer: KerasLayer, losses: Nested) -> Nested:
            for tensor in tf.nest.flatten(losses):  # Whole numbers too.
                if isinstance(tensor, tf.Tensor) and tensor.graph is graph:
                    adders.append(layer)
                    # A number is a mean over the rows, values are summed.
                    mean = tf.reduce_mean(tf.cast(tensor, tf.float64))
                    added.append(mean * tf.cast(rows.count, tf.float64))
            return original(layer, losses)

        # Keras offers no access to the outputs of layers inside a subclassed model.
        tracing = tracing_model(runs, rows)
        noting = patching(keras.Operation, "__call__", call)
        adding = patching(keras.layers.Layer, "add_loss", add)
        watching = watching_draws(in_blocks=in_blocks)
        with watching as drawn, tracing, DeferredAssignments((), rows.counts()), noting, adding:
            sums = step.run_model(shard)
        # A size inside of a loop or a branch does not leave it.
        seen = [draw for draw in drawn if draw.size.graph is graph]
        draws[:] = [draw.place for draw in seen]
        sizes = cast_all([draw.size for draw in seen], tf.int64)
        outputs, losses = cast_all(kept, tf.float64), cast_all(sums, tf.float64)
        return _Piece(rows.first, rows.count, outputs, losses, added, sizes)

    def traced(local: list[Shard], offsets: Tensor) -> Nested:
        cutting = MicroBatches, LogicalReplicas
        in_one_part = [part for part in runs.features if not isinstance(part, cutting)]
        with sharing_seeds(step.strategy), runs.around_trace():
            phase = for_all_replicas(runs, replica, in_one_part)
            shards, trace = shards_of(runs.strategy, local, offsets), Trace()
            for dealt in of_type(runs.features, LogicalReplicas):
                return _each_in_turn(dealt, phase, shards, trace)
            return phase(shards, trace)

    specs = tf.nest.map_structure(any_rows, (local, offsets))
    concrete = tf.function(traced, autograph=False).get_concrete_function(*specs)

    def run(local: list[Shard], offsets: Tensor) -> list[_Piece]:
        with Kept(step).putting_back(concrete):
            pieces = concrete(local, offsets)
        numbers: list[_Piece] = tf.nest.map_structure(lambda tensor: tensor.numpy(), pieces)
        return numbers

    return _Passes(points, adders, draws, run, run(local, offsets))


def _each_in_turn(dealt: LogicalReplicas, phase: Phase, shards: Shards, trace: Trace) -> Nested:
    """Returns a piece for each logical replica of this process, in their order."""
    turns: list[Any] = []
    for number in range(dealt.turns):
        before = [[piece.sums[0] for piece in pieces] for pieces in turns]
        turns.append(phase(dealt.part(shards, number, before), trace))
    return [piece for of_replica in zip(*turns, strict=True) for piece in of_replica]


def _agrees(whole: Array, piece: Array, place: tuple[int, int, int], bound: float) -> bool:
    """Returns whether a piece has the values of these rows in the whole."""
    begin, end, rows = place
    candidates = [whole]
    if whole.ndim and whole.shape[0] and whole.shape[0] % rows == 0:
        # Several rows of a layer for one of the batch: side by side, or block after block.
        times = whole.shape[0] // rows
        blocks = whole.reshape(times, rows, *whole.shape[1:])[:, begin:end]
        candidates += [whole[begin * times : end * times], blocks.reshape(-1, *whole.shape[1:])]
    return any(beyond_bounds(each, piece, bound) is None for each in candidates)
