"""Checks, before the first step, that callbacks of several workers do not write to one path.

Two workers that write one file at once break it, now and then and without an error. Whether two
paths are one file is asked of the files: each worker leaves an empty file beside what it will
write, looks for the files of the others, and removes its own. So it makes no difference whether the
workers share a machine or a disk, or by which names they know it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

from tfmultigpu.errors import ClusterError
from tfmultigpu.strategies.topology import is_on_read
from tfmultigpu.strategies.worker_exchange import WorkerExchange, digest_of
from tfmultigpu.types import KerasModel

# Attributes in which callbacks of Keras, and those written like them, keep what they write to.
_ATTRIBUTES = ("filepath", "filename", "log_dir", "backup_dir")
_PURPOSE = "the files of callbacks"


@dataclasses.dataclass
class WrittenPath:
    """A path that a callback of this worker writes to.

    Attributes:
        callback: The class of the callback.
        attribute: The attribute that holds the path.
        text: The path, as the user has written it.
        folder: The nearest folder that exists; None for a URL, which is compared as a text.
        rest: The path from this folder on.
    """

    callback: str
    attribute: str
    text: str
    folder: Path | None = None
    rest: str = ""

    def find_folder(self) -> None:
        """Looks for the nearest folder that exists."""
        if "://" in self.text:
            self.rest = self.text
            return
        whole = Path(self.text).resolve()
        for folder in (whole, *whole.parents):
            with contextlib.suppress(OSError):  # Such as a folder that may not be looked into.
                if folder.is_dir():
                    self.folder, self.rest = folder, str(whole.relative_to(folder))
                    return

    @contextlib.contextmanager
    def marked(self, mark: str) -> Iterator[None]:
        """Leaves an empty file in the folder while the block runs."""
        file = None if self.folder is None else self.folder / mark
        if file is not None:
            with contextlib.suppress(OSError):  # Whoever cannot write there breaks no file.
                file.touch()
        try:
            yield
        finally:
            if file is not None:
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)

    def sees(self, mark: str) -> bool:
        """Returns whether this worker finds an empty file that some worker has left."""
        return self.folder is None or (self.folder / mark).exists()

    def __str__(self) -> str:
        """Returns the path and whose it is, for an error."""
        return f"{self.callback} with {self.attribute}={self.text!r}"


def check_files(exchange: WorkerExchange, callbacks: Sequence[Any], model: KerasModel) -> None:
    """Checks that no two workers write to one path; all workers must call it, and raise alike."""
    if exchange.workers == 1:
        return
    paths = written_paths(callbacks)
    savers = [each for each in callbacks if isinstance(each, keras.callbacks.ModelCheckpoint)]
    told = exchange(_PURPOSE, [len(paths), len(savers), secrets.randbits(60)])
    _check_all_save(model, told[:, 1].tolist())

    counts = told[:, 0].tolist()
    if sum(count > 0 for count in counts) < 2:
        return
    marks = f".tfmultigpu-{told[0, 2]:x}"
    shared, workers = _shared_paths(exchange, paths, counts, marks)
    if workers:
        received, attribute, path = f"none of worker {exchange.worker}", "filepath", "PATH"
        if shared:
            received = ", ".join(str(one) for one in shared)
            attribute, path = shared[0].attribute, repr(shared[0].text)
        raise ClusterError(
            f"Callbacks of workers {', '.join(map(str, workers))} write to one path, which breaks "
            "files and mixes lines.",
            received,
            f"Write {attribute}=tmg.workers.own_path({path}), which is another path on each "
            "worker. Or give the callback to the first worker alone: callbacks=[callback] if "
            "tmg.workers.is_first() else [].",
        )


def written_paths(callbacks: Iterable[Any]) -> list[WrittenPath]:
    """Returns the paths that callbacks write to, without devices such as ``/dev/null``."""
    paths = []
    for callback in callbacks:
        for attribute in _ATTRIBUTES:
            value = getattr(callback, attribute, None)
            if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
                continue
            path = Path(os.fsdecode(value))
            # A model, a log or a folder; not a device such as /dev/null.
            if not path.exists() or path.is_file() or path.is_dir():
                text = os.fsdecode(value)
                paths.append(WrittenPath(type(callback).__name__, attribute, text))
    return paths


def _shared_paths(
    exchange: WorkerExchange, paths: Sequence[WrittenPath], counts: Sequence[int], marks: str
) -> tuple[list[WrittenPath], list[int]]:
    """Returns the paths of this worker that others write to as well, and all workers with such."""
    with contextlib.ExitStack() as stack:
        rests = [0] * max(counts)
        for number, path in enumerate(paths):
            # All workers are in this call, so none of them makes or removes a folder meanwhile.
            path.find_folder()
            stack.enter_context(path.marked(f"{marks}-{exchange.worker}-{number}"))
            rests[number] = digest_of(path.rest)

        # From here on the marks of all workers are there.
        told = exchange(_PURPOSE, rests)
        shared = []
        for path in paths:
            writers = {exchange.worker}
            for worker, count in enumerate(counts):
                for number in range(count):
                    is_alike = told[worker, number] == digest_of(path.rest)
                    if is_alike and path.sees(f"{marks}-{worker}-{number}"):
                        writers.add(worker)
            if len(writers) > 1:
                shared.append(path)

        # When this returns all have looked, and the marks may go.
        workers = exchange(_PURPOSE, [len(shared)])[:, 0].nonzero()[0].tolist()
    return shared, workers


def _check_all_save(model: KerasModel, savers: Sequence[int]) -> None:
    """Checks that all workers save a model that has values which only all of them can read."""
    if len(set(savers)) == 1:
        return
    optimizer = getattr(model, "optimizer", None)
    on_read = []
    for variable in [*model.variables, *getattr(optimizer, "variables", ())]:
        if is_on_read(variable):
            on_read.append(variable.path)
    if on_read:
        saving = ", ".join(str(worker) for worker, count in enumerate(savers) if count)
        raise ClusterError(
            "Keras can save this model only on all workers at once, as each replica counts some "
            "variables by itself.",
            f"ModelCheckpoint on workers {saving} of {len(savers)}, and variables "
            f"{', '.join(on_read)}",
            "Give it to every worker: ModelCheckpoint(tmg.workers.own_path('model.keras')).",
        )
