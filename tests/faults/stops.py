"""SIGTERM to training programs at random moments: each ends soon, as documented, and resumes."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

from copies import Copies
from programs import EVERY
from runs import Attempt, Findings, Run, moment, undisturbed

# Program, whether it saves. Each on one process and on two workers.
CASES = (
    ("fit", True),
    ("by_hand", True),
    ("run", True),
    ("saving", True),
    ("fit", False),
    ("by_hand", False),
    ("run", False),
    ("evaluate", False),
    ("predict", False),
)
_KINDS = {"start": 2, "run": 7, "end": 1}
# Five times of what was measured on a machine with five busy programs for each core, where the step
# that is being made may still have to be traced.
BOUNDS = {"stopped": 60.0, "stopped together": 80.0, "lost": 80.0}


def stops(count: int, folder: Path, seed: int, programs: tuple[str, ...] = ()) -> int:
    """Sends SIGTERM ``count`` times; returns how much is wrong."""
    chance = random.Random(seed)
    findings = Findings()
    cases = [(*one, workers) for workers in (1, 2) for one in CASES]
    known: dict[tuple[str, int], Any] = {}
    with Copies() as copies:
        for number, (program, saves, workers) in enumerate(cases):
            if programs and program not in programs:
                continue
            share = count * (number + 1) // len(cases) - count * number // len(cases)
            name = f"{program}-{'saves' if saves else 'bare'}-{workers}"
            key = program, workers
            if key not in known:
                whole = Run(copies, program, workers, folder / f"{name}-whole", findings)
                known[key] = undisturbed(whole, saves=saves)
            for time_ in range(share):
                run = Run(copies, program, workers, folder / f"{name}-{time_}", findings)
                stopped(run, saves, *known[key], chance, findings)
    return findings.report()


def stopped(
    run: Run,
    saves: bool,
    expected: list[dict[str, Any]],
    seconds: dict[str, float],
    chance: random.Random,
    findings: Findings,
) -> None:
    """Stops a run once, and if it saves lets it finish."""
    every = 1 if run.name.startswith("saving") else EVERY
    while True:
        attempt = run.start(saves=saves)
        (kind,) = chance.choices(list(_KINDS), list(_KINDS.values()))
        victim = moment(attempt, kind, seconds, chance)
        attempt.look()
        phase = "training" if attempt.value("STEP") and not attempt.value("END") else kind
        victim.send(signal.SIGTERM)
        took = attempt.wait()
        if phase == "training" and attempt.value("END"):
            phase = "end"  # It came a moment later.
        if took == float("inf"):
            run.blame("hang", f"after SIGTERM ({phase}) to {victim.log.name}")
        codes = [copy.code for copy in attempt.copies]
        index = attempt.copies.index(victim)
        if victim.code == 0:  # It had finished already.
            if saves:
                run.check(attempt, every)
            continue
        what = how(run, attempt, index, saves and phase == "training")
        findings.note(f"{run.name}{', saves' * saves}: {phase}, {what}", took)
        print(f"{run.name}, worker {index} ({phase}): {codes}, {what}, {took:.1f} s", flush=True)
        if took > BOUNDS[what]:
            run.blame("slow", f"{took:.1f} s after SIGTERM, more than {BOUNDS[what]:g} s")
        break
    if not saves:
        return
    run.check(attempt, every)
    again = run.start()
    again.wait()
    run.check(again, every)
    results = run.results(again)
    if results:
        run.compare(results, expected)
    else:
        run.blame("failed", f"resumed, with codes {[copy.code for copy in again.copies]}")


def how(run: Run, attempt: Attempt, victim: int, must_save: bool) -> str:
    """Returns how the processes of an attempt ended; takes note of ends that are not promised."""
    codes = [copy.code for copy in attempt.copies]
    saved = [any("Asked to stop: saved step" in line for line in one) for one in attempt.said]
    if all(code == 143 for code in codes) and all(saved):
        return "stopped together" if len(codes) > 1 else "stopped"
    if codes[victim] != -signal.SIGTERM or must_save:
        run.blame("code", f"{codes}, saved {saved}; SIGTERM to worker {victim}")
    run.check_survivors(attempt, victim)
    return "lost" if len(codes) > 1 else "stopped"
