"""The rules of logical replicas, broken on purpose: the cut, one function, one tree, the state."""

from __future__ import annotations

from mutation import broken

SAME = "test_same_bits.py::test_the_bits_are_the_same_on_any_number_of_devices"
BITS = (
    broken(
        "a logical replica has rows of its device by their number there",
        "steps/values.py:Rows.of_logical",
        "self.total * (number + n) // count => self.first + self.count * (number + n) // count",
        f"{SAME}[plain]",
    ),
    broken(
        "logical replicas are traced for each, into the graph around them",
        "steps/replicas.py:_each_logical",
        "once is None and not trace.meets and not trace.finds_error => False",
        "test_same_bits.py::test_each_step_calls_one_function[2]",
    ),
    broken(
        "the logical replicas of a device are added one after the other",
        "steps/features/logical_replicas.py:LogicalReplicas.around_phase.dealt",
        "groups and groups[-1].size == group.size => groups",
        f"{SAME}[plain]",
    ),
    broken(
        "TensorFlow adds in an order of its own within a logical replica",
        "steps/traced_once.py:TracedOnce.__call__",
        "REWRITTEN if self._logical is None else AS_WRITTEN => b''",
        f"{SAME}[branches]",
    ),
    broken(
        "all logical replicas call one update, which TensorFlow rewrites by itself",
        "accumulation/replicated.py:Replicated._traces_once",
        "not tf.inside_function() or adds_in_pairs() => not tf.inside_function()",
        f"{SAME}[built]",
    ),
    broken(
        "devices are added one after the other",
        "strategies/collectives.py:add_on_device",
        "1 << (len(addends) - 1).bit_length() - 1 => len(addends) - 1",
        f"{SAME}[plain]",
        f"{SAME}[rows known]",
    ),
    broken(
        "lists of rows are added one after the other",
        "strategies/collectives.py:add_on_device",
        "halves = list(map(unique, halves)) => pass",
        f"{SAME}[tables]",
    ),
    broken(
        "a layer keeps the state of the last logical replica of each device",
        "steps/features/logical_replicas.py:_shared_states",
        'id(state) not in seeds and state.dtype != "string" => False',
        f"{SAME}[plain]",
    ),
    broken(
        "what metrics add is assigned on each device",
        "steps/phases.py:settle_states",
        "local_replicas(step.strategy)[number] => False",
        f"{SAME}[plain]",
    ),
    broken(
        "a logical replica without rows counts",
        "steps/values.py:Rows.of_logical",
        "tf.cast(has_rows, tf.float64) => tf.ones_like(...)",
        "test_same_bits.py::test_rows_that_do_not_meet_give_what_one_device_gives[3]",
    ),
    broken(
        "the losses of an epoch are added call by call",
        "steps/runner.py:Runner._run_many",
        "tallies.get(name, Tally.empty()) => Tally.empty()",
        "test_same_bits.py::test_the_loss_of_an_epoch_is_one_sum_whatever_a_call_computes",
    ),
    broken(
        "fit forgets logical_replicas",
        "addons/loops/program.py:Program._train_step",
        '{**self.options, "verify": self.verify} => {**self.options, "verify": self.verify, "logical_replicas": None}',
        "test_same_bits.py::test_fit_and_a_run_that_moves_to_other_devices",
    ),
)
