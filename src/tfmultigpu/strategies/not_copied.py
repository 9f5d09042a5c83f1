"""Objects that belong to the variables of one model and cannot be copied."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["NotCopied"]


class NotCopied:
    """Refuses ``copy.copy``, ``copy.deepcopy`` and ``pickle``, which all begin here."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises the error that says what to do instead.

        Raises:
            TypeError: Always.
        """
        name = type(self).__name__
        raise TypeError(
            f"A {name} cannot be copied or pickled: it belongs to the variables of one model in "
            f"this process. Received: a {name}. Make a new one for the copy of the model; save "
            "weights with model.save(path), or a run with tmg.Checkpoints."
        )
