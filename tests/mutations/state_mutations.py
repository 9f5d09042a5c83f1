"""State that is no variable, broken on purpose: put back, saved, reported; what a step copies."""

from __future__ import annotations

from mutation import broken

FILE = "test_state_beside_variables.py"
STAYS = f"{FILE}::test_what_cannot_be_put_back_is_not_run_twice"
REFUSED = f"{FILE}::test_state_that_no_checkpoint_holds_is_refused"

STATE = (
    broken(
        "the check leaves what it wrote to a table",
        "steps/other_states.py:Touched.putting_back_tables",
        "table.write(*content) => pass",
        "test_state_beside_variables.py::test_a_table_counts_each_row_once",
    ),
    broken(
        "the check runs what it cannot put back",
        "addons/verification/verify.py:Verify._traced",
        "_refuse_what_stays(step) => pass",
        STAYS,
    ),
    broken(
        "operations in branches and loops are not looked at",
        "steps/other_states.py:_Search.add",
        'self._add_function(function, handles, f"{within}{node.name}/") => pass',
        STAYS,
    ),
    broken(
        "a table is not compared with one device",
        "addons/verification/compare.py:compared",
        "contents_of_tables(device.step).items() => ()",
        f"{FILE}::test_a_table_that_depends_on_the_cut_is_reported",
    ),
    broken(
        "tables that are only read are state",
        "steps/other_states.py:_kind_of",
        '_CHANGES_NOTHING.fullmatch(node.op) => ... and not node.op.startswith("LookupTable")',
        f"{FILE}::test_tables_that_are_only_read_are_verified_and_saved",
    ),
    broken(
        "a resumed run begins with empty tables",
        "addons/checkpoints/tables.py:write_tables",
        "write_table(table.resource_handle, *content) => pass",
        "test_state_beside_variables.py::test_a_run_with_tables_resumes_as_if_never_interrupted",
    ),
    broken(
        "a table with room for deleted keys changes what was read of it",
        "steps/other_states.py:read_table",
        "tf.constant(np.array(pair.keys.numpy())), tf.constant(np.array(pair.values.numpy())) => pair.keys, pair.values",
        f"{FILE}::test_a_table_of_keys_that_may_be_deleted_is_put_back",
    ),
    broken(
        "a checkpoint of a loop is written without a table that it would not hold",
        "addons/checkpoints/state.py:RunVariables.read",
        "self.check_holds_states(self._step.other_states()) => pass",
        REFUSED,
    ),
    broken(
        "a checkpoint of fit is written without a table that it would not hold",
        "addons/checkpoints/callback.py:CheckpointCallback.read",
        "self._variables.check_holds_states(fit.other_states(), fit.metric_variables()) => self._variables.check_holds_states(())",
        REFUSED,
    ),
    broken(
        "what each replica copies in each step is not found",
        "steps/other_states.py:Touched.noting",
        "self._graphs.add(graph) => pass",
        "test_diagnostics.py::test_what_each_replica_copies_in_each_step_is_named",
    ),
    broken(
        "kernels of layer.quantize are mirrored",
        "addons/sharding/variables.py:_creating.create",
        'trainable or options["dtype"] in _QUANTIZED => trainable',
        "test_sharded_variables.py::test_a_quantized_kernel_is_on_one_device_alone",
    ),
    broken(
        "an error of one device is told by its traceback",
        "addons/verification/verify.py:_essence",
        "text and not _OF_TRACEBACK.match(text) => text",
        "test_touching_rows.py::test_what_one_device_cannot_compute_is_wrong_in_the_program",
    ),
    broken(
        "a metric of a function has the name that Keras gives",
        "addons/verification/compare.py:compared",
        "paths.get(id(variable), variable.path) => variable.path",
        "test_touching_rows.py::test_a_metric_is_told_by_the_name_of_its_function",
    ),
    broken(
        "variables of TensorFlow are not compared with one device",
        "addons/verification/compare.py:compared",
        "device.own => ()",
        f"{FILE}::test_a_variable_of_tensorflow_that_depends_on_the_cut_is_reported",
    ),
    broken(
        "variables beside the layers are not looked for",
        "steps/other_states.py:_Search._add_variable",
        "operation not in _READS_VARIABLE => False",
        f"{FILE}::test_a_variable_of_a_loss_is_held_or_refused[Variable1]",
    ),
)
