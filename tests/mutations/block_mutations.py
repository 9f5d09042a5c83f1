"""What blocks alone promise, broken on purpose: data, shares, devices, strategies, reports."""

from __future__ import annotations

from mutation import Mutation

BLOCKS = (
    Mutation(
        "the weight of a window is that of one replica",
        "accumulation/accumulator.py",
        (
            (
                "totals = sum_over_replicas(strategy, parts)",
                "totals = sum_over_replicas(strategy, parts)\n        totals[0][-1] = parts[0][-1]",
            ),
        ),
        ("promises/test_blocks_alone.py::test_the_accumulator_alone_over_uneven_windows[2]",),
    ),
    Mutation(
        "a batch smaller than the replicas loses rows where others cut",
        "data/partition.py",
        (
            (
                "return tensor[start:stop]",
                "return tensor[start : start + 1]",
            ),
        ),
        (
            "promises/test_blocks_alone.py::test_distribute_dataset_alone_in_a_compiled_loop[2]",
            "promises/test_datasets.py::test_arrays_and_generators[2]",
        ),
    ),
    Mutation(
        "a loop of a user is given copies of a small batch",
        "data/small_batches.py",
        (("        is_small = rows < replicas\n", "        is_small = rows < 0\n"),),
        (
            "promises/test_blocks_alone.py::test_distribute_dataset_alone_is_a_partition[2-training]",
            "promises/test_blocks_alone.py::test_distribute_dataset_alone_is_a_partition[3-metric]",
        ),
    ),
    Mutation(
        "a model outside every scope is taken",
        "strategies/scopes.py",
        (("if not strategy.extended.variable_created_in_scope(inner):", "if False:"),),
        (
            "promises/test_bad_input.py::test_a_mistake_is_told[model outside the scope]",
            "promises/test_bad_input.py::test_a_mistake_is_told[metric outside the scope]",
        ),
    ),
    Mutation(
        "the loss scale is not taken out again",
        "accumulation/loss_scale.py",
        (("tensor / tf.cast(self.value(), tensor.dtype)", "tensor"),),
        (
            "promises/test_composition_by_hand.py::test_loss_scale_and_clipping_alone_decide_once[2-global_clipnorm]",
        ),
    ),
    Mutation(
        "any finite gradient is enough",
        "accumulation/gradients.py",
        (
            (
                "return tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])",
                "return tf.constant(True)",
            ),
        ),
        (
            "promises/test_composition_by_hand.py::test_loss_scale_and_clipping_alone_decide_once[3-clip_gradients]",
        ),
    ),
    Mutation(
        "each gradient is clipped by itself",
        "accumulation/gradients.py",
        (("global_norm([each for each in dense if", "global_norm([each for each in dense[:1] if"),),
        (
            "promises/test_composition_by_hand.py::test_loss_scale_and_clipping_alone_decide_once[3-clip_gradients]",
        ),
    ),
    Mutation(
        "gradients are sent in float64",
        "strategies/collectives.py",
        (
            (
                "placed = [tf.identity(tensor) for tensor in tensors]",
                "placed = [tf.cast(tensor, tf.float64) for tensor in tensors]",
            ),
        ),
        ("promises/test_gradients_leave_early.py::test_every_gradient_is_sent_once",),
    ),
    Mutation(
        "sparse rows are those of the first replica",
        "data/partition.py",
        (
            (
                "begin = tf.concat([[start], tf.zeros_like(columns)], 0)",
                "begin = tf.concat([[tf.zeros_like(start)], tf.zeros_like(columns)], 0)",
            ),
        ),
        (
            "promises/test_datasets.py::test_each_row_once_of_every_kind_at_once[2]",
            "promises/test_datasets.py::test_each_row_once_in_any_structure",
        ),
    ),
    Mutation(
        "every pass has the seeds of the first",
        "data/sharded_dataset.py",
        (
            (
                "            self.preprocessing.begin_pass()\n        return ShardIterator(",
                "            pass\n        return ShardIterator(",
            ),
        ),
        ("promises/test_datasets.py::test_preprocessing_gives_each_row_its_own_random_numbers",),
    ),
    Mutation(
        "shares go to the replicas in reverse",
        "data/sharded_dataset.py",
        (
            (
                "whole_shares = replica_shares(shares, strategy.num_replicas_in_sync)",
                "whole_shares = replica_shares(shares, strategy.num_replicas_in_sync)[::-1]",
            ),
        ),
        ("promises/test_shares.py::test_replicas_get_their_shares_of_each_batch[capacities0-8]",),
    ),
    Mutation(
        "the smallest remainder gets the next example",
        "data/shares.py",
        (
            (
                "(parts[i] - quotas[i], -exact[i], i)",
                "(quotas[i] - parts[i], -exact[i], i)",
            ),
        ),
        ("promises/test_shares.py::test_shares_sum_exactly_and_are_proportional",),
    ),
    Mutation(
        "equal remainders are given by place alone",
        "data/shares.py",
        (("(parts[i] - quotas[i], -exact[i], i)", "(i,)"),),
        ("promises/test_shares.py::test_shares_do_not_depend_on_the_order",),
    ),
    Mutation(
        "a share of zero is taken",
        "data/shares.py",
        (("share > 0 for share", "share >= 0 for share"),),
        (
            "promises/test_bad_input.py::test_a_mistake_is_told[a share of zero]",
            "promises/test_shares.py::test_what_cannot_be_divided_is_refused[8-capacities3-0]",
        ),
    ),
    Mutation(
        "listing starts the devices",
        "devices/discovery.py",
        (
            (
                "    config: Any = tf.config\n    details = {",
                "    config: Any = tf.config\n    config.list_logical_devices()\n    details = {",
            ),
        ),
        ("promises/test_devices.py::test_settings_before_and_after_tensorflow_started",),
    ),
    Mutation(
        "a split that comes too late is passed over",
        "devices/configure.py",
        (
            (
                "            config.set_logical_device_configuration(physical, setting)",
                "            with suppress(RuntimeError):\n                config.set_logical_device_configuration(physical, setting)",
            ),
            (
                "from contextlib import contextmanager",
                "from contextlib import contextmanager, suppress",
            ),
        ),
        ("promises/test_devices.py::test_settings_before_and_after_tensorflow_started",),
    ),
    Mutation(
        "a missing device is named without what exists",
        "devices/names.py",
        (("_not_found(text, missing, here,", "_not_found(text, missing, [],"),),
        ("promises/test_devices.py::test_a_device_that_does_not_exist[asked-CPU:64]",),
    ),
    Mutation(
        "fallback=False falls back",
        "strategies/factory.py",
        (("    if not fallback:\n", "    if False:\n"),),
        (
            "promises/test_strategies.py::test_fallback_warns_or_raises[options0-TPU-1]",
            "promises/test_strategies.py::test_fallback_warns_or_raises[options3-odd-3]",
        ),
    ),
    Mutation(
        "a kind is rejected without a reason",
        "strategies/plan.py",
        (("            rejected[kind] = answer\n", "            rejected[kind] = ''\n"),),
        (
            "promises/test_strategies.py::test_a_plan_has_reasons_and_no_side_effect[options1-mirrored-3]",
        ),
    ),
    Mutation(
        "a strategy is made on the first devices",
        "strategies/factory.py",
        (
            (
                'names = [f"/device:{name}" for name in plan.devices]',
                'names = [f"/device:CPU:{i}" for i, name in enumerate(plan.devices)]',
            ),
        ),
        ("promises/test_strategies.py::test_what_is_created_is_what_was_planned[devices1]",),
    ),
    Mutation(
        "a batch size is tried beyond the limit",
        "addons/tuning/batch_size.py",
        (("size = min(grown, int(largest))", "size = grown"),),
        ("promises/test_diagnostics.py::test_the_largest_batch_that_fits",),
    ),
    Mutation(
        "small batches are not told",
        "addons/diagnostics/explain.py",
        (("rows is not None and rows < replicas:", "rows is not None and rows < 1:"),),
        ("promises/test_diagnostics.py::test_a_batch_smaller_than_the_replicas_is_found",),
    ),
    Mutation(
        "the doctor shows addresses",
        "addons/diagnostics/doctor.py",
        (('"variables": describe_variables(environ),', '"variables": dict(environ),'),),
        ("promises/test_diagnostics.py::test_the_doctor_names_what_is_wrong_here",),
    ),
    Mutation(
        "a model outside the scope is not found",
        "addons/diagnostics/explain.py",
        (
            (
                "if not strategy.extended.variable_created_in_scope(tf_variable(v))",
                "if v is None",
            ),
        ),
        ("promises/test_diagnostics.py::test_a_model_or_an_optimizer_outside_the_scope_is_found",),
    ),
    Mutation(
        "a difference of replicas is passed over",
        "addons/testing/invariance.py",
        (("            if wrong:\n", "            if False:\n"),),
        ("promises/test_testing_tools.py::test_a_layer_whose_rows_touch_each_other_fails",),
    ),
    Mutation(
        "fewer virtual devices than asked for are enough",
        "addons/testing/virtual_devices.py",
        (("    if len(configured) >= count:\n", "    if configured:\n"),),
        ("promises/test_testing_tools.py::test_virtual_devices",),
    ),
    Mutation(
        "a model outside every scope is trained and evaluated",
        "addons/loops/cache.py",
        (("    refuse_one_device(function)\n", "    str(function)\n"),),
        (
            "promises/test_blocks_alone.py::test_a_model_outside_every_scope_is_refused[fit]",
            "promises/test_blocks_alone.py::test_a_model_outside_every_scope_is_refused[evaluate]",
            "promises/test_blocks_alone.py::test_a_model_outside_every_scope_is_refused[predict]",
        ),
    ),
    Mutation(
        "what TensorFlow cut counts by the first shard",
        "steps/batches.py",
        (("[int(count_rows(shard)) for shard in local]", "[1 for shard in local]"),),
        (
            "promises/test_blocks_alone.py::test_a_step_alone_beside_a_strategy_and_data_of_tensorflow[2]",
        ),
    ),
)
