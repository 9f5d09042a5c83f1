"""What a profile says in a few numbers: how busy the GPU was, and what it waited for."""

from __future__ import annotations

import collections
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = ["busy", "profiled"]

KEPT = Path(tempfile.gettempdir()) / "tfmultigpu-profiles"  # For TensorBoard.
GAPS = 5
PICOSECONDS = 1e-9  # milliseconds

Spans = list[tuple[float, float]]


def profiled(run: Callable[[], Any], case: str, name: str) -> dict[str, Any]:
    """Runs some steps under TensorFlow's profiler; returns what its tracks say, and where it is."""
    import tensorflow as tf

    folder = KEPT / case / name
    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2)
    with tf.profiler.experimental.Profile(str(folder), options):
        run()
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    planes = _planes(files[-1])
    of_gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    spans: Spans = []
    totals: collections.Counter[str] = collections.Counter()
    for plane in of_gpus or [plane for plane in planes if plane.name == "/host:CPU"]:
        for line in plane.lines:
            for event in line.events:
                begin = line.timestamp_ns * 1e-6 + event.offset_ps * PICOSECONDS
                length = event.duration_ps * PICOSECONDS
                spans.append((begin, begin + length))
                totals[plane.event_metadata[event.metadata_id].name[:80]] += length
    longest = {kind: round(time, 3) for kind, time in totals.most_common(15)}
    return {"folder": str(folder), "track": "GPU" if of_gpus else "host", **busy(spans),
            "events": len(spans), "longest_ms": longest}  # fmt: skip


def busy(spans: Iterable[tuple[float, float]]) -> dict[str, Any]:
    """Returns the share of the time in which something ran, and the longest gaps between, in ms."""
    end = begin = None
    work, gaps = 0.0, []
    for first, last in sorted(spans):
        if end is None:
            begin = end = first
        if first > end:
            gaps.append(first - end)
        work += max(0.0, last - max(first, end))
        end = max(end, last)
    whole = (end or 0.0) - (begin or 0.0)
    share = work / whole if whole else 0.0
    longest = [round(gap, 3) for gap in sorted(gaps, reverse=True)[:GAPS]]
    return {"busy_share": round(share, 4), "ms": round(whole, 3), "longest_gaps_ms": longest}


def _planes(file: Path) -> list[Any]:
    # The format of the profiler's file, which no public name of TensorFlow reads.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(file.read_bytes())
    return list(space.planes)
