"""Lists of the rows of a table, and tables in parts on several devices, broken on purpose."""

from __future__ import annotations

from mutation import broken

ROWS = "test_tables.py::test_tables_train_as_on_one_device[SGD, rows, clipped]"
ADAGRAD = "test_tables.py::test_tables_train_as_on_one_device[Adagrad, on every replica, in micro-batches]"
WHOLE = "test_divided_tables.py::test_a_table_that_no_device_holds_trains_as_on_one"

TABLES = (
    broken(
        "rows of a repeated id are not added before they are squared",
        "accumulation/targets.py:Target.finish",
        "unique(total) => total",
        ADAGRAD,
    ),
    broken(
        "the list of one replica is left out",
        "strategies/collectives.py:add_on_device",
        "joined(halves) => joined(halves[:1])",
        ROWS,
    ),
    broken(
        "the rows of the micro-batches before are lost",
        "strategies/row_lists.py:added",
        "joined([before, addend]) => addend",
        ADAGRAD,
    ),
    broken(
        "rows that the owner has updated are not copied",
        "accumulation/replicated.py:Owned._update",
        "tf.IndexedSlices(value, ids) => tf.IndexedSlices(value[:0], ids[:0])",
        ROWS,
    ),
    broken(
        "every optimizer updates the listed rows alone",
        "accumulation/table_rows.py:how_taken",
        "leaves_other_rows(part) => part",
        "test_tables.py::test_tables_train_as_on_one_device[Adam, the whole table]",
    ),
    broken(
        "a replica updates the slots of another",
        "accumulation/applying.py:of_rows.update.value",
        "beside or copies => copies",
        ADAGRAD,
    ),
    broken(
        "a feature of a user gets a list of rows",
        "steps/phases.py:_keeps_lists",
        "feature.takes_lists => feature",
        "test_tables.py::test_a_feature_gets_the_gradient_of_a_table_as_a_tensor",
    ),
    broken(
        "ragged ids are looked up as dense ones",
        "steps/features/lookups.py:Lookups.around_model.look_up",
        "ids.with_flat_values(tf.cast(read(ids.flat_values), table.dtype)) => read(ids.to_tensor())",
        "test_tables.py::test_ragged_ids_and_lookups_of_a_layer_of_a_user",
    ),
    broken(
        "the list for an optimizer that updates all rows is taken for its rows",
        "accumulation/applying.py:lists_rows",
        "len(args) > 0 and is_list(args[0]) and args[0].dense_shape is None => len(args) > 0 and is_list(args[0])",
        "test_tables.py::test_tables_train_as_on_one_device[Adam, the whole table]",
    ),
    broken(
        "a window is emptied by a value of no rows",
        "accumulation/accumulator.py:_OfTable.reset",
        "tf.gather(values.read_value(), none) => tf.zeros([0, *values.shape[1:]], values.dtype)",
        "test_tables.py::test_a_loop_by_hand_in_one_function[1]",
    ),
    broken(
        "rows of a part are looked up by other ids",
        "strategies/row_parts.py:RowParts.sparse_read",
        "of_part - start => (...) // 2",
        "test_divided_tables.py::test_evaluation_and_predictions_are_those_of_one_device",
    ),
    broken(
        "each part of a table is clipped by itself",
        "accumulation/applying.py:clip_as_set",
        "parts, _ = tf.clip_by_global_norm(gradient.present(), optimizer.clipnorm)"
        " => parts = [tf.clip_by_norm(part, optimizer.clipnorm) for part in gradient.present()]",
        WHOLE,
    ),
    broken(
        "the first part of a table is not updated",
        "accumulation/applying.py:update_parts",
        "function(part, *of_part, **kwargs) => number and ...",
        "test_divided_tables.py::test_lists_of_its_rows_train_as_on_one_device",
    ),
    broken(
        "the penalty of a table in parts is counted again for the whole",
        "steps/phases.py:_regularize",
        "step.update.targets_of(step.forward.model.trainable_variables) => [step.update.target_of(v) for v in step.forward.model.trainable_variables]",
        WHOLE,
    ),
    broken(
        "a table is loaded into its first part alone",
        "strategies/row_parts.py:RowParts._cut",
        "part, tf.cast(rows, part.dtype) => self.parts[0] if number == 0 else tf.Variable(part), tf.cast(rows, part.dtype)",
        "test_divided_tables.py::test_it_is_saved_as_one_array_and_read_on_other_devices",
    ),
    broken(
        "nobody asks whether an optimizer can update a table in parts",
        "accumulation/replicated.py:Owned.build",
        "len(units) > len(variables) => len(units) < len(variables)",
        "test_divided_tables.py::test_an_optimizer_that_needs_the_whole_table_is_refused",
    ),
)
