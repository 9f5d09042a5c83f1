"""One run of a program over all its attempts: what happened, and whether it went as promised."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import statistics
import time
from pathlib import Path
from typing import Any

from copies import Copies, Copy
from programs import EVERY

from tfmultigpu.addons.workers.processes import free_addresses, worker_environment

# Seconds in which nobody says anything and nobody ends. Measured: 32 s on a loaded machine until
# the others of a start are given up.
HANGS_AFTER = 90.0
_LOST = "tfmultigpu.errors.WorkerLostError: Another worker is gone"
_ABSENT = "tfmultigpu.errors.ClusterError: "


@dataclasses.dataclass
class Findings:
    """What was found, over all runs.

    Attributes:
        counts: How often each moment was hit.
        ends: Seconds from each fault to the end of the last process.
        wrong: What was not as promised.
    """

    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    ends: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    wrong: list[str] = dataclasses.field(default_factory=list)
    finished: int = 0

    def note(self, what: str, seconds: float) -> None:
        """Takes note of a fault and of how long the processes took to end."""
        self.counts[what] = self.counts.get(what, 0) + 1
        self.ends.setdefault(what, []).append(seconds)

    def blame(self, kind: str, text: str) -> None:
        """Takes note of something that is not as promised, and says it at once."""
        self.wrong.append(f"{kind}: {text}")
        print(f"  ! {self.wrong[-1]}", flush=True)

    def report(self) -> int:
        """Prints a table, and returns how much is wrong."""
        print(f"\n{'fault':44} {'times':>5} {'median s':>9} {'longest s':>9}")
        for what, seconds in sorted(self.ends.items()):
            middle, longest = statistics.median(seconds), max(seconds)
            print(f"{what:44} {len(seconds):5} {middle:9.1f} {longest:9.1f}")
        total = sum(self.counts.values())
        kinds = [one.split(":")[0] for one in self.wrong]
        print(f"{total} faults in {self.finished} runs; wrong: {len(self.wrong)}", end=" ")
        print({kind: kinds.count(kind) for kind in sorted(set(kinds))} or "")
        for one in self.wrong:
            print(f"  ! {one}")
        return len(self.wrong)


class Attempt:
    """The processes of one start.

    Attributes:
        copies: They.
        began: When they were started.
    """

    def __init__(self, copies: Copies, program: str, workers: int, folder: Path, *more: Any):
        """Starts them."""
        number = len(list(folder.glob("*.log")))
        addresses = free_addresses(workers)
        self.began = time.monotonic()
        self.copies = [
            copies.start(
                program,
                [str(folder), *more],
                folder / f"{number:03d}-worker-{index}.log",
                **worker_environment(addresses, index, {}),
            )
            for index in range(workers)
        ]
        self.said: list[list[str]] = [[] for _ in self.copies]

    def look(self) -> None:
        """Reads what they have printed."""
        for said, copy in zip(self.said, self.copies, strict=True):
            said += copy.lines()

    def value(self, word: str, worker: int = 0) -> str | None:
        """Returns the last of what a worker said after a word."""
        lines = [one for one in self.said[worker] if one.startswith(f"{word} ")]
        return lines[-1].removeprefix(f"{word} ") if lines else None

    def heard(self, word: str) -> bool:
        """Returns whether the first worker has said a word."""
        self.look()
        return self.value(word) is not None

    def ended(self) -> bool:
        """Returns whether all have ended."""
        return all(copy.code is not None for copy in self.copies)

    def wait(self, seconds: float = HANGS_AFTER) -> float:
        """Waits for all to end; returns the seconds, infinite if they were silent for so long."""
        start = heard = time.monotonic()
        known = self._progress()
        while not self.ended() and time.monotonic() < heard + seconds:
            time.sleep(0.01)
            if known != self._progress():
                known, heard = self._progress(), time.monotonic()
        hangs = not self.ended()
        for number, pause in ((signal.SIGUSR2, 1.0), (signal.SIGKILL, 0.0)):
            for copy in self.copies:
                copy.send(number)
            time.sleep(pause if hangs else 0.0)
        for copy in self.copies:
            copy.wait(10.0)
        self.look()
        return float("inf") if hangs else time.monotonic() - start

    def _progress(self) -> tuple[int, ...]:
        ended = sum(copy.code is not None for copy in self.copies)
        return (ended, *(copy.log.stat().st_size for copy in self.copies))

    def step(self) -> int:
        """Returns the last step that the first worker has said."""
        return int(self.value("STEP") or 0)


def newest(folder: Path) -> int:
    """Returns the step of the newest checkpoint; -1 for none."""
    names = (folder / "checkpoints").glob("step-*.npz")
    return max((int(path.stem.split("-")[1]) for path in names), default=-1)


class Run:
    """A program that is started until it has finished.

    Attributes:
        name: What it is called in reports.
        folder: Where its checkpoints and logs are.
    """

    def __init__(
        self, copies: Copies, program: str, workers: int, folder: Path, findings: Findings
    ) -> None:
        """Begins in a folder of its own."""
        self.name = f"{program}, {workers} worker{'s' * (workers > 1)}"
        self.folder = folder
        self.workers = workers
        self._copies, self._program, self._findings = copies, program, findings
        self._before = -1
        folder.mkdir(parents=True)

    def start(self, *, saves: bool = True, verify: bool = False) -> Attempt:
        """Starts it, for the next time."""
        self._before = newest(self.folder)
        verified = "first" if verify else False
        return Attempt(self._copies, self._program, self.workers, self.folder, saves, verified)

    def check(self, attempt: Attempt, every: int = EVERY) -> None:
        """Checks what an attempt began from, once it has ended: the newest that there was."""
        restored = attempt.value("RESTORED")
        if restored is not None and int(restored) != self._before:
            self.blame("lost", f"restored {restored}, and step {self._before} was the newest")
        # A step is said before it may be saved: the checkpoints of those said before are whole.
        said = [int(one[5:]) for one in attempt.said[0] if one.startswith("STEP ")]
        whole = said[-2] // every * every if len(said) > 1 else 0
        if newest(self.folder) < whole:
            self.blame("lost", f"step {said[-1]} was made, {newest(self.folder)} is the newest")

    def blame(self, kind: str, text: str) -> None:
        """Takes note of something that is wrong."""
        self._findings.blame(kind, f"{self.name}, {text} ({self.folder})")

    def check_survivors(self, attempt: Attempt, victim: int) -> None:
        """Checks how the other workers ended when one was killed."""
        for index, copy in enumerate(attempt.copies):
            if index == victim:
                continue
            lines = [line for line in attempt.said[index] if line]
            last = lines[-1] if lines else ""
            words = any(line.startswith((_LOST, _ABSENT)) for line in lines)
            finished = copy.code == 0 and attempt.value("RESULT", index) is not None
            gave_up = copy.code == 1 and "STRATEGY " not in lines
            if not (finished or (copy.code == 1 and words) or gave_up):
                self.blame("words", f"worker {index} ended with {copy.code}: {last[:200]}")

    def results(self, attempt: Attempt) -> list[dict[str, Any]]:
        """Returns what all workers of an attempt have made; empty if any has not finished."""
        found = [attempt.value("RESULT", index) for index in range(self.workers)]
        finished = all(copy.code == 0 for copy in attempt.copies)
        return [json.loads(one) for one in found if one] if finished and all(found) else []

    def compare(self, results: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
        """Compares what was made with what an undisturbed run has made, to the bit."""
        self._findings.finished += 1
        for index, (one, other) in enumerate(zip(results, expected, strict=True)):
            for part in one:
                if one[part] != other[part]:
                    text = f"worker {index}: {part} {one[part]}, undisturbed {other[part]}"
                    self.blame("different", text)


def undisturbed(run: Run, saves: bool = True) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Returns the results of a run that nobody disturbs, and the seconds of its parts."""
    attempt = run.start(saves=saves)
    seconds: dict[str, float] = {}
    for word in ("STEP", "END"):
        while not attempt.heard(word) and not attempt.ended():
            time.sleep(0.003)
        seconds[word] = time.monotonic() - attempt.began
    attempt.wait()
    results = run.results(attempt)
    if not results:
        raise RuntimeError(f"{run.name} fails undisturbed:\n" + "\n".join(attempt.said[0][-30:]))
    seconds["all"] = time.monotonic() - attempt.began
    return results, seconds


def moment(attempt: Attempt, kind: str, seconds: dict[str, float], chance: random.Random) -> Copy:
    """Waits for a random moment of a kind; returns the process to be hit."""
    victim = chance.choice(attempt.copies)

    def until(word: str) -> None:
        victim.wait(4 * HANGS_AFTER, lambda: attempt.heard(word) or attempt.ended())

    if kind == "start":
        victim.wait(chance.uniform(0.0, seconds["STEP"]))
    elif kind == "run":
        until("STEP")
        victim.wait(chance.uniform(0.0, (seconds["END"] - seconds["STEP"]) / 2))
    elif kind == "save":
        until("STEP")
        folder = Path(attempt.copies[0].log).parent / "checkpoints"
        for _ in range(chance.randint(1, 4)):
            victim.wait(HANGS_AFTER, lambda: not any(folder.glob(".step-*")))
            victim.wait(HANGS_AFTER, lambda: any(folder.glob(".step-*")))
        victim.wait(chance.uniform(0.0, 0.04))
    else:
        until("END")
        victim.wait(chance.uniform(0.0, seconds["all"] - seconds["END"]))
    return victim
