"""Breaks each clause of the law in turn and shows which tests catch it.

``python tests/mutations/run.py [WORDS]`` tries the mutations whose names contain the words, all of
them without; ``--write`` also writes docs/mutations.md if all are caught. ``--plain`` lists the
promises that plain Keras under MirroredStrategy keeps as well, which prove nothing of this library.
"""

from __future__ import annotations

import sys

from mutating import PAGE, UNCHANGED, outcomes, outcomes_on_plain_keras, page, survived
from mutations import MUTATIONS


def main(arguments: list[str]) -> int:
    if "--plain" in arguments:
        return promises_of_plain_keras()
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


def promises_of_plain_keras() -> int:
    """Prints how each promise ends without this library; the passed ones last."""
    ends = outcomes_on_plain_keras()
    for test, (outcome, kinds, line) in sorted(ends.items(), key=lambda end: end[1][0]):
        print(f"{outcome}: {test}  {kinds.partition(' ')[0]} {line[:100]}")
    passed = sum(end[0] == "passed" for end in ends.values())
    print(f"{passed} of {len(ends)} promises are kept by plain Keras")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
