"""The thread that watches: it says what is waited for, and never takes part in the training."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tfmultigpu.addons.watching import states
from tfmultigpu.addons.watching.causes import in_a_line, likely_cause, states_of
from tfmultigpu.addons.watching.stacks import NAME, passes
from tfmultigpu.recorder import recorder
from tfmultigpu.strategies.process_state import process_state

_log = logging.getLogger("tfmultigpu")
_LONGEST_INTERVAL = 5.0
_WRITE_SECONDS = 10.0


class Settings(NamedTuple):
    """What a watch asks for.

    Attributes:
        seconds: After which a wait is reported.
        directory: Where its report is written; None: a folder for temporary files.
        thread: The thread whose ``fit`` it is a callback of; None if it is a context.
    """

    seconds: float
    directory: str | None
    thread: int | None = None


class Watcher:
    """Watches this process while there are watches; of several the last one counts.

    Attributes:
        watches: The watches that have begun and not ended, the last one at the end.
    """

    def __init__(self) -> None:
        self.watches: list[Settings] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._looked = self._floor = self._since = time.monotonic()
        self._due, self._reports = 0.0, 0

    def begin(self, watch: Settings) -> None:
        """Begins a watch, which counts from now on."""
        with self._lock:
            self.watches.append(watch)
            self._floor, self._reports = time.monotonic(), 0
            if len(self.watches) == 1:
                self._looked, self._stop = self._floor, threading.Event()
                recorder.begin(describe)
                threading.Thread(
                    target=self._watch, args=(self._stop,), name=NAME, daemon=True
                ).start()

    def end(self, watch: Settings) -> None:
        """Ends a watch, if it has not ended."""
        with self._lock:
            if watch in self.watches:
                self.watches.reverse()
                self.watches.remove(watch)
                self.watches.reverse()
                if not self.watches:
                    self._stop.set()
                    recorder.end()

    def _watch(self, stop: threading.Event) -> None:
        """Looks now and then; an error of its own is reported, and nothing else happens."""
        while True:
            watches = self.watches[-1:]
            interval = min(watches[0].seconds / 10, _LONGEST_INTERVAL) if watches else 0.0
            if stop.wait(interval):
                return
            try:
                if watches:
                    self._look(watches[0], interval)
            except Exception as error:
                _say(f"tmg.watch cannot report: {type(error).__name__}: {error}")

    def _look(self, watch: Settings, interval: float) -> None:
        now = time.monotonic()
        if now - self._looked > interval + watch.seconds / 2:
            self._floor = now  # This process was stopped itself, with all that it waits for.
        since = max(recorder.longest_wait()[1], self._floor)
        if since != self._since:
            if self._reports:
                _say(f"What was waited for has ended, after {now - self._since:.0f} s.")
            self._since, self._due, self._reports = since, watch.seconds, 0
        if now - since >= self._due:
            self._due *= 2
            self._report(watch, since)
        self._looked = time.monotonic()

    def _report(self, watch: Settings, since: float) -> None:
        report = states.report()
        if recorder.longest_wait()[1] > since:
            return  # It has ended meanwhile, and the report is of what came after it.
        if watch.thread is not None and not _in_fit(report, watch.thread):
            self.end(watch)  # An error has ended the ``fit``, of which a callback does not hear.
            recorder.forget(watch.thread)
            return
        self._reports += 1
        report["report"] = self._reports
        known = states_of([report])
        lines = [f"Nothing has ended for {report['seconds']:.0f} s. {in_a_line(report)}."]
        for state in known.values():
            if state is not report and "phase" in state:
                lines.append(f"{in_a_line(state)}.")
        lines.append(f"Likely cause: {likely_cause(known)}")
        folder = _folder(watch)
        name = report["pid"] if report["worker"] is None else f"worker-{report['worker']}"
        try:
            states.within(_WRITE_SECONDS, lambda: _write(folder, f"watch-{name}.json", report))
            lines.append(
                f"The stacks of all threads are in {folder / f'watch-{name}.json'}; to read it: "
                f"python -m tfmultigpu doctor --watch {folder}"
            )
        except (OSError, TimeoutError) as error:  # A full disk, maybe the very cause.
            lines.append(f"The report cannot be written to {folder}: {error!r}")
        _say(" ".join(lines))


def describe() -> dict[str, Any]:
    """Returns what this process does, for another worker; never raises."""
    try:
        return states.describe()
    except Exception as error:  # A thread changed what was read.
        return {"unwatched": True, "error": repr(error)}


def _in_fit(report: Mapping[str, Any], thread: int) -> bool:
    for other in report["threads"]:
        if other["id"] == thread:
            return passes(other["frames"], "", "fit")
    return False


def _folder(watch: Settings) -> Path:
    if watch.directory is not None:
        return Path(watch.directory)
    cluster = process_state.cluster
    run = f"{os.getpid()}" if cluster is None else cluster.workers[0].replace(":", "-")
    return Path(tempfile.gettempdir(), f"tfmultigpu-watch-{run}")


def _write(folder: Path, name: str, report: Mapping[str, Any]) -> None:
    """Writes a report; the one before stays until the new one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden = folder / f".{name}"
    try:
        hidden.write_text(json.dumps(report, indent=1), "utf-8")
        hidden.replace(folder / name)
    finally:
        with contextlib.suppress(OSError):
            hidden.unlink(missing_ok=True)


def _say(text: str) -> None:
    """Logs a text, and does not wait where nobody reads the log."""
    with contextlib.suppress(TimeoutError):
        states.within(_WRITE_SECONDS, lambda: _log.warning("%s", text))


watcher = Watcher()
