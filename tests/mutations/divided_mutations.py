"""Tables whose rows are on several devices, broken on purpose."""

from __future__ import annotations

from mutation import broken

FILE = "test_divided_tables.py::"
WHOLE = FILE + "test_a_table_that_no_device_holds_trains_as_on_one"
ROWS = FILE + "test_lists_of_its_rows_train_as_on_one_device"
SAVED = FILE + "test_it_is_saved_as_one_array_and_read_on_other_devices"
PREDICTED = FILE + "test_evaluation_and_predictions_are_those_of_one_device"
REFUSED = FILE + "test_an_optimizer_that_needs_the_whole_table_is_refused"

DIVIDED = (
    broken(
        "rows of a part are looked up by other ids",
        "part.sparse_read(of_part - start)",
        "part.sparse_read((of_part - start) // 2)",
        PREDICTED,
    ),
    broken(
        "each part of a table is clipped by itself",
        "            parts, _ = tf.clip_by_global_norm(gradient.present(), optimizer.clipnorm)\n",
        "            parts = [tf.clip_by_norm(part, optimizer.clipnorm) for part in gradient.present()]\n",
        WHOLE,
    ),
    broken(
        "the first part of a table is not updated",
        "            function(part, *of_part, **kwargs)\n",
        "            number and function(part, *of_part, **kwargs)\n",
        ROWS,
    ),
    broken(
        "the penalty of a table in parts is counted again for the whole",
        "    trainable = step.update.targets_of(step.forward.model.trainable_variables)\n",
        "    trainable = [step.update.target_of(v) for v in step.forward.model.trainable_variables]\n",
        WHOLE,
    ),
    broken(
        "a table is loaded into its first part alone",
        "                yield part, tf.cast(rows, part.dtype)\n",
        "                yield self.parts[0] if number == 0 else tf.Variable(part), tf.cast(rows, part.dtype)\n",
        SAVED,
    ),
    broken(
        "nobody asks whether an optimizer can update a table in parts",
        "        if len(units) > len(variables):\n",
        "        if len(units) < len(variables):\n",
        REFUSED,
    ),
)
