"""What loops promise, broken on purpose: fit, checkpoints, rows that touch, interrupts."""

from __future__ import annotations

from mutation import broken

LOOPS = (
    # fit --------------------------------------------------------------------------------------------
    broken(
        "TensorFlow's default strategy is asked for its devices, which it does not say",
        "        return True  # The default strategy does not say where it runs.\n",
        "        pass\n",
        "test_without_a_strategy.py::test_fit_run_and_evaluation_without_a_strategy",
    ),
    broken(
        "the logs of an epoch are those of its last call",
        "before = {name: _tally_of(sums) for name, sums in self.sums.items()}",
        "before: dict[str, Tally] = {}",
        "test_fit.py::test_a_rich_training_with_callbacks_is_that_of_keras[3]",
    ),
    broken(
        "losses of an epoch are divided by other than its rows",
        "numbers.means_of_rows, [numbers.rows] *",
        "numbers.means_of_rows, [numbers.rows + 1.0] *",
        "test_fit.py::test_a_rich_training_with_callbacks_is_that_of_keras[3]",
        "test_fit.py::test_a_step_or_a_forward_of_ones_own[3-forward]",
    ),
    broken(
        "a fit begins with the first epoch, whatever initial_epoch is",
        "initial_epoch=start.epoch,",
        "initial_epoch=0,",
        "test_fit.py::test_a_rich_training_with_callbacks_is_that_of_keras[3]",
    ),
    broken(
        "class weights are forgotten",
        "tf.where(tf.gather(classes, places) == flat, weight, 1)",
        "tf.ones_like(weight)",
        "test_fit.py::test_class_weights_epochs_across_passes_and_several_steps_a_call[3]",
    ),
    broken(
        "each epoch begins a pass",
        "if self.iterator is None or not self._continues or self._left_in_pass == 0:",
        "if True:",
        "test_fit.py::test_class_weights_epochs_across_passes_and_several_steps_a_call[3]",
    ),
    broken(
        "fit forgets clip_norm",
        "options = all_options(arguments)",
        'options = all_options(arguments) | {"clip_norm": None}',
        "test_fit.py::test_micro_batches_clip_norm_and_shares_are_arguments[3-shares1]",
    ),
    # evaluate and predict ---------------------------------------------------------------------------
    broken(
        "only the first batches of an evaluation are in its loss",
        "self.sums[name] = StepSums(values.tolist(), terms)",
        "self.sums.setdefault(name, StepSums(values.tolist(), terms))",
        "test_evaluate_predict.py::test_evaluation_is_exact_over_all_examples[2]",
    ),
    broken(
        "an evaluation continues the metrics of the one before",
        '"reset_metrics": loop.reset',
        '"reset_metrics": lambda: None',
        "test_evaluate_predict.py::test_evaluation_is_exact_over_all_examples[2]",
    ),
    broken(
        "a resumed run begins its epoch again",
        'stored.run["epoch"], stored.run["step_in_epoch"]',
        'stored.run["epoch"], 0',
        "test_resume.py::test_a_loop_resumed_from_any_step_ends_with_the_same_bits[3-13]",
    ),
    broken(
        "the loss scale is not saved",
        "scale = kept_loss_scales.get(optimizer)",
        "scale = None",
        "test_resume.py::test_a_loop_resumed_from_any_step_ends_with_the_same_bits[1-5]",
    ),
    broken(
        "the state of a callback is not restored",
        "callbacks[key].set_state(_unpack(packed, arrays))",
        "pass",
        "test_resume.py::test_fit_resumed_in_an_epoch_ends_with_the_same_bits[True]",
    ),
    broken(
        "a damaged checkpoint is passed over without a word",
        'warnings.warn(\n                f"A checkpoint is damaged',
        'str.format(\n                f"A checkpoint is damaged',
        "test_resume.py::test_the_newest_whole_checkpoint_is_used[flip]",
    ),
    broken(
        "one checkpoint too many is kept",
        "values())[:-keep]",
        "values())[: -keep - 1]",
        "test_resume.py::test_the_newest_are_kept",
    ),
    # rows that touch --------------------------------------------------------------------------------
    broken(
        "verify=True verifies the first step alone",
        "self._always = verify is True",
        "self._always = False",
        "test_touching_rows.py::test_verify_says_which_steps_are_checked",
    ),
    broken(
        "gathered rows lie one upon the other",
        "        first, count, total = cast_all(here[:3], tf.int32)\n",
        "        first, count, total = cast_all(here[:3], tf.int32)\n        first *= 0\n",
        "test_touching_rows.py::test_gathered_rows_make_a_contrastive_loss_exact[3-views-views_by_labels]",
    ),
    broken(
        "synchronize_batch_norm changes nothing",
        "layer.synchronized = True",
        "layer.synchronized = False",
        "test_touching_rows.py::test_synchronize_batch_norm_mends_a_model_of_others",
    ),
    broken(
        "masked moments are those of a replica's rows",
        "return context.all_reduce(tf.distribute.ReduceOp.SUM, add(*args, **kwargs))",
        "return add(*args, **kwargs)",
        "test_synchronized_norm.py::test_masked_batches_are_normalized_as_on_one_device[3]",
    ),
    # sharded variables ------------------------------------------------------------------------------
    broken(
        "nothing is large enough to be on one device alone",
        "AT_LEAST = 2**16",
        "AT_LEAST = 2**40",
        "test_sharded_variables.py::test_each_large_variable_is_on_one_device_alone",
    ),
    broken(
        "the optimizer is not in the checkpoint",
        'groups[f"{prefix}optimizer"] = optimizer.variables',
        'groups[f"{prefix}optimizer"] = []',
        "test_sharded_variables.py::test_they_are_saved_and_restored",
    ),
    # signals ----------------------------------------------------------------------------------------
    broken(
        "a call is never cut, so Ctrl-C comes after all its steps",
        "min(program.most, steps - ran, self._length.steps)",
        "steps - ran",
        "test_interrupts.py::test_ctrl_c_ends_a_call_of_many_steps_after_a_whole_one",
    ),
    broken(
        "SIGTERM ends a run without saving it",
        "            path = self.save()\n",
        '            path = ""\n',
        "test_interrupts.py::test_sigterm_saves_the_steps_of_fit_and_exits",
    ),
    broken(
        "a run that SIGTERM ended says that all is well",
        "code = 128 + signal.SIGTERM",
        "code = 0",
        "test_interrupts.py::test_sigterm_saves_the_steps_of_fit_and_exits",
    ),
    broken(
        "the owner of a variable adds the gradient of its first replica alone",
        "return [add_on_device(parts, device) for",
        "return [add_on_device(parts[:1], device) for",
        "test_sharded_variables.py::test_training_is_that_of_one_device",
    ),
    broken(
        "all large variables are on the first device",
        "return used.index(min(used))",
        "return 0",
        "test_sharded_variables.py::test_each_large_variable_is_on_one_device_alone",
    ),
    broken(
        "the seeds of layers are not saved",
        'groups[f"{prefix}model"] = model.variables\n',
        'groups[f"{prefix}model"] = model.weights\n',
        "test_resume.py::test_a_loop_resumed_from_any_step_ends_with_the_same_bits[3-13]",
    ),
)
