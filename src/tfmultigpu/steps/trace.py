"""What a trace of the code of the user finds, the same on every replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.steps.tally import Layout


class Trace:
    """What the code of the user turned out to do, the same on every replica.

    Tracing changes nothing else: ``replica`` calls ``note``, and draws add to ``alike``.

    Attributes:
        layout: The terms of the loss; None before the first replica.
        present: For each target, for each trained variable, whether it has a gradient.
        state: The Keras variables that layers, draws and metrics assign.
        alike: The ``id`` of those that every micro-batch finds as the first does: seeds.
    """

    def __init__(self) -> None:
        """Knows nothing yet."""
        self.layout: Layout | None = None
        self.present: list[list[bool]] = []
        self.state: list[Any] = []
        self.alike: set[int] = set()

    def note(self, layout: Layout, gradients: Any, state: Sequence[Any]) -> None:
        """Takes what one replica found."""
        present = [[gradient is not None for gradient in each] for each in gradients]
        if self.layout is None:
            self.layout, self.present, self.state = layout, present, list(state)
            return
        known = {id(variable) for variable in self.state}
        strange = [variable.path for variable in state if id(variable) not in known]
        if strange or present != self.present:
            raise TfMultiGpuError(
                "The model does something else each time that it is traced, and replicas and "
                f"micro-batches must all do the same. Received: {strange or 'other gradients'}. "
                "Create seed generators, metrics and variables once, in the scope of the strategy, "
                "not in call or forward: seeds = keras.random.SeedGenerator(seed)."
            )

    @property
    def updated(self) -> list[int]:
        """The numbers of the trained variables that have a gradient, of any target."""
        return [i for i, here in enumerate(zip(*self.present, strict=True)) if any(here)]
