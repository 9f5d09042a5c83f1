"""What loops promise, broken on purpose: fit, checkpoints, rows that touch, interrupts, iterators."""

from __future__ import annotations

from mutation import broken

LOOPS = (
    # fit --------------------------------------------------------------------------------------------
    broken(
        "TensorFlow's default strategy is asked for its devices, which it does not say",
        "strategies/collectives.py:replicas_share_memory",
        "return True => pass",
        "test_without_a_strategy.py::test_fit_run_and_evaluation_without_a_strategy",
    ),
    broken(
        "the logs of an epoch are those of its last call",
        "addons/loops/loop.py:Loop.run",
        "before = {name: _tally_of(sums) for name, sums in self.sums.items()} => before: dict[str, Tally] = {}",
        "test_fit.py::test_a_rich_training_with_callbacks_is_that_of_keras[3]",
    ),
    broken(
        "losses of an epoch are divided by other than its rows",
        "steps/tally.py:Layout.means",
        "[numbers.rows] => [numbers.rows + 1.0]",
        "test_fit.py::test_a_rich_training_with_callbacks_is_that_of_keras[3]",
        "test_fit.py::test_a_step_or_a_forward_of_ones_own[3-forward]",
    ),
    broken(
        "a fit begins with the first epoch, whatever initial_epoch is",
        "addons/loops/training.py:fit",
        "start.epoch => 0",
        "test_fit.py::test_a_rich_training_with_callbacks_is_that_of_keras[3]",
    ),
    broken(
        "class weights are forgotten",
        "addons/loops/inputs.py:weighting.weigh",
        "tf.where(tf.gather(classes, places) == flat, weight, 1) => tf.ones_like(weight)",
        "test_fit.py::test_class_weights_epochs_across_passes_and_several_steps_a_call[3]",
    ),
    broken(
        "each epoch begins a pass",
        "addons/loops/feed.py:Feed.begin_epoch",
        "self.iterator is None or not self._continues or self._left_in_pass == 0 => True",
        "test_fit.py::test_class_weights_epochs_across_passes_and_several_steps_a_call[3]",
    ),
    broken(
        "fit forgets clip_norm",
        "addons/loops/training.py:fit",
        'all_options(arguments) => ... | {"clip_norm": None}',
        "test_fit.py::test_micro_batches_clip_norm_and_shares_are_arguments[3-shares1]",
    ),
    # evaluate and predict ---------------------------------------------------------------------------
    broken(
        "only the first batches of an evaluation are in its loss",
        "addons/loops/loop.py:Loop.run",
        "self.sums[name] = StepSums(values.tolist(), terms) => self.sums.setdefault(name, StepSums(values.tolist(), terms))",
        "test_evaluate_predict.py::test_evaluation_is_exact_over_all_examples[2]",
    ),
    broken(
        "an evaluation continues the metrics of the one before",
        "addons/loops/methods.py:around",
        "loop.reset => lambda: None",
        "test_evaluate_predict.py::test_evaluation_is_exact_over_all_examples[2]",
    ),
    broken(
        "a resumed run begins its epoch again",
        "addons/checkpoints/manager.py:Checkpoints.restore",
        'stored.run["step_in_epoch"] => 0',
        "test_resume.py::test_a_loop_resumed_from_any_step_ends_with_the_same_bits[3-13]",
    ),
    broken(
        "the loss scale is not saved",
        "addons/checkpoints/state.py:RunVariables.all",
        "kept_loss_scales.get(optimizer) => None",
        "test_resume.py::test_a_loop_resumed_from_any_step_ends_with_the_same_bits[1-5]",
    ),
    broken(
        "the state of a callback is not restored",
        "addons/checkpoints/callback.py:_write_states",
        "callbacks[key].set_state(_unpack(packed, arrays)) => pass",
        "test_resume.py::test_fit_resumed_in_an_epoch_ends_with_the_same_bits[True]",
    ),
    broken(
        "a damaged checkpoint is passed over without a word",
        "addons/checkpoints/files.py:newest",
        "warnings.warn => str.format",
        "test_resume.py::test_the_newest_whole_checkpoint_is_used[flip]",
    ),
    broken(
        "one checkpoint too many is kept",
        "addons/checkpoints/files.py:save",
        "-keep => -keep - 1",
        "test_resume.py::test_the_newest_are_kept",
    ),
    # rows that touch --------------------------------------------------------------------------------
    broken(
        "verify=True verifies the first step alone",
        "addons/verification/verify.py:Verify.__init__",
        "verify is True => False",
        "test_touching_rows.py::test_verify_says_which_steps_are_checked",
    ),
    broken(
        "gathered rows lie one upon the other",
        "steps/global_rows.py:_among_zeros",
        "first, count, total = cast_all(here[:3], tf.int32) => ...; first *= 0",
        "test_touching_rows.py::test_gathered_rows_make_a_contrastive_loss_exact[3-views-views_by_labels]",
    ),
    broken(
        "synchronize_batch_norm changes nothing",
        "steps/batch_norm.py:synchronize_batch_norm",
        "layer.synchronized = True => layer.synchronized = False",
        "test_touching_rows.py::test_synchronize_batch_norm_mends_a_model_of_others",
    ),
    broken(
        "masked moments are those of a replica's rows",
        "steps/batch_norm.py:moments_of_replicas.over_replicas",
        "context.all_reduce(tf.distribute.ReduceOp.SUM, add(*args, **kwargs)) => add(*args, **kwargs)",
        "test_synchronized_norm.py::test_masked_batches_are_normalized_as_on_one_device[3]",
    ),
    # sharded variables ------------------------------------------------------------------------------
    broken(
        "nothing is large enough to be on one device alone",
        "data/spread.py",
        "AT_LEAST = 2**16 => AT_LEAST = 2**40",
        "test_sharded_variables.py::test_each_large_variable_is_on_one_device_alone",
    ),
    broken(
        "the optimizer is not in the checkpoint",
        "addons/checkpoints/state.py:RunVariables.all",
        "optimizer.variables => []",
        "test_sharded_variables.py::test_they_are_saved_and_restored",
    ),
    # signals ----------------------------------------------------------------------------------------
    broken(
        "a call is never cut, so Ctrl-C comes after all its steps",
        "steps/runner.py:Runner._run_many",
        "min(program.most, steps - ran, self._length.steps) => steps - ran",
        "test_interrupts.py::test_ctrl_c_ends_a_call_of_many_steps_after_a_whole_one",
    ),
    broken(
        "SIGTERM ends a run without saving it",
        "addons/checkpoints/manager.py:Checkpoints._stop_if_asked",
        'self.save() => ""',
        "test_interrupts.py::test_sigterm_saves_the_steps_of_fit_and_exits",
    ),
    broken(
        "a run that SIGTERM ended says that all is well",
        "addons/checkpoints/manager.py:Checkpoints._stop_if_asked",
        "128 + signal.SIGTERM => 0",
        "test_interrupts.py::test_sigterm_saves_the_steps_of_fit_and_exits",
    ),
    broken(
        "the owner of a variable adds the gradient of its first replica alone",
        "strategies/collectives.py:sum_on_devices",
        "add_on_device(parts, device) => add_on_device(parts[:1], device)",
        "test_sharded_variables.py::test_training_is_that_of_one_device",
    ),
    broken(
        "all large variables are on the first device",
        "data/spread.py:next_device",
        "used.index(min(used)) => 0",
        "test_sharded_variables.py::test_each_large_variable_is_on_one_device_alone",
    ),
    broken(
        "the seeds of layers are not saved",
        "addons/checkpoints/state.py:RunVariables.all",
        "model.variables => model.weights",
        "test_resume.py::test_a_loop_resumed_from_any_step_ends_with_the_same_bits[3-13]",
    ),
    broken(
        "a loop that is over keeps its iterator",
        "addons/loops/feed.py:Feed._end_reading",
        "iterator, self.iterator = self.iterator, None => iterator = None",
        "test_let_go.py::test_a_generator_ends_with_the_loop_that_reads_it[2]",
    ),
    broken(
        "an error keeps the iterator of its loop",
        "addons/loops/feed.py:Feed._end_reading",
        "iterator.close() => pass",
        "test_let_go.py::test_a_generator_ends_with_the_loop_that_reads_it[2]",
    ),
    broken(
        "a PyDataset does not hear that an epoch ends",
        "addons/loops/feed.py:Feed.on_epoch_end",
        "self.batches.reader.end() => pass",
        "test_py_datasets.py::test_a_py_dataset_that_shuffles_itself_trains_as_in_keras[3]",
    ),
    broken(
        "predict ends an epoch before it begins one",
        "addons/loops/inputs.py:_feed_of_batches",
        "batches.reader.owe_no_end() => pass",
        "test_py_datasets.py::test_a_py_dataset_that_shuffles_itself_trains_as_in_keras[3]",
    ),
    broken(
        "a pass that one loop continues is ended by another loop over the same data",
        "addons/loops/inputs.py:_distributed",
        "data.read_apart() => data",
        "test_py_datasets.py::test_epochs_of_some_steps_continue_a_pass_that_others_read_too[2]",
    ),
    broken(
        "batches of the next epoch are read before it begins",
        "addons/loops/feed.py:Feed.begin_epoch",
        "reader.read_by(self._asked, continues=self._continues) => reader.read_by(None, continues=self._continues)",
        "test_py_datasets.py::test_no_batch_is_read_before_its_epoch[3]",
    ),
    broken(
        "a batch that was looked at is trained on in the order before on_epoch_end",
        "data/reader.py:Reader.of_keras",
        "looked_at = _look_at(reading.looked_at())"
        " => looked_at, rest = _look_at(reading.looked_at()), reading.batches;"
        " from_first = lambda: itertools.chain(looked_at, itertools.islice(rest(), 2, None));"
        " reading = reading._replace(batches=from_first)",
        "test_py_datasets.py::test_no_batch_is_read_before_its_epoch[3]",
    ),
)
