"""State that is no variable, broken on purpose: put back, saved, reported; what a step copies."""

from __future__ import annotations

from mutation import broken

FILE = "test_state_beside_variables.py"
ONCE = f"{FILE}::test_a_table_counts_each_row_once"
STAYS = f"{FILE}::test_what_cannot_be_put_back_is_not_run_twice"
REFUSED = f"{FILE}::test_state_that_no_checkpoint_holds_is_refused"
RESUMED = f"{FILE}::test_a_run_with_tables_resumes_as_if_never_interrupted"

STATE = (
    broken(
        "the check leaves what it wrote to a table",
        "                table.write(*content)\n",
        "                pass\n",
        ONCE,
    ),
    broken(
        "the check runs what it cannot put back",
        "        _refuse_what_stays(step)\n",
        "",
        STAYS,
    ),
    broken(
        "operations in branches and loops are not looked at",
        '            self._add_function(function, handles, f"{within}{node.name}/")\n',
        "            pass\n",
        STAYS,
    ),
    broken(
        "a table is not compared with one device",
        "    for key, content in contents_of_tables(device.step).items():\n",
        "    for key, content in ():\n",
        f"{FILE}::test_a_table_that_depends_on_the_cut_is_reported",
    ),
    broken(
        "tables that are only read are state",
        "|LookupTable(Find|Size|Export)|",
        "|",
        f"{FILE}::test_tables_that_are_only_read_are_verified_and_saved",
    ),
    broken(
        "a resumed run begins with empty tables",
        "        write_table(table.resource_handle, *content)\n",
        "        pass\n",
        RESUMED,
    ),
    broken(
        "a table with room for deleted keys changes what was read of it",
        "    return tf.constant(np.array(pair.keys.numpy())), tf.constant(np.array(pair.values.numpy()))",
        "    return pair.keys, pair.values",
        f"{FILE}::test_a_table_of_keys_that_may_be_deleted_is_put_back",
    ),
    broken(
        "a checkpoint of a loop is written without a table that it would not hold",
        "            self.check_holds_states(self._step.other_states())\n",
        "",
        REFUSED,
    ),
    broken(
        "a checkpoint of fit is written without a table that it would not hold",
        "self._variables.check_holds_states(fit.other_states(), fit.metric_variables())",
        "self._variables.check_holds_states(())",
        REFUSED,
    ),
    broken(
        "what each replica copies in each step is not found",
        "        self._graphs.add(graph)",
        "        pass",
        "test_diagnostics.py::test_what_each_replica_copies_in_each_step_is_named",
    ),
    broken(
        "kernels of layer.quantize are mirrored",
        'is_kept = trainable or options["dtype"] in _QUANTIZED',
        "is_kept = trainable",
        "test_sharded_variables.py::test_a_quantized_kernel_is_on_one_device_alone",
    ),
    broken(
        "an error of one device is told by its traceback",
        "        if text and not _OF_TRACEBACK.match(text):\n",
        "        if text:\n",
        "test_touching_rows.py::test_what_one_device_cannot_compute_is_wrong_in_the_program",
    ),
    broken(
        "a metric of a function has the name that Keras gives",
        "paths.get(id(variable), variable.path)",
        "variable.path",
        "test_touching_rows.py::test_a_metric_is_told_by_the_name_of_its_function",
    ),
    broken(
        "variables of TensorFlow are not compared with one device",
        "for i, own in enumerate(device.own):",
        "for i, own in enumerate(()):",
        f"{FILE}::test_a_variable_of_tensorflow_that_depends_on_the_cut_is_reported",
    ),
    broken(
        "variables beside the layers are not looked for",
        "        if operation not in _READS_VARIABLE:\n",
        "        if False:\n",
        f"{FILE}::test_a_variable_of_a_loss_is_held_or_refused[Variable1]",
    ),
)
