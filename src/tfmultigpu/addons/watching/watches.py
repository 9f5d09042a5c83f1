"""``tmg.watch``: a context, a callback, and what the launcher begins."""

from __future__ import annotations

import os
import threading
from typing import Any, Self

import keras

from tfmultigpu.addons.watching.watcher import Settings, watcher
from tfmultigpu.arguments import check_positive
from tfmultigpu.recorder import noting, recorder


class Watch(keras.callbacks.Callback):  # type: ignore[misc]
    """A watch, as a context or a callback; ``watch`` creates it.

    Attributes:
        seconds: After which a wait is reported.
        directory: The folder of its reports; None: a folder for temporary files.
    """

    every_batches = None  # In ``tmg.fit`` after calls of any length: watching costs no speed.

    def __init__(self, seconds: float, directory: str | None) -> None:
        super().__init__()
        self.seconds, self.directory = seconds, directory

    def __enter__(self) -> Self:
        """Begins to watch this process."""
        watcher.begin(Settings(self.seconds, self.directory))
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the watch."""
        watcher.end(Settings(self.seconds, self.directory))

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to watch, in the ``fit`` of this thread."""
        watcher.begin(self._of_fit())

    def on_train_end(self, logs: Any = None) -> None:
        """Ends the watch."""
        self.on_train_batch_end(-1)
        watcher.end(self._of_fit())

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes a batch of Keras' own loop, which notes nothing by itself."""
        noting("batch", "Keras", batch + 1).__enter__()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the end of that batch."""
        thread = threading.get_ident()
        while (note := recorder.innermost.get(thread)) is not None and note.phase == "batch":
            note.__exit__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Notes the end of the batch that Keras has begun before the data ended."""
        self.on_train_batch_end(-1)

    def on_test_end(self, logs: Any = None) -> None:
        """Notes the end of such a batch of an evaluation."""
        self.on_train_batch_end(-1)

    on_test_batch_begin, on_test_batch_end = on_train_batch_begin, on_train_batch_end

    def state(self) -> None:
        """Returns nothing: a checkpoint holds no state of a watch."""

    def set_state(self, value: None) -> None:
        """Restores nothing."""

    def _of_fit(self) -> Settings:
        return Settings(self.seconds, self.directory, threading.get_ident())


def watch(seconds: float = 300, directory: str | os.PathLike[str] | None = None) -> Watch:
    """Says what a run waits for, if no call has begun or ended for so many seconds.

    Use it around a loop or as a callback of ``fit``. A thread of its own then writes to the log,
    and to one JSON file for each process: the step, the phase and the batch of every worker, the
    likely cause, the stacks of all Python threads, the last 64 calls, and what each GPU does. It
    is written again after twice, four times and so on as many seconds. The training continues.

    Watches may be inside one another, in one thread or in several: the one that began last counts,
    for the whole process. A watch never raises an error into the training.

    Args:
        seconds: Seconds without a call that begins or ends. More than the longest step, evaluation
            or pause of your own code.
        directory: The folder of the files; workers may share it. None: a folder for temporary
            files, which the log names.

    Returns:
        A context, which is also a ``keras.callbacks.Callback``.

    Raises:
        ValueError: ``seconds`` is not a positive number.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> step = tmg.make_train_step(model, keras.optimizers.Adam(), "mse")
        >>> data = tmg.distribute_dataset((np.eye(3), np.ones((3, 1))), batch_size=2)
        >>> with tmg.watch(seconds=60):
        ...     for batch in data:
        ...         logs = step(batch)
    """
    seconds = check_positive("seconds", seconds, "Write tmg.watch(seconds=300).")
    return Watch(seconds, None if directory is None else os.fspath(directory))


def watch_as_the_launcher_asks() -> None:
    """Begins a watch to the end of the process, if the launcher asks and the user has none."""
    seconds = os.environ.pop("TFMULTIGPU_WATCH", "")  # Processes of the user are not asked.
    if seconds and not watcher.watches:
        watch(float(seconds)).__enter__()
