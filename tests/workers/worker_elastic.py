"""Trains with logical replicas; workers get a signal where the command line says."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import elastic

import tfmultigpu as tmg

folder, *deaths = sys.argv[1:]
# Which workers get which signal after which step, for each attempt.
attempt = int(os.environ["TFMULTIGPU_ATTEMPT"])
victims, last, number = [*deaths, *["@0@0"] * 4][attempt].split("@")
strategy = tmg.create_strategy(startup_timeout=300.0)
cluster = tmg.workers.cluster_from_environment()
worker = "0" if cluster is None else f"{cluster.index}"
callbacks: list[Any] = []
if worker in victims.split(","):

    def end() -> None:
        time.sleep(float(int(number) == signal.SIGKILL))  # All victims have made the step then.
        elastic.die(int(number))

    callbacks.append(elastic.AtStep(int(last), end))
elif int(number) == signal.SIGTERM:  # It hears of the signal later than the others.
    callbacks.append(elastic.AtStep(int(last), functools.partial(time.sleep, 3.0)))
try:
    restored, digest = elastic.train(folder, strategy, callbacks)
finally:
    if int(number) == signal.SIGTERM and worker == "0":
        time.sleep(3.0)  # It ends later than the others.
print("RESULT", digest, flush=True)
