"""``python -m tfmultigpu``: the subcommands ``doctor``, ``demo`` and ``launch``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tfmultigpu.arguments import count_option
from tfmultigpu.errors import TfMultiGpuError

DATASETS = ("digits", "mnist", "cifar10")
MOST_REPLICAS = 16  # Tracing takes longer with each replica.


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Args:
        arguments: The command line without the program; None takes that of the process.

    Returns:
        The exit status: 0 for success, 1 if the demo's answers differ or the doctor finds an error,
        2 if the subcommand cannot run.
    """
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except Exception as error:
        if not isinstance(error, (TfMultiGpuError, ConnectionError)):
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tfmultigpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for add in _SUBCOMMANDS:
        add(commands)
    return parser


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="report why this machine uses one GPU or none, and what to change",
        description="Reports why TensorFlow uses one GPU or none here, and which line to change. "
        "Starts no device. Exits with 1 if it finds an error.",
    )
    doctor.add_argument("--json", action="store_true", help="as JSON, for a program")
    doctor.add_argument(
        "--show-addresses", action="store_true", help="show the addresses in TF_CONFIG, too"
    )
    doctor.set_defaults(run=_run_doctor)


def _run_doctor(options: argparse.Namespace) -> int:
    try:
        from tfmultigpu.diagnostics import doctor  # The help does not need TensorFlow.
    except Exception as error:  # TensorFlow imports Keras, which fails in many ways.
        print(
            f"TensorFlow cannot be imported: {type(error).__name__}: {error}. If it names a "
            "backend or a configuration, check the variable KERAS_BACKEND and "
            "~/.keras/keras.json. Otherwise: pip install --force-reinstall tensorflow.",
            file=sys.stderr,
        )
        return 1

    report = doctor(show_addresses=options.show_addresses)
    try:
        print(report.as_json() if options.json else report, flush=True)
    except BrokenPipeError:  # The reader stopped early, as "| head" does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if any(finding.severity == "error" for finding in report.findings) else 0


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="train on one device and on several, and compare",
        description="Trains a small network on real images on one device and on several, with "
        "batches that the replicas do not divide. Exits with 1 if the answers differ.",
    )
    demo.add_argument("--dataset", choices=DATASETS, default="digits")
    demo.add_argument(
        "--replicas",
        type=count_option(2, MOST_REPLICAS),
        help="default: one per GPU, or 4 virtual CPUs",
    )
    demo.add_argument("--epochs", type=count_option(), help="default: 10 for digits, 1 otherwise")
    demo.add_argument(
        "--batch-size",
        type=count_option(),
        default=64,
        help="one more if the replicas divide it",
    )
    demo.set_defaults(run=_run_demo)


def _run_demo(options: argparse.Namespace) -> int:
    from tfmultigpu.demo import DemoOptions, run_demo

    return run_demo(
        DemoOptions(options.dataset, options.replicas, options.epochs, options.batch_size)
    )


def _add_launch(commands: Any) -> None:
    from tfmultigpu.clusters.launcher import add_arguments, run

    parser = commands.add_parser(
        "launch",
        help="run a script as several workers on this machine",
        description="Runs a script as several workers on this machine, on the loopback address. "
        "Restarts all if one fails. Exits with the code of the first that failed.",
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


_SUBCOMMANDS = (_add_doctor, _add_demo, _add_launch)


if __name__ == "__main__":
    sys.exit(main())
