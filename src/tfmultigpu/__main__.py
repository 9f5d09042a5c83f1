"""``python -m tfmultigpu demo``: train on one device and on several, and compare."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence

from tfmultigpu.errors import TfMultiGpuError

DATASETS = ("digits", "mnist", "cifar10")
MOST_REPLICAS = 16  # Tracing takes longer with each, and beyond this nothing new is shown.


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Args:
        arguments: The command line without the program; None for that of the process.

    Returns:
        The exit status: 0 where all is well, 1 where the demo's answers differ, 2 where it cannot
        run.
    """
    options = _parser().parse_args(arguments)
    from tfmultigpu.demo import DemoOptions, run_demo  # After the help, which needs no TensorFlow.

    try:
        return run_demo(
            DemoOptions(options.dataset, options.replicas, options.epochs, options.batch_size)
        )
    except (TfMultiGpuError, ConnectionError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tfmultigpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="train on one device and on several, and compare",
        description="Trains a small network on real images on one device and on several, with "
        "batches that do not divide, and compares. Exits with 1 where the answers differ.",
    )
    demo.add_argument("--dataset", choices=DATASETS, default="digits")
    demo.add_argument(
        "--replicas",
        type=_whole_number(2, MOST_REPLICAS),
        help="default: one per GPU, or 4 virtual CPUs",
    )
    demo.add_argument("--epochs", type=_whole_number(1), help="default: 10 for digits, 1 otherwise")
    demo.add_argument(
        "--batch-size",
        type=_whole_number(1),
        default=64,
        help="one more where it would divide evenly",
    )
    return parser


def _whole_number(least: int, most: float = math.inf) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            limit = "" if most == math.inf else f" and at most {most}"
            raise argparse.ArgumentTypeError(
                f"must be a whole number, at least {least}{limit}. Received: {text!r}"
            )
        return int(text)

    return number


if __name__ == "__main__":
    sys.exit(main())
