"""Breaks each clause of the law in turn and shows which tests catch it.

``python tests/mutations/run.py [WORDS]`` tries the mutations whose names contain the words, all of
them without; ``--write`` also writes docs/contributing/mutations.md if all are caught.
"""

from __future__ import annotations

import sys

from mutating import PAGE, UNCHANGED, outcomes, page, survived
from mutations import MUTATIONS


def main(arguments: list[str]) -> int:
    words = " ".join(argument for argument in arguments if argument != "--write")
    chosen = [mutation for mutation in MUTATIONS if words in mutation.name]
    found = outcomes(chosen)
    alive = 0
    for test, (outcome, _, line) in found[UNCHANGED].items():
        if outcome != "passed":
            print(f"{test} {outcome} on the source as it is: {line}")
    for mutation in chosen:
        wrong = survived(mutation, found)
        alive += bool(wrong)
        print(f"{'SURVIVED' if wrong else 'caught'}: {mutation.name}")
        for test, (_, kinds, line) in found[mutation.name].items():
            print(f"    {test}\n        {kinds.split(' ')[0]}: {line[:150]}")
        if wrong:
            print(f"  ! {wrong}")
    print(f"{len(chosen) - alive} of {len(chosen)} mutations caught")
    if "--write" in arguments and not alive and not words:
        PAGE.write_text(page())
        print(f"written: {PAGE}")
    return alive


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
