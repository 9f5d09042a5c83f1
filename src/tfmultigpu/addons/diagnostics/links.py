"""``doctor --links``: copies between each pair of devices, and sums over all, right to the bit.

They run in a process of their own, because a broken link may hang TensorFlow for ever.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.addons.diagnostics.report import Finding, Report
from tfmultigpu.devices import enable_memory_growth, list_devices, split_device
from tfmultigpu.errors import StrategyUnavailableError
from tfmultigpu.strategies import create_strategy
from tfmultigpu.types import Nested, Tensor

_CHILD = (
    "import sys; from tfmultigpu.addons.diagnostics import links; links.run_tests(*sys.argv[1:])"
)
_START = "start of the devices"
_START_SECONDS = 120.0  # It imports TensorFlow.
_MARK = "link test: "
_SIZE = 2**22  # Numbers in a test.
_WHY = "Training on these devices gives NaN, another result or hangs; on one alone it is fine."
_CHANGE = (
    'tmg.create_strategy(communication="one_device"); or NCCL_P2P_DISABLE=1 in the environment; or '
    "turn off ACS in the BIOS and the IOMMU (kernel options intel_iommu=off, amd_iommu=off)"
)


def check_links(devices: Sequence[str] | None = None, *, seconds: float = 15.0) -> Report:
    """Tests the links between devices: copies known bytes, and adds powers of two each way.

    Args:
        devices: The names of logical devices, also of CPUs; None means all GPUs.
        seconds: The limit of each test, in seconds.

    Returns:
        The report: a finding for each test that fails, and the milliseconds of the others.

    Example:
        >>> import tfmultigpu as tmg
        >>> tmg.diagnostics.check_links(["CPU:0"]).codes
        ('no-links',)
    """
    return report_of(devices or [device.name for device in list_devices("GPU")], seconds)


def report_of(names: Sequence[str], seconds: float, child: str = _CHILD) -> Report:
    """Runs the tests in a child process, whose Python code is ``child``."""
    title = f"tfmultigpu doctor --links: {len(names)} device(s)"
    if len(names) < 2:
        what = "Links are between GPUs, and there are no two."
        return Report(title, (Finding("note", "no-links", what, "Nothing to test.", "-"),), {})
    results = _run([sys.executable, "-c", child, str(seconds), *names], seconds * len(names) ** 2)
    findings = []
    for test, text in results.items():
        if not text.endswith((" ms", "available")):
            findings.append(Finding("error", "broken-link", f"{test}: {text}", _WHY, _CHANGE))
    if not findings:
        what = f"{len(results) - 1} tests of {', '.join(names)} are right to the bit."
        findings = [Finding("note", "links-in-order", what, "The links are in order.", "-")]
    return Report(title, tuple(findings), {"tests": results})


def _run(command: list[str], seconds: float) -> dict[str, str]:
    """Runs the tests; returns the milliseconds of each, or the fault."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        for limit in (_START_SECONDS + seconds, 10.0):  # A driver may hold it for ever.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit)
            process.kill()
        output.seek(0)
        lines = output.read().strip().splitlines()
    results = {_START: ""}
    for line in lines:
        if line.startswith(_MARK):
            test, result = json.loads(line.removeprefix(_MARK))
            results[test] = result
    test = list(results)[-1]
    if not results[test]:
        slow = process.returncode is None or any(line.startswith("Timeout (") for line in lines)
        results[test] = f"ended with code {process.returncode}: {''.join(lines[-1:])}"
        if slow:
            results[test] = "did not end in time"
    return results


def run_tests(seconds: str, *devices: str, size: int = _SIZE) -> None:
    """Runs the tests, and prints the name of each when it begins, and its result."""
    if "GPU" in devices[0].upper():
        enable_memory_growth()
    else:
        split_device("CPU:0", parts=len(devices))
    tests: dict[str, Callable[[], str]] = {_START: str}
    for source, target in itertools.permutations(devices, 2):
        tests[f"copy {source} -> {target}"] = partial(test_copy, source, target, size)
    for way in ("nccl", "hierarchical_copy", "one_device"):
        name = f"sum over {', '.join(devices)} by {way}"
        tests[name] = partial(test_sum, devices, way, size)
    for name, test in tests.items():
        print(_MARK + json.dumps([name, ""]), flush=True)
        # Whatever holds Python's lock.
        faulthandler.dump_traceback_later(float(seconds), exit=True)
        begin = time.perf_counter()
        fault = test() or f"{1e3 * (time.perf_counter() - begin):.0f} ms"
        print(_MARK + json.dumps([name, fault]), flush=True)


def copy(tensor: tf.Tensor, device: str) -> Tensor:
    """Copies a tensor to a device."""
    with tf.device(device):
        return tf.identity(tensor)


def add(strategy: tf.distribute.Strategy, size: int) -> Tensor:
    """Adds 1, 2, 4 ... of the replicas; returns the sum that each has."""

    def replica() -> Nested:
        context = tf.distribute.get_replica_context()
        number = tf.cast(context.replica_id_in_sync_group, tf.float32)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.fill([size], 2.0**number))

    return strategy.experimental_local_results(tf.function(lambda: strategy.run(replica))())


def test_copy(source: str, target: str, size: int) -> str:
    """Returns what is wrong with a copy of so many bytes; nothing if it is right."""
    sent = np.random.default_rng().integers(0, 256, size, dtype="uint8")
    with tf.device(source):
        there = tf.constant(sent)
    return _fault(copy(there, target).numpy(), sent)


def test_sum(devices: Sequence[str], way: Any, size: int) -> str:
    """Returns what is wrong with a sum of so many numbers; nothing if it is right."""
    try:
        strategy = create_strategy(devices=devices, communication=way, fallback=False)
    except StrategyUnavailableError:  # NCCL on parts of a GPU, pairs of an odd number of devices.
        return "not available"
    expected = np.float32(2 ** len(devices) - 1)
    for total in add(strategy, size):
        if fault := _fault(total.numpy(), expected):
            return fault
    return ""


def _fault(received: np.ndarray, expected: np.ndarray | np.generic) -> str:
    """Returns how many numbers are wrong, and the first; empty if none is."""
    wrong = np.flatnonzero(received != expected)
    if not wrong.size:
        return ""
    first = np.broadcast_to(expected, received.shape)[wrong[0]]
    return f"{wrong.size} of {received.size} wrong: {received[wrong[0]]} instead of {first}"
