"""The command line: ``tfmultigpu``, or ``python -m tfmultigpu``, with its subcommands."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfmultigpu._version import __version__
from tfmultigpu.addons.workers import launcher
from tfmultigpu.errors import TfMultiGpuError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Returns:
        The exit status: 0 for success, 1 if the demo's answers differ or the doctor finds an error,
        2 if the subcommand cannot run, 141 if nobody reads what it prints.
    """
    try:
        try:
            options = _parser().parse_args(arguments)
            return int(options.run(options))
        except (TfMultiGpuError, ImportError) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 2
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # The reader stopped early, as "| head" does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfmultigpu" if Path(sys.argv[0]).stem == "tfmultigpu" else "python -m tfmultigpu",
        description="Trains Keras models on several GPUs with the results of one device.",
    )
    parser.add_argument("--version", action="version", version=f"tfmultigpu {__version__}")
    commands = parser.add_subparsers(required=True, title="commands")
    doctor = commands.add_parser("doctor", help="report why this machine uses one GPU or none")
    doctor.add_argument("--links", action="store_true", help="test the links between GPUs, too")
    text = "read what tmg.watch has written, and say the likely cause"
    doctor.add_argument("--watch", nargs="+", metavar="FILE", help=text)
    doctor.set_defaults(run=_run_doctor)
    demo = commands.add_parser("demo", help="train on one device and on several, and compare")
    text = "2 to 16; default: one per GPU, or 4 virtual CPUs"
    demo.add_argument("--replicas", type=int, choices=range(2, 17), metavar="N", help=text)
    demo.add_argument("--epochs", type=int, default=10, metavar="N", help="default: 10")
    demo.set_defaults(run=_run_demo)
    launch = commands.add_parser("launch", help="run a script as several workers on this machine")
    launch.set_defaults(run=launcher.run)
    launcher.add_arguments(launch)
    return parser


def _run_doctor(options: argparse.Namespace) -> int:
    try:
        # The help does not need TensorFlow.
        from tfmultigpu.addons.diagnostics import check_links, doctor
    except Exception as error:  # TensorFlow imports Keras, which fails in many ways.
        sys.exit(
            f"TensorFlow cannot be imported: {type(error).__name__}: {error}. If it names a "
            "backend or a configuration, check the variable KERAS_BACKEND and "
            "~/.keras/keras.json. Otherwise: pip install --force-reinstall tensorflow."
        )
    if options.watch:
        from tfmultigpu.addons.watching.causes import in_words_of, read_reports

        print(in_words_of(read_reports(options.watch)))
        return 0
    reports = [doctor(), *([check_links()] if options.links else [])]
    print(*reports, sep="\n\n")
    return int(any("error" in [f.severity for f in report.findings] for report in reports))


def _run_demo(options: argparse.Namespace) -> bool:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with _without_start_lines():
        from tfmultigpu.demo import run_demo

    log = logging.getLogger("tfmultigpu")
    level = log.level
    log.setLevel(logging.ERROR)  # The demo says by itself where it trains.
    try:
        return not run_demo(options.replicas, options.epochs)
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def _without_start_lines() -> Iterator[None]:
    """Leaves out what TensorFlow writes about its build while it is imported; errors are raised."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
