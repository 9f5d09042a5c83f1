"""What blocks alone promise, broken on purpose: data, shares, devices, strategies, reports."""

from __future__ import annotations

from mutation import broken

BLOCKS = (
    broken(
        "the weight of a window is that of one replica",
        "totals = sum_over_replicas(self._strategy, parts)",
        "totals = sum_over_replicas(self._strategy, parts)\n        totals[0][-1] = parts[0][-1]",
        "test_blocks_alone.py::test_the_accumulator_alone_over_uneven_windows[2]",
    ),
    broken(
        "a batch smaller than the replicas loses rows where others cut",
        "tf.range(starts[part], stops[part])",
        "tf.range(starts[part], starts[part] + 1)",
        "test_blocks_alone.py::test_distribute_dataset_alone_in_a_compiled_loop[2]",
        "test_datasets.py::test_arrays_and_generators[2]",
    ),
    broken(
        "a loop of a user is given copies of a small batch",
        "        is_small = rows < replicas\n",
        "        is_small = rows < 0\n",
        "test_blocks_alone.py::test_distribute_dataset_alone_is_a_partition[2-training]",
        "test_blocks_alone.py::test_distribute_dataset_alone_is_a_partition[3-metric]",
    ),
    broken(
        "a model outside every scope is taken",
        "if not strategy.extended.variable_created_in_scope(inner):",
        "if False:",
        "test_bad_input.py::test_a_mistake_is_told[model outside the scope]",
        "test_bad_input.py::test_a_mistake_is_told[metric outside the scope]",
    ),
    broken(
        "the loss scale is not taken out again",
        "tensor / tf.cast(self.value(), tensor.dtype)",
        "tensor",
        "test_composition_by_hand.py::test_loss_scale_and_clipping_alone_decide_once[2-global_clipnorm]",
    ),
    broken(
        "any finite gradient is enough",
        "    return tf.reduce_all(finite)\n",
        "    return tf.constant(True)\n",
        "test_composition_by_hand.py::test_loss_scale_and_clipping_alone_decide_once[3-clip_gradients]",
    ),
    broken(
        "each gradient is clipped by itself",
        "global_norm(present(reduced))",
        "global_norm(present(reduced[:1]))",
        "test_composition_by_hand.py::test_loss_scale_and_clipping_alone_decide_once[3-clip_gradients]",
    ),
    broken(
        "gradients are sent in float64",
        "placed = list(map(tf.identity, tensors))",
        "placed = [tf.cast(tensor, tf.float64) for tensor in tensors]",
        "test_gradients_leave_early.py::test_every_gradient_is_sent_once",
    ),
    broken(
        "sparse rows are those of the first replica",
        "begin = tf.concat([[first], tf.zeros_like(columns)], 0)",
        "begin = tf.concat([[tf.zeros_like(first)], tf.zeros_like(columns)], 0)",
        "test_datasets.py::test_each_row_once_of_every_kind_at_once[2]",
        "test_datasets.py::test_each_row_once_in_any_structure",
    ),
    broken(
        "every pass has the seeds of the first",
        "            begun.append(self.preprocessing.begin_pass())",
        "            pass",
        "test_datasets.py::test_preprocessing_gives_each_row_its_own_random_numbers",
    ),
    broken(
        "shares go to the replicas in reverse",
        "num_replicas_in_sync)\n    preprocessing, reader = None, None\n",
        "num_replicas_in_sync)[::-1]\n    preprocessing, reader = None, None\n",
        "test_shares.py::test_replicas_get_their_shares_of_each_batch[capacities0-8]",
    ),
    broken(
        "the smallest remainder gets the next example",
        "(parts[i] - quotas[i], -exact[i], i)",
        "(quotas[i] - parts[i], -exact[i], i)",
        "test_shares.py::test_shares_sum_exactly_and_are_proportional",
    ),
    broken(
        "equal remainders are given by place alone",
        "(parts[i] - quotas[i], -exact[i], i)",
        "(i,)",
        "test_shares.py::test_shares_do_not_depend_on_the_order",
    ),
    broken(
        "a share of zero is taken",
        "share > 0 for share",
        "share >= 0 for share",
        "test_bad_input.py::test_a_mistake_is_told[a share of zero]",
        "test_shares.py::test_what_cannot_be_divided_is_refused[8-capacities3-0]",
    ),
    broken(
        "listing starts the devices",
        "    details: dict[str, Mapping[str, Untyped]] = {}\n",
        "    details: dict[str, Mapping[str, Untyped]] = {}\n    _config.list_logical_devices()\n",
        "test_devices.py::test_settings_before_and_after_tensorflow_started",
    ),
    broken(
        "a split that comes too late is passed over",
        "            _config.set_logical_device_configuration(physical, setting)",
        "            import contextlib\n\n            with contextlib.suppress(RuntimeError):\n                _config.set_logical_device_configuration(physical, setting)",
        "test_devices.py::test_settings_before_and_after_tensorflow_started",
    ),
    broken(
        "a missing device is named without what exists",
        "_not_found(text, missing, here,",
        "_not_found(text, missing, [],",
        "test_devices.py::test_a_device_that_does_not_exist[asked-CPU:64]",
    ),
    broken(
        "fallback=False falls back",
        "    if not fallback:\n",
        "    if False:\n",
        "test_strategies.py::test_fallback_warns_or_raises[options0-TPU-1]",
        "test_strategies.py::test_fallback_warns_or_raises[options3-odd-3]",
    ),
    broken(
        "a kind is rejected without a reason",
        "            rejected[kind] = answer\n",
        "            rejected[kind] = ''\n",
        "test_strategies.py::test_a_plan_has_reasons_and_no_side_effect[options1-mirrored-3]",
    ),
    broken(
        "a strategy is made on the first devices",
        'names = [f"/device:{name}" for name in plan.devices]',
        'names = [f"/device:CPU:{i}" for i, name in enumerate(plan.devices)]',
        "test_strategies.py::test_what_is_created_is_what_was_planned[devices1]",
    ),
    broken(
        "a batch size is tried beyond the limit",
        "size = min(grown, int(largest))",
        "size = grown",
        "test_diagnostics.py::test_the_largest_batch_that_fits",
    ),
    broken(
        "small batches are not told",
        "rows is not None and rows < replicas:",
        "rows is not None and rows < 1:",
        "test_diagnostics.py::test_a_batch_smaller_than_the_replicas_is_found",
    ),
    broken(
        "the doctor shows addresses",
        '"variables": describe_variables(environ),',
        '"variables": dict(environ),',
        "test_diagnostics.py::test_the_doctor_names_what_is_wrong_here",
    ),
    broken(
        "a model outside the scope is not found",
        "        check_scope(variables, strategy, what)\n",
        "        pass\n",
        "test_diagnostics.py::test_a_model_or_an_optimizer_outside_the_scope_is_found",
    ),
    broken(
        "a difference of replicas is passed over",
        "            if wrong:\n",
        "            if False:\n",
        "test_testing_tools.py::test_a_layer_whose_rows_touch_each_other_fails",
    ),
    broken(
        "fewer virtual devices than asked for are enough",
        "    if len(configured) >= count:\n",
        "    if configured:\n",
        "test_testing_tools.py::test_virtual_devices",
    ),
    broken(
        "a model outside every scope is trained and evaluated",
        "    refuse_one_device(function)\n    return own\n",
        "    return own\n",
        "test_blocks_alone.py::test_a_model_outside_every_scope_is_refused[fit]",
        "test_blocks_alone.py::test_a_model_outside_every_scope_is_refused[evaluate]",
        "test_blocks_alone.py::test_a_model_outside_every_scope_is_refused[predict]",
    ),
    broken(
        "what TensorFlow cut counts by the first shard",
        "[int(count_rows(shard)) for shard in local]",
        "[1 for shard in local]",
        "test_blocks_alone.py::test_a_step_alone_beside_a_strategy_and_data_of_tensorflow[2]",
    ),
)
