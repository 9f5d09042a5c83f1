"""Kills of training programs at random moments, and what becomes of the training."""

from __future__ import annotations

import random
import signal
from pathlib import Path

from copies import Copies
from runs import Findings, Run, moment, undisturbed

PROGRAMS = ("fit", "by_hand", "run")
_KINDS = {"start": 3, "run": 10, "save": 5, "end": 2}


def kills(count: int, folder: Path, seed: int, programs: tuple[str, ...] = PROGRAMS) -> int:
    """Kills programs ``count`` times, on one process and on two; returns how much is wrong."""
    chance = random.Random(seed)
    findings = Findings()
    cases = [(program, workers) for program in programs for workers in (1, 2)]
    with Copies() as copies:
        for number, (program, workers) in enumerate(cases):
            share = count * (number + 1) // len(cases) - count * number // len(cases)
            whole = Run(copies, program, workers, folder / f"{program}-{workers}-whole", findings)
            expected, seconds = undisturbed(whole)
            print(f"{whole.name}: {seconds}", flush=True)
            runs = 0
            while share > 0:
                runs += 1
                place = folder / f"{program}-{workers}-{runs}"
                share -= killed_until_finished(
                    Run(copies, program, workers, place, findings),
                    share,
                    expected,
                    seconds,
                    chance,
                    findings,
                )
    return findings.report()


def killed_until_finished(run, most, expected, seconds, chance, findings) -> int:
    """Kills a run at most so many times and lets it finish; returns how often it was killed."""
    done = 0
    while True:
        attempt = run.start(verify=chance.random() < 0.1)
        kind, victim = "none", None
        if done < most:
            (kind,) = chance.choices(list(_KINDS), list(_KINDS.values()))
            victim = moment(attempt, kind, seconds, chance)
        hit = victim is not None and victim.code is None
        if hit:
            victim.send(signal.SIGKILL)
        took = attempt.wait()
        run.check(attempt)
        if took == float("inf"):
            run.blame("hang", f"after a kill ({kind}) of {victim and victim.log.name}")
        if hit and victim.code == -signal.SIGKILL:
            done += 1
            findings.note(f"{run.name}: {kind}", took)
            run.check_survivors(attempt, attempt.copies.index(victim))
            print(
                f"{run.name}: {kind}, worker {attempt.copies.index(victim)} at step "
                f"{attempt.step()}, {took:.1f} s",
                flush=True,
            )
            continue
        results = run.results(attempt)
        if results:
            run.compare(results, expected)
            return done
        last = attempt.said[0][-1] if attempt.said[0] else ""
        run.blame("failed", f"nobody killed it, codes {[c.code for c in attempt.copies]}: {last}")
        return done
