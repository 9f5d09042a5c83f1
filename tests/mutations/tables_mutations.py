"""Lists of the rows of a table, broken on purpose."""

from __future__ import annotations

from mutation import broken

ROWS = "test_tables.py::test_tables_train_as_on_one_device[SGD, rows, clipped]"
ADAGRAD = "test_tables.py::test_tables_train_as_on_one_device[Adagrad, on every replica, in micro-batches]"
FEATURE = "test_tables.py::test_a_feature_gets_the_gradient_of_a_table_as_a_tensor"
RAGGED = "test_tables.py::test_ragged_ids_and_lookups_of_a_layer_of_a_user"
ADAM = "test_tables.py::test_tables_train_as_on_one_device[Adam, the whole table]"

TABLES = (
    broken(
        "rows of a repeated id are not added before they are squared",
        "            total = unique(total)\n",
        "            total = total  # not unique\n",
        ADAGRAD,
    ),
    broken(
        "the list of one replica is left out",
        "            return joined(halves)\n",
        "            return joined(halves[:1])\n",
        ROWS,
    ),
    broken(
        "the rows of the micro-batches before are lost",
        "return unique(joined([before, addend]))",
        "return unique(addend)",
        ADAGRAD,
    ),
    broken(
        "rows that the owner has updated are not copied",
        "copies[number].scatter_update(tf.IndexedSlices(value, ids))",
        "copies[number].scatter_update(tf.IndexedSlices(value[:0], ids[:0]))",
        ROWS,
    ),
    broken(
        "every optimizer updates the listed rows alone",
        "                if leaves_other_rows(part):\n",
        "                if part:\n",
        ADAM,
    ),
    broken(
        "a replica updates the slots of another",
        "of_slot = (beside or copies)[0]",
        "of_slot = copies[0]",
        ADAGRAD,
    ),
    broken(
        "a feature of a user gets a list of rows",
        "        if sees and not feature.takes_lists:\n",
        "        if sees and not feature:\n",
        FEATURE,
    ),
    broken(
        "ragged ids are looked up as dense ones",
        "return ids.with_flat_values(tf.cast(read(ids.flat_values), table.dtype))",
        "return read(ids.to_tensor())",
        RAGGED,
    ),
    broken(
        "the list for an optimizer that updates all rows is taken for its rows",
        "is_list(args[0]) and args[0].dense_shape is None",
        "is_list(args[0])",
        "test_tables.py::test_tables_train_as_on_one_device[Adam, the whole table]",
    ),
    broken(
        "a window is emptied by a value of no rows",
        "values.assign(tf.gather(values.read_value(), none))",
        "values.assign(tf.zeros([0, *values.shape[1:]], values.dtype))",
        "test_tables.py::test_a_loop_by_hand_in_one_function[1]",
    ),
)
