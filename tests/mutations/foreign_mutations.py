"""What is promised of objects that this library did not make, broken on purpose."""

from __future__ import annotations

from mutation import broken

FOREIGN = (
    broken(
        "strategies that TensorFlow made do not count",
        "strategies/process_state.py:_strategies_of_several_replicas",
        'getattr(s, "num_replicas_in_sync", 1) > 1 => "run" in vars(s) and ...',
        "test_foreign_objects.py::test_a_strategy_of_tensorflow_is_not_passed_over",
    ),
    broken(
        "one of several strategies is guessed",
        "strategies/scopes.py:refuse_one_device",
        "len(living) == 1 => (kinds := describe((living := living[:1])[0]))",
        "test_foreign_objects.py::test_a_strategy_of_tensorflow_is_not_passed_over",
    ),
    broken(
        "strategies whose replicas share variables are taken",
        "strategies/topology.py",
        "_distribute.experimental.CentralStorageStrategy => ()",
        "test_foreign_objects.py::test_replicas_that_share_a_variable_are_refused",
    ),
    broken(
        "objects that inherit from tf_keras are taken",
        "strategies/scopes.py:_is_legacy",
        "(base.__module__ for base in kind.__mro__) => ()",
        "test_foreign_objects.py::test_tf_keras_is_named",
    ),
    broken(
        "a model is built if model.build says so",
        "steps/build_model.py:is_built",
        "all(layer.built or layer in _passed_over for layer in all_layers(model)) => True",
        "test_foreign_objects.py::test_a_model_that_is_built_in_part_is_built_whole",
    ),
    broken(
        "sparse rows of replicas are not as wide as the widest",
        "steps/predict.py:join_rows.join",
        "tf.sparse.concat(0, list(parts), expand_nonconcat_dims=True) => tf.sparse.concat(0, list(parts))",
        "test_foreign_objects.py::test_sparse_and_ragged_outputs",
    ),
    broken(
        "every copy of a small batch is predicted",
        "steps/predict.py:PredictStep._look.first_copy",
        "count_rows(rows) // copies => count_rows(rows)",
        "test_foreign_objects.py::test_sparse_and_ragged_outputs",
    ),
    broken(
        "one value for a batch is joined",
        "steps/predict.py:join_rows.join",
        "parts[0].shape.rank == 0 => parts[0].shape.rank == -1",
        "test_foreign_objects.py::test_one_value_for_a_batch_is_no_prediction",
    ),
    broken(
        "the loss crossentropy is the categorical one",
        "accumulation/losses.py:_loss_by_shapes.Crossentropy.call",
        "are_numbers => False",
        "test_foreign_objects.py::test_the_loss_crossentropy_is_that_of_keras",
        also=(
            (
                "accumulation/losses.py:_loss_by_shapes.Crossentropy.call",
                "y_pred.shape[-1] == 1 => y_pred.shape[-1] == -1",
            ),
        ),
    ),
    broken(
        "asking for the next batch passes over one",
        "data/shard_iterator.py:ShardIterator.get_next_as_optional",
        "return NextBatch(self.source.get_next_as_optional(), self.cut) => self.source.get_next(); ...",
        "test_foreign_objects.py::test_the_next_batch_as_an_optional",
    ),
    broken(
        "TensorFlow's iterator is named as any iterator",
        "steps/batches.py:BatchReader.open",
        "isinstance(iterator, tf.distribute.DistributedIterator) => False",
        "test_foreign_objects.py::test_an_iterator_of_tensorflow_is_named",
    ),
    broken(
        "losses of an unknown number of axes are taken",
        "accumulation/losses.py:_check_values",
        "values.shape.rank is None => False",
        "test_foreign_objects.py::test_tf_squeeze_without_an_axis_is_named",
    ),
    broken(
        "rows of other widths end in TensorFlow's words",
        "steps/failures.py:_explain",
        'GATHERED in error.message and "same size and shape" in error.message => False',
        "test_foreign_objects.py::test_ragged_rows_are_gathered_at_one_width",
    ),
    broken(
        "more devices are advised for a variable that fits on none",
        "addons/sharding/loads.py:Loads.check",
        "size > max(memory) and not part => False",
        "test_foreign_objects.py::test_a_variable_larger_than_every_device",
    ),
    broken(
        "enumerate in a tf.function ends in TensorFlow's words",
        "data/shard_iterator.py:ShardIterator.get_next",
        '"unusually high number" not in str(error) => True',
        "test_foreign_objects.py::test_the_line_of_the_message_is_right",
    ),
    broken(
        "a list of arrays is told to be (x, y)",
        "addons/loops/compiled.py:check_labels",
        '"A list is several inputs, as in Keras. " if isinstance(x, tuple) else "" => ""',
        "test_foreign_objects.py::test_the_line_of_the_message_is_right",
    ),
    broken(
        "tensors without values are left without a word",
        "steps/failures.py:explaining_failures",
        "\"has no attribute 'numpy'\" in str(error) => False",
        "test_foreign_objects.py::test_a_loss_that_needs_values_is_told_what_to_write",
    ),
    broken(
        "a task of KerasHub is told to call tmg.fit in its fit",
        "addons/loops/methods.py:refuse_own_methods",
        'hasattr(model, "preprocess_samples") => False',
        "test_foreign_objects.py::test_models_with_methods_of_their_own",
    ),
)
