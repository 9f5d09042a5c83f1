"""Files of several workers: which worker writes, and where the others do."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from pathlib import Path

from tfmultigpu.addons.workers.sources import cluster_from_environment


def is_first() -> bool:
    """Returns whether this process is the first worker, which is also true if it trains alone.

    Use it for work that one worker does for all, such as printing. Ask after ``create_strategy``.
    All workers must call steps, evaluations, predictions and checkpoints.

    Example:
        >>> import keras, tfmultigpu as tmg
        >>> logger = keras.callbacks.CSVLogger("losses.csv")
        >>> callbacks = [logger] if tmg.workers.is_first() else []
    """
    # Only here: the launcher, which imports this package, does not import TensorFlow.
    from tfmultigpu.strategies.process_state import process_state

    cluster = process_state.cluster or cluster_from_environment()
    return cluster is None or cluster.index == 0


def own_path(path: str | os.PathLike[str]) -> str:
    """Returns a path for this worker alone: ``path`` on the first worker, which keeps the file.

    The other workers get a path of the same name in a temporary folder, which is deleted at their
    end. So all workers can make a call that writes a file, and each can read what it has written.
    Use it for each call that saves a model: some variables need all workers for that.

    Args:
        path: The path of a file or a folder, with or without Keras' ``{epoch}``.

    Returns:
        ``path`` itself, or a path in a temporary folder.

    Example:
        >>> import keras, tfmultigpu as tmg
        >>> best = keras.callbacks.ModelCheckpoint(tmg.workers.own_path("best.keras"))
    """
    text = os.fspath(path)
    if is_first():
        return text
    # Two paths may end in one name.
    whole = str(Path(text).absolute())
    number = hashlib.sha256(whole.encode(errors="backslashreplace")).hexdigest()[:16]
    folder = Path(_temporary_folder().name, number)
    folder.mkdir(exist_ok=True)
    return str(folder / Path(text).name)


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tfmultigpu-worker-", ignore_cleanup_errors=True)
