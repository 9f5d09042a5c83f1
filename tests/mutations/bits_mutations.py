"""The rules of logical replicas, broken on purpose: the cut, one function, one tree, the state."""

from __future__ import annotations

from mutation import broken

SAME = "test_same_bits.py::test_the_bits_are_the_same_on_any_number_of_devices"
BITS = (
    broken(
        "a logical replica has rows of its device by their number there",
        "begin, end = (self.total * (number + n) // count for n in (0, 1))",
        "begin, end = (self.first + self.count * (number + n) // count for n in (0, 1))",
        f"{SAME}[plain]",
    ),
    broken(
        "logical replicas are traced for each, into the graph around them",
        "    if once is None and not trace.meets and not trace.finds_error:\n",
        "    if False:\n",
        "test_same_bits.py::test_each_step_calls_one_function[2]",
    ),
    broken(
        "the logical replicas of a device are added one after the other",
        "while groups and groups[-1].size == group.size:",
        "while groups:",
        f"{SAME}[plain]",
    ),
    broken(
        "TensorFlow adds in an order of its own within a logical replica",
        "config = REWRITTEN if self._logical is None else AS_WRITTEN",
        "config = REWRITTEN",
        f"{SAME}[branches]",
    ),
    broken(
        "devices are added one after the other",
        "    half = 1 << (len(addends) - 1).bit_length() - 1  #",
        "    half = len(addends) - 1  #",
        f"{SAME}[plain]",
        f"{SAME}[rows known]",
    ),
    broken(
        "lists of rows are added one after the other",
        "            halves = list(map(unique, halves))\n",
        "            pass\n",
        f"{SAME}[tables]",
    ),
    broken(
        "a layer keeps the state of the last logical replica of each device",
        '        elif id(state) not in seeds and state.dtype != "string":\n',
        "        elif False:\n",
        f"{SAME}[plain]",
    ),
    broken(
        "what metrics add is assigned on each device",
        "                if local_replicas(step.strategy)[number]:\n",
        "                if False:\n",
        f"{SAME}[plain]",
    ),
    broken(
        "a logical replica without rows counts",
        "weight = tf.cast(has_rows, tf.float64)",
        "weight = tf.ones_like(tf.cast(has_rows, tf.float64))",
        "test_same_bits.py::test_rows_that_do_not_meet_give_what_one_device_gives[3]",
    ),
    broken(
        "the losses of an epoch are added call by call",
        "        done: Tallies = {name: tallies.get(name, Tally.empty()) for name in names}\n",
        "        done: Tallies = {name: Tally.empty() for name in names}\n",
        "test_same_bits.py::test_the_loss_of_an_epoch_is_one_sum_whatever_a_call_computes",
    ),
    broken(
        "fit forgets logical_replicas",
        'options = {**self.options, "verify": self.verify}',
        'options = {**self.options, "verify": self.verify, "logical_replicas": None}',
        "test_same_bits.py::test_fit_and_a_run_that_moves_to_other_devices",
    ),
)
