"""Data as the loops of Keras read it."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tfmultigpu.types import Shard


class KerasReading(NamedTuple):
    """Data that the loops of Keras read batch by batch, in Python.

    Attributes:
        batches: Returns the batches of a new pass. If it is closed, its threads and processes end.
        looked_at: Returns the batches that Keras looks at before the first pass, on this thread.
        hooks: The ``PyDataset`` itself, which hears of passes and knows their length; or None.
    """

    batches: Callable[[], Iterator[Shard]]
    looked_at: Callable[[], Iterator[Shard]]
    hooks: Any


def reading_of_keras(data: Any) -> KerasReading | None:
    """Returns how ``fit`` of Keras reads data by batches; None if it does not.

    Private: ``keras.src.trainers.data_adapters.get_data_adapter``, and ``adapter.enqueuer``. Keras
    has no public name for how it reads a ``PyDataset``, with threads, or a torch ``DataLoader``.
    Without it neither is read. Without ``enqueuer`` threads of a pass that is broken off stay.
    """
    import keras

    adapters: Any = pkgutil.resolve_name("keras.src.trainers.data_adapters")
    make_adapter = adapters.get_data_adapter
    try:
        is_array = type(make_adapter(data)).__name__ == "ArrayDataAdapter"
    except ValueError:
        return None
    if is_array:
        return None

    def batches(data: Any = data) -> Iterator[Shard]:
        # A new adapter for each pass: one that was broken off leaves batches in its queue.
        adapter = make_adapter(data)
        try:
            if adapter.num_batches != 0:
                yield from adapter.get_numpy_iterator()
        finally:
            enqueuer = getattr(adapter, "enqueuer", None)
            if enqueuer is not None:
                enqueuer.stop()

    if not isinstance(data, keras.utils.PyDataset):
        return KerasReading(batches, batches, None)

    class WithoutWorkers(keras.utils.PyDataset):  # type: ignore[misc]
        """The same batches, made on the thread that asks for them."""

        num_batches = property(lambda self: data.num_batches)

        def __getitem__(self, index: int) -> Shard:
            return data[index]

    return KerasReading(batches, lambda: batches(WithoutWorkers()), data)


def data_adapter() -> type:
    """Returns the base class of what the loops of Keras take as data without looking into it.

    Private: ``keras.src.trainers.data_adapters.data_adapter.DataAdapter``. Keras has no public name
    for it, and would distribute anything else a second time. Without it ``fit`` is not imported.
    """
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter

    adapter: type = DataAdapter
    return adapter
