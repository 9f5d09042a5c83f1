"""What is promised of objects that this library did not make, broken on purpose."""

from __future__ import annotations

from mutation import broken

FOREIGN = (
    broken(
        "strategies that TensorFlow made do not count",
        "    return [s for s in strategies if",
        "    return [s for s in strategies if 'run' in vars(s) and",
        "test_foreign_objects.py::test_a_strategy_of_tensorflow_is_not_passed_over",
    ),
    broken(
        "one of several strategies is guessed",
        "    if len(living) == 1:\n",
        "    if living := living[:1]:\n        kinds = describe(living[0])\n",
        "test_foreign_objects.py::test_a_strategy_of_tensorflow_is_not_passed_over",
    ),
    broken(
        "strategies whose replicas share variables are taken",
        "    _distribute.experimental.CentralStorageStrategy: _CENTRAL,\n",
        "",
        "test_foreign_objects.py::test_replicas_that_share_a_variable_are_refused",
    ),
    broken(
        "objects that inherit from tf_keras are taken",
        "*(base.__module__ for base in kind.__mro__)]",
        "]",
        "test_foreign_objects.py::test_tf_keras_is_named",
    ),
    broken(
        "a model is built if model.build says so",
        "    return all(layer.built or layer in _passed_over for layer in all_layers(model))",
        "    return True",
        "test_foreign_objects.py::test_a_model_that_is_built_in_part_is_built_whole",
    ),
    broken(
        "sparse rows of replicas are not as wide as the widest",
        "            return tf.sparse.concat(0, list(parts), expand_nonconcat_dims=True)",
        "            return tf.sparse.concat(0, list(parts))",
        "test_foreign_objects.py::test_sparse_and_ragged_outputs",
    ),
    broken(
        "every copy of a small batch is predicted",
        "slice_rows(rows, 0, count_rows(rows) // copies)",
        "slice_rows(rows, 0, count_rows(rows))",
        "test_foreign_objects.py::test_sparse_and_ragged_outputs",
    ),
    broken(
        "one value for a batch is joined",
        "        if parts[0].shape.rank == 0:\n",
        "        if parts[0].shape.rank == -1:\n",
        "test_foreign_objects.py::test_one_value_for_a_batch_is_no_prediction",
    ),
    broken(
        "the loss crossentropy is the categorical one",
        "            elif are_numbers:",
        "            elif False:",
        "test_foreign_objects.py::test_the_loss_crossentropy_is_that_of_keras",
        also=(
            ("            if y_pred.shape[-1] == 1:\n", "            if y_pred.shape[-1] == -1:\n"),
        ),
    ),
    broken(
        "asking for the next batch passes over one",
        "        return NextBatch(self.source.get_next_as_optional(), self.cut)",
        "        self.source.get_next()\n        return NextBatch(self.source.get_next_as_optional(), self.cut)",
        "test_foreign_objects.py::test_the_next_batch_as_an_optional",
    ),
    broken(
        "TensorFlow's iterator is named as any iterator",
        "            if isinstance(iterator, tf.distribute.DistributedIterator):\n",
        "            if False:\n",
        "test_foreign_objects.py::test_an_iterator_of_tensorflow_is_named",
    ),
    broken(
        "losses of an unknown number of axes are taken",
        "    if values.shape.rank is None:\n",
        "    if False:\n",
        "test_foreign_objects.py::test_tf_squeeze_without_an_axis_is_named",
    ),
    broken(
        "rows of other widths end in TensorFlow's words",
        '    if GATHERED in error.message and "same size and shape" in error.message:',
        "    if False:",
        "test_foreign_objects.py::test_ragged_rows_are_gathered_at_one_width",
    ),
    broken(
        "more devices are advised for a variable that fits on none",
        "            if size > max(memory) and not part:",
        "            if False:",
        "test_foreign_objects.py::test_a_variable_larger_than_every_device",
    ),
    broken(
        "enumerate in a tf.function ends in TensorFlow's words",
        'if "unusually high number" not in str(error):',
        "if True:",
        "test_foreign_objects.py::test_the_line_of_the_message_is_right",
    ),
    broken(
        "a list of arrays is told to be (x, y)",
        '"A list is several inputs, as in Keras. " if isinstance(x, tuple) else ""',
        '""',
        "test_foreign_objects.py::test_the_line_of_the_message_is_right",
    ),
    broken(
        "tensors without values are left without a word",
        "        if \"has no attribute 'numpy'\" in str(error):",
        "        if False:",
        "test_foreign_objects.py::test_a_loss_that_needs_values_is_told_what_to_write",
    ),
    broken(
        "a task of KerasHub is told to call tmg.fit in its fit",
        'and hasattr(model, "preprocess_samples"):',
        "and False:",
        "test_foreign_objects.py::test_models_with_methods_of_their_own",
    ),
)
