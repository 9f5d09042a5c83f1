"""Without a strategy all blocks run on one device, in a script that knows nothing of replicas."""

from __future__ import annotations

from law import without_strategy
from law.processes import pool


# Fails if a block asks a strategy for what TensorFlow's default one does not say, as its devices.
# In a process of its own: beside a strategy that nothing uses, the blocks refuse to run without.
def test_fit_run_and_evaluation_without_a_strategy() -> None:
    pool().start().call(without_strategy.hold)
