"""Kills and stops a training at random moments, on one process and on two workers.

``python tests/faults/run.py 100`` makes a hundred faults; ``--seed 1`` has other moments. Every run
must end, be resumed, and give to the bit what an undisturbed one gives. The exit code is how much
went otherwise.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import programs
from law.processes import Worker, WorkerRaised, pool

WITHIN = 90.0  # Seconds until all have ended; DESIGN promises 60 on a machine that is not busy.
FAULTS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def start(workers: int, folder: Path) -> list[Worker]:
    processes = pool().cluster(workers) if workers > 1 else [pool().start()]
    for process in processes:
        process.begin(programs.train, str(folder))
    return processes


def results(processes: list[Worker]) -> list[str]:
    """Returns what each process gave, or how it ended."""
    found = []
    for process in processes:
        try:
            found.append(process.result(WITHIN))
        except WorkerRaised as error:
            found.append(error.kinds[0])
        except AssertionError as error:  # Of the pool, which waits no longer, or of the program.
            print(f"! {error}", flush=True)
            found.append("hangs" if "no result in" in str(error) else "AssertionError")
            process.send_signal(signal.SIGKILL)
    for process in processes:
        process.end()
    return found


def disturb(processes: list[Worker], seconds: float, chance: random.Random) -> tuple[int, str]:
    """Sends a signal to one of the processes, while they start or train; returns which."""
    victim, number = chance.choice(processes), chance.choice(FAULTS)
    trains = chance.random() < 0.8
    end = time.monotonic() + WITHIN
    while trains and "STEP" not in victim.printed() and victim.code is None:
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    time.sleep(chance.uniform(0.0, seconds if trains else 2.0))
    victim.send_signal(number)
    return processes.index(victim), f"{number.name} while it {'trains' if trains else 'starts'}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    chance = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    print(f"checkpoints: {folder}", flush=True)
    expected, seconds = {}, {}
    for workers in (1, 2):
        began = time.monotonic()
        (expected[workers], *_) = results(start(workers, folder / f"{workers}-whole"))
        seconds[workers] = (time.monotonic() - began) / 4
    made, wrong, run = 0, 0, 0
    fine = {"WorkerLostError", "ClusterError", "exit code 143", "exit code 1"}
    while made < options.faults:
        workers, finished, good = run % 2 + 1, [], True
        while good and not finished:
            processes = start(workers, folder / f"{workers}-{run}")
            victim, fault = -1, "nothing"
            if made < options.faults:
                victim, fault = disturb(processes, seconds[workers], chance)
                made += 1
            began = time.monotonic()
            found = results(processes)
            finished = [one for one in found if len(one) == 64]
            others = [one for i, one in enumerate(found) if i != victim and one not in finished]
            good = {*finished} <= {expected[workers]} and {*others} <= fine and "hangs" not in found
            good = good and (victim >= 0 or len(finished) == workers)
            wrong += not good
            what = f"{workers} worker(s), {fault} on {victim}: {found}"
            print("!" if not good else " ", what, f"{time.monotonic() - began:.1f} s", flush=True)
        run += 1
    print(f"{made} faults, {wrong} went otherwise than promised")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
