"""What reports of a first step say, broken on purpose."""

from __future__ import annotations

from mutation import broken

LATE = (
    "test_what_a_first_step_says.py::test_a_variable_of_the_first_call_is_refused_where_it_is_made"
)

WORDS = (
    broken(
        "the loss is blamed for a draw of several parts",
        "            if before > 16.0 * bound**2 and before > 16.0 * after:",
        "            if False:",
        "test_what_a_first_step_says.py::test_a_draw_for_several_parts_is_named_with_its_line",
        "test_what_a_first_step_says.py::test_a_draw_before_a_layer_is_named_and_not_the_layer",
    ),
    broken(
        "a draw is blamed that was not tried",
        "            if before > 16.0 * bound**2 and before > 16.0 * after:",
        "            if True:",
        "test_what_a_first_step_says.py::test_a_draw_side_by_side_is_not_blamed",
    ),
    broken(
        "a draw of some more rows is not named",
        "        if times > 0 and added:",
        "        if False:",
        "test_what_a_first_step_says.py::test_a_draw_of_some_more_or_less_is_named[5-rows + 5]",
    ),
    broken(
        "a generator of TensorFlow is not named",
        '_OF_GENERATOR = "RngReadAndSkip"',
        '_OF_GENERATOR = "nothing"',
        "test_what_a_first_step_says.py::test_a_generator_of_tensorflow_is_named",
    ),
    broken(
        "a variable of the first call is left to TensorFlow",
        "            contexts.enter_context(_refusing_new_variables())",
        "            pass",
        f"{LATE}[tensorflow_variable]",
        f"{LATE}[keras_variable]",
    ),
    broken(
        "an evaluation of nothing is a loss of zero",
        "something = terms or self.step_metrics.all or deferred.variables or self._penalized()",
        "something = True",
        "test_what_a_first_step_says.py::test_nothing_to_evaluate_is_no_loss_of_zero",
    ),
    broken(
        "a variable that Keras creates after the first call is refused",
        """        if deferred_here() is not None:
            raise new_variable""",
        """        if True:
            raise new_variable""",
        "test_what_a_first_step_says.py::test_a_metric_that_builds_itself_in_forward_counts_every_row",
    ),
)
