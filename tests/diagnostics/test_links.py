"""``doctor --links``: broken copies, sums and stalls are named; healthy links are not accused."""

from __future__ import annotations

import time

import pytest

from tfmultigpu.addons.diagnostics import check_links, links

DEVICES = ["CPU:0", "CPU:1"]
# A child whose copies to CPU:1 flip a bit, and whose sums on one device hold a NaN.
BROKEN = """
import sys
import tensorflow as tf
from tfmultigpu.addons.diagnostics import links
copy, add = links.copy, links.add
def flip(tensor, device):
    copied = copy(tensor, device)
    bit = tf.one_hot(777, copied.shape[0], dtype=tf.uint8)
    return tf.bitwise.bitwise_xor(copied, bit) if device == "CPU:1" else copied
def spoil(strategy, size):
    first, *others = add(strategy, size)
    return [first, *[tf.where(tf.range(len(o)) == 3, float("nan"), o) for o in others]]
links.copy, links.add = flip, spoil
links.run_tests(*sys.argv[1:], size=1000)
"""
STALLED = """
import sys, time
from tfmultigpu.addons.diagnostics import links
links.copy = lambda tensor, device: time.sleep(600 if device == "CPU:0" else 0) or tensor
links.run_tests(*sys.argv[1:])
"""
KILLED = """
for line in ('["start of the devices", "1 ms"]', '["copy A -> B", ""]'):
    print("link test:", line, flush=True)
raise SystemExit("no NCCL")
"""


def test_healthy_links_are_in_order() -> None:
    report = check_links(DEVICES, seconds=120.0)
    assert report.codes == ("links-in-order",), str(report)
    assert "5 tests of CPU:0, CPU:1 are right to the bit." in str(report)
    assert report.facts["tests"]["sum over CPU:0, CPU:1 by nccl"] == "not available"


@pytest.mark.slow
def test_a_thousand_tests_raise_no_false_alarm() -> None:
    for _ in range(250):
        told = [links.test_copy(*pair, 1000) for pair in (DEVICES, DEVICES[::-1])]
        told += [links.test_sum(DEVICES, w, 1000) for w in ("hierarchical_copy", "one_device")]
        assert not any(told), told


def test_a_flipped_bit_and_a_nan_are_found_and_named() -> None:
    copied, *summed = links.report_of(DEVICES, 120.0, BROKEN).findings
    assert copied.what.startswith("copy CPU:0 -> CPU:1: 1 of 1000 wrong: ")
    assert "NCCL_P2P_DISABLE=1" in copied.change
    assert "IOMMU" in copied.change
    assert [each.what for each in summed] == [
        f"sum over CPU:0, CPU:1 by {way}: 1 of 1000 wrong: nan instead of 3.0"
        for way in ("hierarchical_copy", "one_device")
    ]
    assert 'communication="one_device"' in summed[0].change
    assert {each.severity for each in (copied, *summed)} == {"error"}


@pytest.mark.parametrize(
    ("child", "says"),
    [
        (STALLED, "copy CPU:1 -> CPU:0: did not"),
        (KILLED, "copy A -> B: ended with code 1: no NCCL"),
    ],
)
def test_a_stall_and_a_crash_are_found_and_named(child: str, says: str) -> None:
    began = time.monotonic()
    (finding,) = links.report_of(DEVICES, 3.0, child).findings
    assert says in finding.what
    assert time.monotonic() - began < 180.0  # The import of TensorFlow is most of it.


def test_one_device_has_no_links() -> None:
    assert check_links(["CPU:0"]).codes == ("no-links",)
