"""Batches of parts with rows of their own, and values that replicas get whole."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from each import each
from shards import HOST_AND_DEVICE, local, mirrored, text_of

import tfmultigpu as tmg
from tfmultigpu.data import Parts, Whole, partition
from tfmultigpu.data.batch_format import check_rows_agree, count_rows, unpack_batch
from tfmultigpu.data.parts import part_names, part_of_each_leaf

SIZES = ((6, 2), (3, 7), (4, 4), (1, 5))


def dataset(sizes: tuple[tuple[int, int], ...] = SIZES) -> tf.data.Dataset:
    """Batches of these many rows in each part, numbered from zero, the second part negatively."""
    counts = tf.data.Dataset.from_tensor_slices(np.array(sizes))
    return counts.map(
        lambda n: Parts(
            labeled=(tf.range(n[0]), {"y": 10 * tf.range(n[0])}),
            unlabeled=-tf.range(n[1]),
            step=Whole(n[0]),
        )
    )


def read(data: tmg.data.ShardedDataset) -> list[dict[str, Any]]:
    found = []
    for batch in data:
        x, y = batch["labeled"]
        named = {"x": x, "y": y["y"], "u": batch["unlabeled"], "step": batch["step"].value}
        found.append({name: local(data.strategy, leaf) for name, leaf in named.items()})
    return found


def batch_of(labeled: int, unlabeled: int) -> Parts:
    return Parts(labeled=(tf.range(labeled), tf.range(labeled)), unlabeled=tf.range(unlabeled))


# what keeps them ----------------------------------------------------------------------------------


def test_tf_data_keeps_them() -> None:
    data = dataset().cache().shuffle(4, seed=1).repeat(2).prefetch(2)
    data = data.map(lambda batch: batch).concatenate(dataset())
    assert isinstance(data.element_spec, Parts)
    for batch in data:
        assert type(batch) is Parts
        assert type(batch["step"]) is Whole
    zipped = tf.data.Dataset.zip(Parts(a=tf.data.Dataset.range(3), b=tf.data.Dataset.range(2)))
    assert type(next(iter(zipped))) is Parts


def test_functions_and_nest_keep_them() -> None:
    batch = next(iter(dataset()))
    kinds = []

    @tf.function
    def call(batch: Any) -> Any:
        kinds.append((type(batch), type(batch["step"])))
        return batch

    assert type(call(batch)) is Parts
    assert kinds == [(Parts, Whole)]
    assert type(tf.nest.map_structure(tf.identity, batch)) is Parts
    assert type(copy.deepcopy(Parts(a=1))) is Parts
    assert pickle.loads(pickle.dumps(Parts(a=1, b=Whole(2)))) == Parts(a=1, b=Whole(2))
    assert repr(Parts(a=1, b=Whole(2))) == "Parts(a=1, b=Whole(value=2))"


def test_the_part_of_each_leaf() -> None:
    batch = Parts(u={"b": 1, "a": (2, None)}, l=[3, Whole((4, 5))], t=Whole(6))
    assert list(tf.nest.flatten(batch)) == [3, 4, 5, 6, 2, None, 1]
    assert part_of_each_leaf(batch) == ["l", None, None, None, "u", "u", "u"]
    assert part_names(batch) == ("l", "u")
    assert part_names((1, Whole(2))) == ("",)
    assert part_names(Whole(2)) == ()


# how they are cut ---------------------------------------------------------------------------------


@HOST_AND_DEVICE
def test_each_part_is_cut_by_its_own_rows(prefetch: bool) -> None:
    data = tmg.distribute_dataset(dataset(), mirrored(2), prefetch_to_device=prefetch)
    first, second, third, small = read(data)
    assert first["x"] == [[0, 1, 2], [3, 4, 5]]
    assert first["y"] == [[0, 10, 20], [30, 40, 50]]
    assert first["u"] == [[0], [-1]]
    assert first["step"] == [6, 6]
    assert second["x"] == [[0], [1, 2]]
    assert second["u"] == [[0, -1, -2], [-3, -4, -5, -6]]
    assert third["u"] == [[0, -1], [-2, -3]]
    # One labeled row cannot be divided, so both replicas get all of both parts.
    assert small["x"] == [[0], [0]]
    assert small["u"] == [[0, -1, -2, -3, -4]] * 2


@each("replicas", [1, 2, 3, 4])
@each("shares", [False, True])
def test_each_row_is_on_one_replica_or_all_are_on_each(replicas: int, shares: bool) -> None:
    strategy = mirrored(replicas)
    weights = tuple(range(1, replicas + 1)) if shares else None
    sizes = tuple((a, b) for a in range(1, 7) for b in range(1, 7))
    data = tmg.distribute_dataset(dataset(sizes), strategy, shares=weights)
    for batch, (labeled, unlabeled) in zip(data, sizes, strict=True):
        x = local(strategy, batch["labeled"][0])
        u = local(strategy, batch["unlabeled"])
        assert all([*x, *u]), "a shard is empty"
        whole = min(labeled, unlabeled) < replicas
        times = replicas if whole else 1
        assert sorted(itertools.chain(*x)) == sorted([*range(labeled)] * times)
        assert sorted(itertools.chain(*u)) == sorted([-i for i in range(unlabeled)] * times)
        if replicas > 1:
            weight = float(tmg.data.row_weight(batch, strategy))
            assert weight == pytest.approx(1 / times)
            # Of one of its parts too: the rows of that alone would not tell.
            assert float(tmg.data.row_weight(batch["unlabeled"], strategy)) == weight


def test_offsets_of_each_part() -> None:
    offsets = partition.batch_offsets(batch_of(6, 7), (1, 1, 1))
    assert offsets.numpy().tolist() == [[0, 2, 4, 6], [0, 2, 4, 7]]
    assert int(partition.global_rows(offsets)) == 6
    assert int(partition.largest_shard(offsets)) == 2
    small = partition.batch_offsets(batch_of(2, 7), (1, 1, 1))
    assert small.numpy().tolist() == [[0, 0, 0, 2], [0, 0, 0, 7]]
    assert int(partition.largest_shard(small)) == 2
    assert int(count_rows(batch_of(2, 7))) == 2


def test_micro_batches_of_each_part() -> None:
    found = [partition.cut_part(batch_of(3, 5), 2, number) for number in (0, 1)]
    assert [len(one["labeled"][0]) for one in found] == [1, 2]
    assert [len(one["unlabeled"]) for one in found] == [2, 3]
    whole = partition.cut_part(batch_of(1, 5), 2, 1)
    assert len(whole["unlabeled"]) == 5


def test_ragged_and_sparse_parts_and_nothing() -> None:
    def batch(n: Any) -> Parts:
        return Parts(
            words=tf.RaggedTensor.from_row_lengths(tf.range(2 * n), tf.fill([n], 2)),
            sparse=(tf.sparse.from_dense(tf.eye(n + 1)), None),
            graph=Whole(tf.sparse.from_dense(tf.eye(3))),
        )

    strategy = mirrored(2)
    data = tmg.distribute_dataset(
        tf.data.Dataset.range(4, 6, output_type=tf.int32).map(batch), strategy
    )
    first = next(iter(data))
    assert local(strategy, first["words"]) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert [len(one) for one in local(strategy, first["sparse"][0])] == [2, 3]
    assert local(strategy, first["graph"].value) == [np.eye(3).tolist()] * 2


def test_one_value_beside_ordinary_rows() -> None:
    strategy = mirrored(2)
    batches = tf.data.Dataset.range(6).batch(4).map(lambda x: (x, Whole(tf.constant(0.5))))
    found = [
        (local(strategy, x), local(strategy, t.value))
        for x, t in tmg.distribute_dataset(batches, strategy)
    ]
    assert found == [([[0, 1], [2, 3]], [0.5, 0.5]), ([[4], [5]], [0.5, 0.5])]


# errors -------------------------------------------------------------------------------------------


def test_a_part_without_rows_is_named() -> None:
    data = iter(tmg.distribute_dataset(dataset(((4, 2), (3, 0))), mirrored(2)))
    next(data)
    assert text_of(lambda: next(data)).endswith("Received: no rows in part 'unlabeled'.")


def test_tensors_of_a_part_that_differ() -> None:
    counts = tf.data.Dataset.from_tensors(3)
    wrong = counts.map(lambda n: Parts(labeled=(tf.range(n), tf.range(n + 1)), u=tf.range(n)))
    data = iter(tmg.distribute_dataset(wrong, mirrored(2)))
    assert text_of(lambda: next(data)).endswith("Received: rows 3, 4 in part 'labeled'.")
    static = tf.data.Dataset.from_tensors(Parts(labeled=(tf.zeros([3]), tf.zeros([4]))))
    text = text_of(lambda: tmg.distribute_dataset(static, mirrored(2)))
    assert text.startswith("The components of an element of part 'labeled' differ in their first")


def test_known_rows_need_no_check() -> None:
    @tf.function
    def checks(batch: Parts) -> int:
        return len(check_rows_agree(batch))

    assert int(checks(batch_of(3, 4))) == 0


@each(
    ("batch", "says"),
    [
        (Whole(tf.zeros([4])), "all of it is Whole"),
        (Parts(a=Whole(tf.zeros([4]))), "all of it is Whole"),
        (Parts(a=tf.zeros([4]), b=tf.zeros([])), "a component of part 'b' is a scalar"),
        ((Parts(a=tf.zeros([4])), tf.zeros([4])), "Parts are the outermost structure of a batch"),
        (Parts(a=Parts(b=tf.zeros([4]))), "Parts are the outermost structure of a batch"),
        (Parts({"": tf.zeros([4])}), "Parts have names"),
    ],
)
def test_batches_that_cannot_be_divided(batch: Any, says: str) -> None:
    data = tf.data.Dataset.from_tensors(batch)
    assert says in text_of(lambda: tmg.distribute_dataset(data, mirrored(2)))


def test_arrays_are_no_batches_yet() -> None:
    arrays = Parts(a=np.zeros([8, 2]), b=np.zeros([8]))
    text = text_of(lambda: tmg.distribute_dataset(arrays, mirrored(2), batch_size=4))
    assert "these arrays are not batches yet" in text


def test_only_a_function_of_the_user_takes_them_apart() -> None:
    for batch in (batch_of(2, 3), (tf.zeros([2]), Whole(1.0))):
        assert "forward=f)" in text_of(lambda batch=batch: unpack_batch(batch))


class TestPutTogetherAnew:
    """Batches whose parts are not those that were cut together."""

    strategy = mirrored(2)

    @pytest.fixture
    def step(self) -> Any:
        import keras

        with self.strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

        def forward(model: Any, batch: Any, training: bool) -> tmg.LossSum:
            return tmg.LossSum(tf.reduce_sum(model(tf.zeros([1, 1]))), 1.0)

        return tmg.make_eval_step(model, None, self.strategy, forward=forward, verify=False)

    def batches(self) -> list[Any]:
        return list(tmg.distribute_dataset(dataset(((4, 6), (4, 6))), self.strategy))

    @pytest.mark.parametrize(
        "kind", ["one part", "other name", "two batches", "missing", "swapped"]
    )
    def test_they_are_refused(self, step: Any, kind: str) -> None:
        one, two = self.batches()
        labeled, unlabeled, number = one["labeled"], one["unlabeled"], one["step"]
        batch: Any = {
            "one part": labeled,
            "other name": Parts(labeled=labeled, other=unlabeled, step=number),
            "two batches": Parts(labeled=labeled, unlabeled=two["unlabeled"], step=number),
            "missing": Parts(labeled=labeled, step=number),
            "swapped": Parts(labeled=unlabeled, unlabeled=labeled, step=number),
        }[kind]
        assert "taken apart or put together from several" in text_of(lambda: step(batch))

    def test_what_another_library_cut(self, step: Any) -> None:
        even = dataset(((4, 6),))
        (foreign,) = list(self.strategy.distribute_datasets_from_function(lambda _: even))
        assert "was not cut by this library" in text_of(lambda: step(foreign))

    def test_a_batch_as_it_came(self, step: Any) -> None:
        for batch in self.batches():
            assert float(step(batch)["weight"]) == 2.0
