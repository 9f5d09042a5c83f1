"""What the first step costs and says, broken on purpose."""

from __future__ import annotations

from mutation import broken

FIRST_STEP = (
    broken(
        "the check reads single rows of every weight",
        "id(handle) in step.runner.touched.by_rows)",
        "bool(shape))",
        "test_left_behind.py::test_no_read_of_a_weight_becomes_a_copy[2]",
    ),
    broken(
        "each replica has a trace of its own",
        "    if not trace.why_each:\n        once =",
        "    if False:\n        once =",
        "test_first_step.py::test_the_code_of_a_model_runs_once_for_all_replicas[False]",
    ),
    broken(
        "the batch of a loop is gone with the error",
        "for element in elements:",
        "for element in ():",
        "test_first_step.py::test_the_error_of_a_replica_is_not_lost_in_a_loop",
    ),
    broken(
        "one device has a trace of its own",
        "Trace(known=self._known)",
        "Trace()",
        "test_first_step.py::test_the_code_of_a_model_runs_once_for_all_replicas[first]",
    ),
    broken(
        "the check does not know that equal numbers round alike",
        "_FACTORS = 1.0, 1.0005, 0.9993",
        "_FACTORS = 1.0, 1.0, 1.0",
        "test_first_step.py::test_a_long_sum_of_equal_numbers_raises_no_alarm",
    ),
    broken(
        "a gradient that depends on the scale of the loss counts as rounding",
        "_FACTORS = 1.0, 1.0005, 0.9993",
        "_FACTORS = 1.0, 0.73, 0.61",
        "test_first_step.py::test_a_gradient_clipped_on_each_replica_is_told",
    ),
    broken(
        "the check takes the whole batch",
        "held = -(-rows // parts)",
        "held = rows",
        "test_first_step.py::test_the_check_takes_as_many_rows_as_a_replica_holds",
    ),
    broken(
        "BatchNormalization is all that is said of a model",
        'return [*said, *[each for each in outcomes if each.outcome != "same"]], later',
        "return said, later",
        "test_first_step.py::test_a_second_fault_is_found_beside_batch_normalization",
    ),
    broken(
        "what each replica has kept for itself is compared",
        "                for copy in others:\n",
        "                for copy in ():\n",
        "test_first_step.py::test_a_model_that_was_trained_before_has_no_second_fault",
    ),
)
