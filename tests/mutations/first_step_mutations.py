"""What the first step costs, and what its report says, broken on purpose."""

from __future__ import annotations

from mutation import broken

LATE = (
    "test_what_a_first_step_says.py::test_a_variable_of_the_first_call_is_refused_where_it_is_made"
)

FIRST_STEP = (
    broken(
        "draws by a seed of TensorFlow are taken for draws that repeat",
        "addons/verification/verify.py:Verify._found",
        'any(s.kind == "draws" for s in self._step.runner.touched.states) => False',
        "test_what_a_first_step_says.py::test_a_seed_of_tensorflow_is_told",
    ),
    broken(
        "the check reads single rows of every weight",
        "addons/verification/putting_back.py:contents_of",
        "id(handle) in step.runner.touched.by_rows => bool(shape)",
        "test_left_behind.py::test_no_read_of_a_weight_becomes_a_copy[2]",
    ),
    broken(
        "each replica has a trace of its own",
        "steps/replicas.py:traced_once",
        "not trace.why_each => False",
        "test_first_step.py::test_the_code_of_a_model_runs_once_for_all_replicas[False]",
    ),
    broken(
        "the batch of a loop is gone with the error",
        "steps/runner.py:Runner._finding_lost_errors",
        "elements => ()",
        "test_first_step.py::test_the_error_of_a_replica_is_not_lost_in_a_loop",
    ),
    broken(
        "one device has a trace of its own",
        "addons/verification/one_device.py:OneDevice.computation",
        "None if self._by_itself else program.trace => None",
        "test_first_step.py::test_the_code_of_a_model_runs_once_for_all_replicas[first]",
    ),
    broken(
        "the check does not know that equal numbers round alike",
        "addons/verification/one_device.py",
        "1.0, 1.0005, 0.9993 => 1.0, 1.0, 1.0",
        "test_first_step.py::test_a_long_sum_of_equal_numbers_raises_no_alarm",
    ),
    broken(
        "a gradient that depends on the scale of the loss counts as rounding",
        "addons/verification/one_device.py",
        "1.0, 1.0005, 0.9993 => 1.0, 0.73, 0.61",
        "test_first_step.py::test_a_gradient_clipped_on_each_replica_is_told",
    ),
    broken(
        "the check takes the whole batch",
        "addons/verification/verify.py:Verify._sizes",
        "-(-rows // parts) => rows",
        "test_first_step.py::test_the_check_takes_as_many_rows_as_a_replica_holds",
    ),
    broken(
        "BatchNormalization is all that is said of a model",
        "addons/verification/verify.py:Verify._verified",
        '[*said, *[each for each in outcomes if each != Verification("same")]] => said',
        "test_first_step.py::test_a_second_fault_is_found_beside_batch_normalization",
    ),
    broken(
        "what each replica has kept for itself is compared",
        "addons/verification/one_device.py:OneDevice.begin",
        "others => ()",
        "test_first_step.py::test_a_model_that_was_trained_before_has_no_second_fault",
    ),
    broken(
        "the loss is blamed for a draw of several parts",
        "addons/verification/locate.py:locate",
        "before > 16.0 * bound**2 and before > 16.0 * after => False",
        "test_what_a_first_step_says.py::test_a_draw_for_several_parts_is_named_with_its_line",
        "test_what_a_first_step_says.py::test_a_draw_before_a_layer_is_named_and_not_the_layer",
    ),
    broken(
        "a draw is blamed that was not tried",
        "addons/verification/locate.py:locate",
        "before > 16.0 * bound**2 and before > 16.0 * after => True",
        "test_what_a_first_step_says.py::test_a_draw_side_by_side_is_not_blamed",
    ),
    broken(
        "a draw of some more rows is not named",
        "addons/verification/locate.py:locate",
        "times > 0 and added => False",
        "test_what_a_first_step_says.py::test_a_draw_of_some_more_or_less_is_named[5-rows + 5]",
    ),
    broken(
        "a generator of TensorFlow is not named",
        "addons/verification/locate.py",
        '_OF_GENERATOR = "RngReadAndSkip" => _OF_GENERATOR = "nothing"',
        "test_what_a_first_step_says.py::test_a_generator_of_tensorflow_is_named",
    ),
    broken(
        "a variable of the first call is left to TensorFlow",
        "steps/replicas.py:tracing_model",
        "contexts.enter_context(_refusing_new_variables()) => pass",
        f"{LATE}[tensorflow_variable]",
        f"{LATE}[keras_variable]",
    ),
    broken(
        "an evaluation of nothing is a loss of zero",
        "steps/evaluate.py:EvalStep._replica",
        "terms or self.step_metrics.all or deferred.variables or self._penalized() => True",
        "test_what_a_first_step_says.py::test_nothing_to_evaluate_is_no_loss_of_zero",
    ),
    broken(
        "a variable that Keras creates after the first call is refused",
        "steps/replicas.py:_refusing_new_variables.create",
        "deferred_here() is not None => True",
        "test_what_a_first_step_says.py::test_a_metric_that_builds_itself_in_forward_counts_every_row",
    ),
)
