"""The tests of ``nox -s quick``: one for each promise of the README's table, and units."""

from __future__ import annotations

# By how the first column of a row begins: a test, below tests/.
PROMISES = {
    "batches that N does not divide": "parity/test_exactness.py::"
    "test_twenty_sgd_steps_at_every_batch_size[2-1-weights]",
    "sample weights, masks, several outputs": "parity/test_features.py::"
    "test_a_list_of_outputs_one_of_them_masked[2]",
    "`clip_norm`, or clipping set": "parity/test_exactness.py::"
    "test_twenty_sgd_steps_at_every_batch_size[2-3-clip]",
    "`micro_batches=k`": "parity/test_exactness.py::"
    "test_twenty_sgd_steps_at_every_batch_size[3-2-clip]",
    "dropout, noise": "steps/test_random_draws.py::"
    "test_layers_draw_what_one_device_draws[dropout-3]",
    "`shares=(3, 1)`": "parity/test_micro_batches.py::"
    "test_one_device_gives_the_same[shares1-micro_batches1-momentum-options1]",
    "`shard_update`": "optimizers/test_sharded.py::test_optimizers_of_keras[Adam]",
    "`fit`": "loops/test_fit.py::test_arrays_and_steps",
    "several steps on each batch": "steps/test_chain.py::"
    "test_each_batch_trains_the_steps_in_turn[2-times0]",
    "a dataset of dicts": "data/test_sharded_dataset.py::"
    "test_every_structure_comes_out_as_it_went_in[named-host]",
    "an inf or NaN on one replica": "optimizers/test_loss_scaling.py::"
    "test_overflow_on_any_one_replica_skips_the_step_on_all[1]",
    "`step.run` when the data ends": "steps/test_multi_step.py::"
    "test_as_one_call_for_each_batch[2-5]",
    "a run killed and resumed": "checkpoints/test_manager.py::"
    "test_a_run_gone_on_with_equals_one_uninterrupted_to_the_bit[8-1]",
    "code whose rows touch each other": "steps/test_row_gathering.py::"
    "test_a_loss_over_the_whole_batch_is_that_of_one_device[simclr-2]",
    "a step that raises": "steps/test_atomic.py::"
    "test_a_step_that_raises_has_changed_nothing[2-1-False-step]",
    "a device, an address or a worker": "devices/test_configure.py::"
    "test_a_missing_device_is_named_with_what_exists_and_the_line",
    "a worker that dies": "clusters/test_connection.py::"
    "test_a_line_without_an_end_is_a_connection_that_broke_off",
}

# Combinations of parameters that alone catch a mutation: never left to `nox -s full`.
KEPT = {
    "parity/test_outputs.py::test_losses_of_many_steps_are_those_of_all_rows"
    "[eval-3-{}-mean_with_sample_weight-masks and weights]",
}

# Files of units: no step is traced in them.
UNITS = (
    "clusters/test_cluster_sources.py",
    "clusters/test_slurm.py",
    "clusters/test_tf_config.py",
    "data/test_batch_format.py",
    "data/test_partition.py",
    "data/test_shares.py",
    "data/test_sources.py",
    "devices/test_configure.py",
    "docs/test_architecture.py",
    "mutations/test_mutations.py",
    "strategies/test_plan.py",
    "strategies/test_worker_exchange.py",
    "test_check_count.py",
    "test_error_classes.py",
    "test_house.py",
    "test_import.py",
)
