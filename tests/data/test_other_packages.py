"""A torch DataLoader, Hugging Face datasets and SciPy matrices as data.

SciPy is installed with Keras. The classes of the other two stand in for those of the packages: the
same module, name and protocol.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from each import each
from one_device import strategy_of
from run_script import run_script

import tfmultigpu as tmg
from tfmultigpu.data.sources import to_dataset

_random = np.random.default_rng(5)
X = np.where(_random.random((23, 5)) < 0.4, _random.normal(size=(23, 5)), 0).astype("float32")
X[4] = 0  # A row without entries.
Y = _random.normal(size=(23, 1)).astype("float32")


def text_of(data: Any, **options: Any) -> str:
    with pytest.raises(tmg.errors.DataError) as caught:
        list(to_dataset(data, **options))
    return str(caught.value)


def model(replicas: int, sparse: bool = False) -> keras.Model:
    with strategy_of(replicas).scope():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
        made = keras.Sequential([keras.Input((5,), sparse=sparse), *layers])
        made.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return made


def trained(replicas: int, make: Any, x: Any, sparse: bool = False, **options: Any) -> list[Any]:
    """Weights, losses, evaluation and predictions after two epochs."""
    one = model(replicas, sparse)
    history = tmg.fit(one, make(), epochs=2, verbose=0, validation_data=make(), **options)
    logs = tmg.evaluate(one, make())
    losses = [history.history[name] for name in ("loss", "mae", "val_loss")]
    return [*one.get_weights(), losses, [logs["loss"], logs["mae"]], tmg.predict(one, x())]


def hold(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def by_keras(batches: list[Any]) -> list[np.ndarray]:
    """Weights after two epochs of Keras on one device."""
    one = model(1)
    for _ in range(2):
        for x, y in batches:
            one.train_on_batch(x, y)
    return one.get_weights()


IN_ORDER = [(X[i : i + 7], Y[i : i + 7]) for i in range(0, 23, 7)]


# DataLoader ---------------------------------------------------------------------------------------


class Tensor:
    """A tensor of torch: on a device, in a graph, without ``__array__`` until it is neither."""

    def __init__(self, value: Any, steps: tuple[str, ...] = ()) -> None:
        self.value, self.steps = np.asarray(value), steps
        self.shape = self.value.shape

    def detach(self) -> Tensor:
        return Tensor(self.value, (*self.steps, "detach"))

    def cpu(self) -> Tensor:
        return Tensor(self.value, (*self.steps, "cpu"))

    def numpy(self) -> np.ndarray:
        if self.steps != ("detach", "cpu"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy.")
        if self.value.dtype == np.float16:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.value


def in_module(module: str, name: str, *bases: type) -> type:
    return type(name, bases, {"__module__": module})


class Loading:
    """The protocol of a DataLoader: each ``iter`` is a pass, in an order of torch's own state."""

    def __init__(self, batches: list[Any], shuffle: bool = False, **options: Any) -> None:
        self.batches, self.shuffle = batches, shuffle
        self.persistent_workers = False
        self.passes = 0
        self.state = np.random.default_rng(3)
        vars(self).update(options)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        order = self.state.permutation(len(self.batches)) if self.shuffle else range(len(self))
        return (self.batches[i] for i in order)


DataLoader = in_module("torch.utils.data.dataloader", "DataLoader", Loading)
Sampler = in_module("torch.utils.data.distributed", "DistributedSampler")


class OwnLoader(DataLoader):  # type: ignore[misc, valid-type]
    """A subclass, as many packages have one."""


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))


def loader(kind: Any = DataLoader, **options: Any) -> Any:
    return kind([[Tensor(x), Tensor(y)] for x, y in IN_ORDER], **options)


@pytest.mark.parametrize(("kind", "shuffle"), [(DataLoader, True), (OwnLoader, False)])
def test_a_data_loader_trains_as_on_one_device(torch: None, kind: Any, shuffle: bool) -> None:
    def make() -> Any:
        return loader(kind, shuffle=shuffle)

    expected = trained(1, make, make)
    assert len(expected[-1]) == 23
    hold(trained(3, make, make), expected)
    if not shuffle:
        hold(expected[:4], by_keras(IN_ORDER))


def test_each_pass_over_a_data_loader_is_read_once_and_whole(torch: None) -> None:
    data = loader(shuffle=True)
    dataset = to_dataset(data)
    passes = [np.concatenate([x for x, _ in dataset.as_numpy_iterator()]) for _ in range(2)]
    assert data.passes == 2, "the pass that was inspected is the first one"
    assert not np.array_equal(*passes)
    for rows in passes:
        np.testing.assert_array_equal(np.sort(rows, 0), np.sort(X, 0))


def test_batches_of_a_data_loader_of_any_structure(torch: None) -> None:
    batch = {"text": ("a", "b"), "many": [Tensor([[1], [2]]), [3, 4]], "none": None}
    (found,) = to_dataset(DataLoader([batch]))
    assert found["text"].numpy().tolist() == [b"a", b"b"]
    assert [part.numpy().tolist() for part in found["many"]] == [[[1], [2]], [3, 4]]
    assert found["none"] is None


def test_what_a_data_loader_cannot_give_is_named(torch: None) -> None:
    assert text_of(DataLoader([[Tensor(np.zeros(2, "float16"))]])) == (
        "A batch of the DataLoader is not made of tensors that NumPy can hold: Got unsupported "
        "ScalarType BFloat16 Received: Tensor. Convert it in the collate_fn of the DataLoader, for "
        "example bfloat16 with tensor.float()."
    )
    assert "'object' object has no attribute 'detach'" in text_of(DataLoader([[object()]]))
    assert text_of(loader(), batch_size=4).endswith("Use DataLoader(..., batch_size=...).")


def test_a_loader_of_the_part_of_one_process_is_refused(torch: None) -> None:
    sampler = Sampler()
    sampler.num_replicas = 2
    text = text_of(loader(sampler=sampler))
    assert "Received: a DistributedSampler with num_replicas=2. Every worker must read" in text
    sampler.num_replicas = 1
    assert len(list(to_dataset(loader(sampler=sampler)))) == 4


class Staying(Loading):
    """With ``persistent_workers`` all passes share one iterator, which each restarts."""

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        self.at = 0
        return self

    def __next__(self) -> Any:
        if self.at == len(self.batches):
            raise StopIteration
        self.at += 1
        return self.batches[self.at - 1]


def test_passes_that_share_one_iterator_do_not_lose_batches(torch: None) -> None:
    kind = in_module("torch.utils.data.dataloader", "DataLoader", Staying)
    data = loader(kind, persistent_workers=True)
    dataset = to_dataset(data)
    next(iter(data))  # Somebody looks at the first batch.
    for _ in range(2):
        rows = np.concatenate([x for x, _ in dataset.as_numpy_iterator()])
        np.testing.assert_array_equal(rows, X)
    first, second = (iter(tmg.distribute_dataset(data)) for _ in range(2))
    next(first), next(second)
    with pytest.raises(tmg.errors.DataError, match="Two passes read one DataLoader at once"):
        list(first)


def test_a_torch_dataset_needs_a_loader(torch: None) -> None:
    data = in_module("torch.utils.data.dataset", "Dataset")()
    assert text_of(data) == (
        "A torch Dataset is not batches or arrays. Received: Dataset. Give batches of it: "
        "torch.utils.data.DataLoader(data, batch_size=64)."
    )


# Hugging Face -------------------------------------------------------------------------------------


class Columns:
    """The protocol of a Dataset: slices are dicts of lists, formatted as asked for."""

    def __init__(self, columns: dict[str, Any], kind: str | None = None) -> None:
        self.columns, self.kind = columns, kind

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), len(self.columns)

    @property
    def format(self) -> dict[str, Any]:
        return {"type": self.kind, "columns": self.column_names, "output_all_columns": False}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def select_columns(self, names: list[str]) -> Columns:
        return type(self)({name: self.columns[name] for name in names}, self.kind)

    def with_format(self, kind: str, columns: Any = None, output_all_columns: bool = False) -> Any:
        return type(self)({name: self.columns[name] for name in columns or self.columns}, kind)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return Column(self, key)
        assert isinstance(key, slice)
        return {name: self._formatted(values[key]) for name, values in self.columns.items()}

    def _formatted(self, values: list[Any]) -> Any:
        if self.kind != "numpy":
            return values
        if len({np.shape(value) for value in values}) > 1:
            return np.array([np.asarray(value) for value in values], object)
        return np.asarray(values)


class OneColumn(Sequence[Any]):
    """The protocol of a Column: a sequence of the examples of one column."""

    def __init__(self, source: Any, column_name: str) -> None:
        self.source, self.column_name = source, column_name

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Any) -> Any:
        return self.source[key][self.column_name]


Dataset = in_module("datasets.arrow_dataset", "Dataset", Columns)
Column = in_module("datasets.arrow_dataset", "Column", OneColumn)


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))


def dataset(**columns: Any) -> Any:
    return Dataset({"x": X.tolist(), "y": Y.tolist(), **columns})


def test_columns_train_as_the_same_arrays(datasets: None) -> None:
    options = {"batch_size": 7, "shuffle": True}
    data = dataset()
    make, x = (lambda: (data["x"], data["y"])), lambda: data["x"]
    expected = trained(1, lambda: (X, Y), lambda: X, **options)
    hold(trained(3, make, x, **options), expected)


def test_a_dataset_is_a_dict_of_its_columns(datasets: None) -> None:
    data = dataset(text=["t"] * 23, number=list(range(23)))
    *_, last = to_dataset((data, data["number"]), batch_size=10)
    features, labels = last
    assert sorted(features) == ["number", "text", "x", "y"]
    np.testing.assert_array_equal(features["x"], X[20:])
    assert features["x"].dtype == tf.float32, "as with_format('numpy') gives it"
    assert features["text"].numpy().tolist() == [b"t"] * 3
    assert labels.numpy().tolist() == features["number"].numpy().tolist() == [20, 21, 22]
    chosen = data.with_format("torch", columns=["number"])
    assert list(to_dataset(chosen, batch_size=4).element_spec) == ["number"]


def test_columns_can_be_split_off_and_weighted(datasets: None) -> None:
    weights = np.linspace(0.5, 2, 23).astype("float32")
    found = []
    for data in ((X, Y), (dataset()["x"], dataset()["y"])):
        one = model(3)
        options = {"validation_split": 0.2, "sample_weight": weights, "batch_size": 7}
        history = tmg.fit(one, data, verbose=0, **options)
        found.append([*one.get_weights(), history.history["val_loss"]])
    hold(*found)


def test_several_columns_are_several_inputs_of_predict(datasets: None) -> None:
    with strategy_of(2).scope():
        inputs = keras.Input((5,)), keras.Input((1,))
        two = keras.Model(inputs, keras.layers.Dense(1)(keras.ops.concatenate(inputs, -1)))
    data = dataset()
    found = tmg.predict(two, [data["x"], data["y"]], batch_size=7)
    np.testing.assert_allclose(found, two.predict([X, Y], verbose=0), rtol=1e-5, atol=1e-6)


def test_columns_without_one_shape_are_named(datasets: None) -> None:
    data = dataset(tokens=[[1]] * 22 + [[1, 2]])
    for given in (data, data["tokens"], (data["x"], {"a": data["tokens"]})):
        text = text_of(given, batch_size=4)
        assert "its rows differ in their lengths" in text
        assert "Received: column 'tokens'. Pad it to one length" in text


def test_a_transform_is_not_frozen(datasets: None) -> None:
    data = Dataset({"x": X.tolist()}, "custom")
    for given in (data, data["x"]):
        assert text_of(given, batch_size=4).endswith("lambda: data.iter(batch_size=64).")


@each(
    ("module", "name", "bases", "instead"),
    [
        ("datasets.dataset_dict", "DatasetDict", (dict,), 'data["train"].'),
        (
            "datasets.iterable_dataset",
            "IterableDataset",
            (),
            'lambda: data.with_format("numpy").iter(batch_size=64).',
        ),
    ],
)
def test_datasets_that_are_not_one_table_are_refused(
    datasets: None, module: str, name: str, bases: Any, instead: str
) -> None:
    data = in_module(module, name, *bases)()
    for given in (data, (data, Y)):
        text = text_of(given, batch_size=4)
        assert text.startswith(f"A datasets {name} is not batches or arrays. Received: {name}. ")
        assert text.endswith(instead)
    with pytest.raises(tmg.errors.DataError, match=name):
        tmg.predict(model(1), data)


# SciPy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sparse", "shuffle"), [(False, False), (True, True)])
def test_a_sparse_matrix_trains_as_on_one_device(sparse: bool, shuffle: bool) -> None:
    matrix = scipy.sparse.csr_matrix(X)
    options = {"batch_size": 7, "shuffle": shuffle, "sparse": sparse}
    expected = trained(1, lambda: (matrix, Y), lambda: matrix, **options)
    hold(trained(3, lambda: (matrix, Y), lambda: matrix, **options), expected)
    if not shuffle:
        hold(expected[:4], by_keras(IN_ORDER))


KINDS = "csr_matrix csr_array coo_matrix csc_array dok_array lil_matrix bsr_matrix dia_array"


@each("kind", KINDS.split())
def test_every_kind_of_matrix(kind: str) -> None:
    matrix = getattr(scipy.sparse, kind)(X)
    batches = list(to_dataset({"x": matrix}, batch_size=7))
    assert all(isinstance(batch["x"], tf.SparseTensor) for batch in batches)
    rows = [tf.sparse.to_dense(batch["x"]).numpy() for batch in batches]
    np.testing.assert_array_equal(np.concatenate(rows), X)


def test_entries_out_of_order_are_added_and_the_matrix_is_left_as_it_was() -> None:
    matrix = scipy.sparse.csr_matrix(([1.0, 2.0, 4.0, 8.0], [2, 0, 2, 2], [0, 2, 4]), (2, 3))
    (batch,) = to_dataset(matrix, batch_size=4)
    assert tf.sparse.to_dense(batch).numpy().tolist() == [[2, 0, 1], [0, 0, 12]]
    assert matrix.indices.tolist() == [2, 0, 2, 2]


def test_sparse_matrices_are_several_inputs_of_predict() -> None:
    with strategy_of(2).scope():
        inputs = [keras.Input((5,), sparse=True) for _ in range(2)]
        first, second = (keras.layers.Dense(1)(one) for one in inputs)
        two = keras.Model(inputs, first + second)
    given = [scipy.sparse.csr_matrix(X), scipy.sparse.csr_matrix(2 * X)]
    expected = two.predict([X, 2 * X], verbose=0)
    for data in (given, [tf.sparse.from_dense(X), tf.sparse.from_dense(2 * X)]):
        found = tmg.predict(two, data, batch_size=7)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_sparse_matrix_is_an_array_with_the_rows_of_the_labels() -> None:
    matrix = scipy.sparse.csr_matrix(X)
    assert text_of((matrix, Y[:5]), batch_size=4).startswith("The arrays differ in their number")
    assert "Received: batch_size=None" in text_of((matrix, Y))
    text = text_of(scipy.sparse.coo_array(np.ones(3)), batch_size=2)
    assert text.endswith("Received: a coo_array of shape (3,). Write array.toarray().")


def test_nothing_is_imported_for_it() -> None:
    printed = run_script(
        """
        import sys, numpy as np
        from tfmultigpu.data.sources import to_dataset
        to_dataset((np.zeros((4, 2)), [1, 2, 3, 4]), batch_size=2)
        print(sorted({"torch", "datasets"} & sys.modules.keys()))
        """
    )
    assert printed.strip() == "[]"
