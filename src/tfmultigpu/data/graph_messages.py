"""Messages of assertions in a graph: TensorFlow raises one as an error of its own, with one text.

The graph holds the whole text, for a loop in which nothing translates that error. The numbers that
failed the assertion follow the text, so what was received is last in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from tfmultigpu.errors import TfMultiGpuError

_Kind = TypeVar("_Kind", bound=TfMultiGpuError)


@dataclass(frozen=True)
class GraphMessage:
    """What an assertion says, in the fields of an error.

    Attributes:
        what: What happened, and why it matters.
        received: What the numbers of the assertion are, with ``{}`` for them; empty without any.
        write: The line to write.
    """

    what: str
    received: str
    write: str

    @property
    def text(self) -> str:
        """The text in the graph; the numbers are to follow it."""
        text = f"{self.what} {self.write}"
        if self.received:
            text += f" Received: {self.received.partition(' {}')[0]}"
        return text

    def failed_in(self, message: str) -> bool:
        """Returns whether an error of TensorFlow with this message is one of this assertion."""
        return self.text in message

    def as_error(self, kind: type[_Kind], message: str = "") -> _Kind:
        """Returns our error, with the numbers that are in the message of TensorFlow's error."""
        printed = message.partition(self.text)[2].lstrip("]['\n ").partition("]")[0]
        numbers = ", ".join(printed.replace(",", " ").split())
        return kind(self.what, self.received.format(numbers), self.write)
