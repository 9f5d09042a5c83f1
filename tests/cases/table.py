"""The table: all cases, by subject.

``images`` is trained on a GPU alone (tests/gpu): on a CPU promises have its options.
"""

from __future__ import annotations

from cases import layers, losses, models, optimizers, options, sharded, touching_rows

SUBJECTS = {
    "layers": layers.CASES,
    "models": models.CASES,
    "losses": losses.CASES,
    "optimizers": optimizers.CASES,
    "options": options.CASES,
    "sharded variables": sharded.CASES,
    "rows that touch": touching_rows.CASES,
}
CASES = [case for cases in SUBJECTS.values() for case in cases]
