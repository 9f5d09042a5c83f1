"""Runs a program of tests/faults as a worker, which gets a signal where the command line says."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

import programs

import tfmultigpu as tmg

folder, *deaths = sys.argv[1:]
# Which worker gets which signal after which step, for each attempt.
attempt = int(os.environ.get("TFMULTIGPU_ATTEMPT", "0"))
victim, last, number = map(int, [*deaths, "-1@0@0", "-1@0@0"][attempt].split("@"))
worker = tmg.workers.cluster_from_environment().index


class Checkpoints(tmg.Checkpoints):
    """Says where a run begins, and where it ends for the victim."""

    def restore(self) -> int | None:
        restored = super().restore()
        print("BEGINS", attempt, restored, flush=True)
        return restored

    def after_step(self, *arguments: Any) -> None:
        super().after_step(*arguments)
        if worker == victim and self.step == last:
            os.kill(os.getpid(), number)


tmg.Checkpoints = Checkpoints
print("RESULT", programs.train(folder))
