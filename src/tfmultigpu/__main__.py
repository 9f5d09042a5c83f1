"""The command line: ``tfmultigpu``, or ``python -m tfmultigpu``, with its subcommands."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfmultigpu._version import __version__
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
        2 if the subcommand cannot run, 141 if it ended because nobody reads what it prints.
    """
    code = 128 + signal.SIGPIPE
    try:
        code = _run(arguments)
    except SystemExit:  # Of the parser, which has printed help or an error.
        _print_the_rest()
        raise
    except BrokenPipeError:  # The reader stopped early, as "| head" does.
        pass
    _print_the_rest()
    return code


def _print_the_rest() -> None:
    """Flushes standard output; drops what is left if nobody reads it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except BrokenPipeError:
        raise
    except Exception as error:
        if not isinstance(error, (TfMultiGpuError, ImportError, ConnectionError)):
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    script = Path(sys.argv[0]).stem == "tfmultigpu"
    name = "tfmultigpu" if script else "python -m tfmultigpu"
    parser = argparse.ArgumentParser(
        prog=name,
        description="Trains Keras models on several GPUs and gets the answer one device would have "
        "given.",
        epilog=f"{name} COMMAND --help explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"tfmultigpu {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
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
    with contextlib.suppress(BrokenPipeError):  # The exit status says enough.
        print(report.as_json() if options.json else report)
    return 1 if any(finding.severity == "error" for finding in report.findings) else 0


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="train on one device and on several, and compare",
        description="Trains a small network on real images on one device and on several, with "
        "batches that the replicas do not divide. Exits with 1 if the answers differ.",
    )
    demo.add_argument(
        "--dataset",
        choices=DATASETS,
        default="digits",
        help="default: digits, which needs no download",
    )
    demo.add_argument(
        "--replicas",
        type=count_option(2, MOST_REPLICAS),
        metavar="N",
        help=f"2 to {MOST_REPLICAS}; default: one per GPU, or 4 virtual CPUs",
    )
    demo.add_argument(
        "--epochs",
        type=count_option(),
        metavar="N",
        help="default: 10 for digits, 1 otherwise",
    )
    demo.add_argument(
        "--batch-size",
        type=count_option(),
        default=64,
        metavar="N",
        help="default: 64; one more if the replicas divide it",
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
