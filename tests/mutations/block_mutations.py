"""What blocks alone promise, broken on purpose: data, shares, devices, strategies, reports, tests."""

from __future__ import annotations

from mutation import broken

LOOPS_OF_USERS = "test_own_loops.py"

BLOCKS = (
    broken(
        "the weight of a window is that of one replica",
        "accumulation/accumulator.py:GradientAccumulator.reduce",
        "totals = sum_over_replicas(self._strategy, parts) => ...; totals[0][-1] = parts[0][-1]",
        "test_blocks_alone.py::test_the_accumulator_alone_over_uneven_windows[2]",
    ),
    broken(
        "a batch smaller than the replicas loses rows where others cut",
        "data/partition.py:cut_rows",
        "tf.range(starts[part], stops[part]) => tf.range(starts[part], starts[part] + 1)",
        "test_blocks_alone.py::test_distribute_dataset_alone_in_a_compiled_loop[2]",
        "test_datasets.py::test_arrays_and_generators[2]",
    ),
    broken(
        "a loop of a user is given copies of a small batch",
        "data/small_batches.py:each_row_once",
        "rows < replicas => rows < 0",
        "test_blocks_alone.py::test_distribute_dataset_alone_is_a_partition[2-training]",
        "test_blocks_alone.py::test_distribute_dataset_alone_is_a_partition[3-metric]",
    ),
    broken(
        "a model outside every scope is taken",
        "strategies/scopes.py:check_scope",
        "not is_inside(inner) => False",
        "test_bad_input.py::test_a_mistake_is_told[model outside the scope]",
        "test_bad_input.py::test_a_mistake_is_told[metric outside the scope]",
    ),
    broken(
        "the loss scale is not taken out again",
        "accumulation/loss_scale.py:LossScale.unscale.divide",
        "values / tf.cast(scale, values.dtype) => values",
        "test_composition_by_hand.py::test_loss_scale_and_clipping_alone_decide_once[2-global_clipnorm]",
    ),
    broken(
        "the one call updates although a gradient is not finite",
        "accumulation/accumulator.py:GradientAccumulator.apply",
        "apply_reduced_gradients(optimizer, gradients, self.variables, where=where) => apply_reduced_gradients(optimizer, gradients, self.variables)",
        "test_composition_by_hand.py::test_apply_does_all_of_it_in_the_right_order",
    ),
    broken(
        "a gradient that carries the loss scale is taken",
        "accumulation/stages.py:check_scale_is_out",
        "_refuse(carrying, message) => []",
        "test_composition_by_hand.py::test_a_wrong_order_by_hand_is_told",
    ),
    broken(
        "any finite gradient is enough",
        "accumulation/gradients.py:all_finite",
        "tf.reduce_all(finite) => tf.constant(True)",
        "test_composition_by_hand.py::test_loss_scale_and_clipping_alone_decide_once[3-clip_gradients]",
    ),
    broken(
        "each gradient is clipped by itself",
        "accumulation/gradients.py:clip_gradients",
        "present(reduced) => present(reduced[:1])",
        "test_composition_by_hand.py::test_loss_scale_and_clipping_alone_decide_once[3-clip_gradients]",
    ),
    broken(
        "gradients are sent in float64",
        "strategies/collectives.py:sum_over_replicas.reduce",
        "list(map(tf.identity, tensors)) => [tf.cast(tensor, tf.float64) for tensor in tensors]",
        "test_gradients_leave_early.py::test_every_gradient_is_sent_once",
    ),
    broken(
        "sparse rows are those of the first replica",
        "data/partition.py:slice_rows.slice_tensor",
        "[first] => [tf.zeros_like(first)]",
        "test_datasets.py::test_each_row_once_of_every_kind_at_once[2]",
        "test_datasets.py::test_each_row_once_in_any_structure",
    ),
    broken(
        "every pass has the seeds of the first",
        "data/sharded_dataset.py:ShardedDataset._begin_pass",
        "begun.append(self.preprocessing.begin_pass()) => pass",
        "test_datasets.py::test_preprocessing_gives_each_row_its_own_random_numbers",
    ),
    broken(
        "shares go to the replicas in reverse",
        "data/sharded_dataset.py:distribute_dataset",
        "replica_shares(shares, strategy.num_replicas_in_sync) => ...[::-1]",
        "test_shares.py::test_replicas_get_their_shares_of_each_batch[capacities0-8]",
    ),
    broken(
        "the smallest remainder gets the next example",
        "data/shares.py:plan_shares",
        "parts[i] - quotas[i] => quotas[i] - parts[i]",
        "test_shares.py::test_shares_sum_exactly_and_are_proportional",
    ),
    broken(
        "equal remainders are given by place alone",
        "data/shares.py:plan_shares",
        "(parts[i] - quotas[i], -exact[i], i) => (i,)",
        "test_shares.py::test_shares_do_not_depend_on_the_order",
    ),
    broken(
        "a share of zero is taken",
        "data/shares.py:_checked",
        "share > 0 => share >= 0",
        "test_bad_input.py::test_a_mistake_is_told[a share of zero]",
        "test_shares.py::test_what_cannot_be_divided_is_refused[8-capacities3-0]",
    ),
    broken(
        "listing starts the devices",
        "devices/discovery.py:list_devices",
        "details: dict[str, Mapping[str, Any]] = {} => ...; _config.list_logical_devices()",
        "test_devices.py::test_settings_before_and_after_tensorflow_started",
    ),
    broken(
        "a split that comes too late is passed over",
        "devices/configure.py:_divide",
        "_config.set_logical_device_configuration(physical, setting)"
        ' => with __import__("contextlib").suppress(RuntimeError): ...',
        "test_devices.py::test_settings_before_and_after_tensorflow_started",
    ),
    broken(
        "a missing device is named without what exists",
        "devices/names.py:resolve_devices",
        "_not_found(text, missing, here, no_gpu, write) => _not_found(text, missing, [], no_gpu, write)",
        "test_devices.py::test_a_device_that_does_not_exist[asked-CPU:64]",
    ),
    broken(
        "fallback=False falls back",
        "strategies/factory.py:_accept",
        "not fallback => False",
        "test_strategies.py::test_fallback_warns_or_raises[options0-TPU-1]",
        "test_strategies.py::test_fallback_warns_or_raises[options3-odd-3]",
    ),
    broken(
        "a kind is rejected without a reason",
        "strategies/plan.py:choose",
        'rejected[kind] = answer => rejected[kind] = ""',
        "test_strategies.py::test_a_plan_has_reasons_and_no_side_effect[options1-mirrored-3]",
    ),
    broken(
        "a strategy is made on the first devices",
        "strategies/factory.py:create_strategy",
        '[f"/device:{name}" for name in plan.devices] => [f"/device:CPU:{i}" for i, name in enumerate(plan.devices)]',
        "test_strategies.py::test_what_is_created_is_what_was_planned[devices1]",
    ),
    broken(
        "a batch size is tried beyond the limit",
        "addons/tuning/batch_size.py:find_batch_size",
        "min(grown, largest) => grown",
        "test_diagnostics.py::test_the_largest_batch_that_fits",
    ),
    broken(
        "small batches are not told",
        "addons/diagnostics/program_report.py:_check_batch",
        "rows < replicas => rows < 1",
        "test_diagnostics.py::test_a_batch_smaller_than_the_replicas_is_found",
    ),
    broken(
        "the doctor shows addresses",
        "addons/diagnostics/machine_report.py:report_on",
        "describe_variables(environ) => dict(environ)",
        "test_diagnostics.py::test_the_doctor_names_what_is_wrong_here",
    ),
    broken(
        "a model outside the scope is not found",
        "addons/diagnostics/program_report.py:_outside",
        "check_scope(variables, strategy, what) => pass",
        "test_diagnostics.py::test_a_model_or_an_optimizer_outside_the_scope_is_found",
    ),
    broken(
        "a difference of replicas is passed over",
        "addons/testing/invariance.py:assert_replica_invariant",
        "functions.above(allowed, found) => []",
        "test_testing_tools.py::test_a_layer_whose_rows_touch_each_other_fails",
    ),
    broken(
        "fewer virtual devices than asked for are enough",
        "addons/testing/devices.py:virtual_devices",
        "len(configured) >= count => configured",
        "test_testing_tools.py::test_virtual_devices",
    ),
    broken(
        "a model outside every scope is trained and evaluated",
        "addons/loops/cache.py:checked_strategy",
        "refuse_one_device(function) => pass",
        "test_blocks_alone.py::test_a_model_outside_every_scope_is_refused[fit]",
        "test_blocks_alone.py::test_a_model_outside_every_scope_is_refused[evaluate]",
        "test_blocks_alone.py::test_a_model_outside_every_scope_is_refused[predict]",
    ),
    broken(
        "what TensorFlow cut counts by the first shard",
        "steps/batches.py:BatchReader._foreign_offsets",
        "int(count_rows(shard)) => 1",
        "test_blocks_alone.py::test_a_step_alone_beside_a_strategy_and_data_of_tensorflow[2]",
    ),
    broken(
        "a loop of one's own is held to nothing",
        "addons/testing/functions.py:above",
        "[found for found in differences if found.amount > allowed(found.quantity)] => []",
        f"{LOOPS_OF_USERS}::test_a_norm_that_is_not_synchronized_is_found_by_hand",
        f"{LOOPS_OF_USERS}::test_a_mean_of_means_is_found",
        f"{LOOPS_OF_USERS}::test_what_differs_is_named",
    ),
    broken(
        "of a variable that train returns only the copy of the first replica is compared",
        "steps/compare.py:values_of",
        "strategy.experimental_local_results(value) => ...[:1]",
        f"{LOOPS_OF_USERS}::test_what_differs_is_named",
    ),
    broken(
        "the seeds are not set before a function of one's own",
        "addons/testing/functions.py:run",
        "keras.utils.set_random_seed(0) => pass",
        f"{LOOPS_OF_USERS}::test_a_right_loop_passes",
    ),
    broken(
        "replicas are accused of what differs on one device too",
        "addons/testing/functions.py:hold",
        "tell(_TWICE, again) if again else tell(differs(strategy), wrong) => tell(differs(strategy), wrong)",
        f"{LOOPS_OF_USERS}::test_what_is_another_each_time_is_not_blamed_on_replicas",
    ),
    broken(
        "NaN on one device is compared with NaN",
        "addons/testing/functions.py:hold",
        "check_finite(expected) => pass",
        f"{LOOPS_OF_USERS}::test_what_cannot_be_compared_is_refused",
    ),
)
