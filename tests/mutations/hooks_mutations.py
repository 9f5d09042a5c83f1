"""What loops let go of, and when they call the objects of a user, broken on purpose."""

from __future__ import annotations

from mutation import broken

HOOKS = (
    broken(
        "a loop that is over keeps its iterator",
        "iterator, self.iterator = self.iterator, None",
        "iterator = None",
        "test_let_go.py::test_a_generator_ends_with_the_loop_that_reads_it[2]",
    ),
    broken(
        "an error keeps the iterator of its loop",
        "if iterator is not None:\n            iterator.close()",
        "del iterator",
        "test_let_go.py::test_a_generator_ends_with_the_loop_that_reads_it[2]",
    ),
    broken(
        "a PyDataset does not hear that an epoch ends",
        "self.batches.reader.end()",
        "pass",
        "test_py_datasets.py::test_a_py_dataset_that_shuffles_itself_trains_as_in_keras[3]",
    ),
    broken(
        "predict ends an epoch before it begins one",
        "batches.reader.owe_no_end()",
        "pass",
        "test_py_datasets.py::test_a_py_dataset_that_shuffles_itself_trains_as_in_keras[3]",
    ),
    broken(
        "a pass that one loop continues is ended by another loop over the same data",
        "    return data.read_apart()\n",
        "    return data\n",
        "test_py_datasets.py::test_epochs_of_some_steps_continue_a_pass_that_others_read_too[2]",
    ),
    broken(
        "batches of the next epoch are read before it begins",
        "reader.read_by(self._asked, continues=self._continues)",
        "reader.read_by(None, continues=self._continues)",
        "test_py_datasets.py::test_no_batch_is_read_before_its_epoch[3]",
    ),
    broken(
        "a batch that was looked at is trained on in the order before on_epoch_end",
        "looked_at = _look_at(reading.looked_at())",
        "looked_at, rest = _look_at(reading.looked_at()), reading.batches\n"
        "        from_first = lambda: itertools.chain(looked_at, itertools.islice(rest(), 2, None))\n"
        "        reading = reading._replace(batches=from_first)",
        "test_py_datasets.py::test_no_batch_is_read_before_its_epoch[3]",
    ),
)
