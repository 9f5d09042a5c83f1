"""One compiled function for each kind of batch, however many rows it has and steps a call takes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases.case import EXACT, Case, on_one_device
from law.model import Training, batches_of
from law.pair import Row, dataset_of
from one_device import cut, difference, step_on
from problems import X, Y, crossentropy, mlp, sgd

import tfmultigpu as tmg
from tfmultigpu.steps import batches as batches_module, pace, runner
from tfmultigpu.steps.batches import BatchReader
from tfmultigpu.steps.failures import explaining_failures
from tfmultigpu.steps.program import Programs


def seen_by(*batches: Any) -> tuple[list[Any], list[float]]:
    """The shapes that were traced, and the sums of the batches."""
    shapes: list[Any] = []

    def total(shards: Any, trace: Any) -> Any:
        leaves = tf.nest.flatten(shards.local)
        shapes.append([tuple(leaf.shape) for leaf in leaves])
        return tf.add_n([tf.reduce_sum(leaf) for leaf in leaves])

    alone = tf.distribute.get_strategy()
    reader = BatchReader(alone)
    programs = Programs(reader, (), total)
    sums: list[float] = []
    for batch in batches:
        with explaining_failures(alone):
            program, tensors = programs.of_batch(reader.read(batch))
            sums.append(float(program.run(*tensors)))
    return shapes, sums


def test_the_first_number_of_rows_is_kept_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each shape that is open makes TensorFlow wait."""
    listed = batches_module.tf.config.list_logical_devices

    def devices(kind: str | None = None) -> Any:
        return ["GPU:0"] if kind == "GPU" else listed(kind)

    monkeypatch.setattr(batches_module.tf.config, "list_logical_devices", devices)
    for sizes, sums, traced in (
        ([(4, 2), (4, 2), (3, 2), (1, 2), (4, 2)], [8, 8, 6, 2, 8], [[(4, 2)], [(None, 2)]]),
        ([(4, 2), (4, 3), (3, 5), (2, 7)], [8, 12, 15, 14], [[(4, 2)], [(None, None)]]),
    ):
        assert seen_by(*map(tf.ones, sizes)) == (traced, sums)
    # Where rows do not agree, or there are none, a check tells.
    for batch in ((tf.ones([4, 2]), tf.ones([3])), tf.ones([0, 2])):
        with pytest.raises(tmg.errors.DataError, match=r"differ in their number of rows|no rows"):
            seen_by(batch)


# Fails if a step that takes long is compiled once more in a loop, or ends with other bits there, or
# if one that nothing watches is not compiled in a loop at once.
@pytest.mark.parametrize(("verify", "long", "loops"), [("first", 1e-9, 0), ("first", 1e9, 1),
                                                        (False, 1e-9, 1)])  # fmt: skip
def test_a_step_that_takes_long_has_no_loop(
    monkeypatch: pytest.MonkeyPatch, verify: Any, long: float, loops: int
) -> None:
    monkeypatch.setattr(runner, "LONG", long)
    pair = Row(2, norm=True, options=(("verify", verify),)).pair()
    batches = batches_of((8, 6, 1, 5, 4))
    iterator = iter(dataset_of(lambda: batches, batches[0]))
    logs = pair.step.run(iterator, 3), pair.step.run(iterator, 9)
    assert [int(each["steps"]) for each in logs] == [3, 2]
    at_the_end = pair.step.run(iterator, 9)
    assert int(at_the_end["steps"]) == 0
    assert at_the_end.keys() == logs[0].keys()
    compiled = [loop for loop in pair.step.runner.programs.now.loops if loop.program]
    assert len(compiled) == loops
    pair.reset()
    for shards in dataset_of(lambda: batches, batches[0]):
        pair.step(shards)
    again = pair.ours.values()
    pair.reset()
    pair.step.run(iter(dataset_of(lambda: batches, batches[0])), 5)
    for ours, theirs in zip(pair.ours.values(), again, strict=True):
        np.testing.assert_array_equal(ours, theirs)


# Fails if a cut call is not, to the bit, one call, is traced anew, or takes a batch too many.
def test_calls_that_are_cut_add_up_to_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Row(2, norm=True, options=(("verify", False),)).pair()
    step, sizes, asked = pair.step, (8, 6, 1, 5, 4), []
    passes = dataset_of(lambda: batches_of(sizes), batches_of(sizes)[0])

    def cut(lengths: Any, iterator: Any, steps: int) -> tuple[dict[str, Any], list[np.ndarray]]:
        def in_turn(_: Any) -> int:
            asked.append(next(lengths))
            return asked[-1]

        lengths_in_turn = property(in_turn, lambda self, steps: None)
        monkeypatch.setattr(pace.CallLength, "steps", lengths_in_turn, raising=False)
        pair.reset()
        logs = {name: value.numpy() for name, value in step.run(iterator, steps).items()}
        return logs, pair.ours.values()

    expected, values = cut(iter([1000]), iter(passes.repeat()), 12)
    iterator = iter(passes.repeat())
    logs, cut_values = cut(iter([1, 2, 4, 2, 9]), iterator, 12)
    assert asked[1:] == [1, 2, 4, 2, 9]  # Of which the last had three left.
    assert logs == expected
    for ours, theirs in zip(cut_values, values, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert len(next(iterator)[0]["x"]) == sizes[12 % 5]
    assert len(step.runner.programs.now.loops) == 1
    # Where the data ends in the middle of a call, nothing more is asked for.
    asked.clear()
    assert int(cut(iter([9]), iter(passes), 100)[0]["steps"]) == 5
    assert asked == [9]


# Fails if nothing waits for the check of a batch that is not cut: in micro-batches the loss of it
# failed first, in 38 of 40 steps.
def test_a_batch_whose_rows_differ_is_told_on_one_replica_too() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer, alone = keras.optimizers.SGD(), tf.distribute.get_strategy()
    step = tmg.make_train_step(model, optimizer, "mse", alone, micro_batches=2, verify=False)
    for _ in range(10):
        with pytest.raises(tmg.errors.DataError, match="rows 8, 7"):
            step((np.ones([8, 2], "float32"), np.ones([7, 1], "float32")))


# Fails if a step, or a call of several, gives or counts something else where functions run eagerly.
def test_functions_that_run_eagerly() -> None:
    batches = cut((X, Y), (7, 2, 16, 1, 5))
    case = Case("eager", lambda: Training(mlp(), sgd(), crossentropy()), batches)
    expected = [*on_one_device(case).end.values()]
    tf.config.run_functions_eagerly(True)
    try:
        step = step_on(2, mlp, sgd, crossentropy(), micro_batches=2)
        for batch in batches:
            step(batch)
        weights = step.model.get_weights()
        data = tf.data.Dataset.from_tensor_slices((X[:9], Y[:9])).batch(4)
        logs = step.run(iter(data), 5)
    finally:
        tf.config.run_functions_eagerly(False)
    assert difference(weights, expected[: len(weights)]) <= EXACT
    assert (int(logs["steps"]), float(logs["weight"])) == (3, 9.0)
