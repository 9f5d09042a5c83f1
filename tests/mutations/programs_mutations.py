"""What a step holds, needs, waits for and computes again, broken on purpose."""

from __future__ import annotations

from mutation import broken

_FILE = "test_no_update_waits_for_the_host.py"
TRAINS = "test_recompute.py::test_recomputing_trains_what_computing_once_trains"
ERROR = "test_recompute.py::test_what_cannot_be_repeated_is_an_error"

PROGRAMS = (
    broken(
        "a step does not see that its model has other variables",
        "steps/step.py:ModelStep.key",
        "not now.has_objects_of(before) => False",
        "test_programs.py::test_each_step_computes_with_the_model_as_it_is",
    ),
    broken(
        "a model that a loss calls is not looked at",
        "steps/replicas.py:_noting_calls.call",
        "called[id(layer)] = layer => pass",
        "test_programs.py::test_each_step_computes_with_the_model_as_it_is",
    ),
    broken(
        "settings inside others are not looked at",
        "accumulation/settings.py:_settings_of",
        "waiting.append((kept.name_of(key), value)) => pass",
        "test_programs.py::test_a_setting_at_any_depth_acts_from_the_next_step_on[halve_item]",
        "test_programs.py::test_a_setting_at_any_depth_acts_from_the_next_step_on[halve_inner]",
    ),
    broken(
        "cuts with other offsets are equal",
        "data/cut.py:Cut.__eq__",
        "self._fixed == other._fixed => True",
        "test_programs.py::test_a_run_has_the_offsets_of_its_own_dataset",
    ),
    broken(
        "a loop made outside is used inside",
        "steps/batches.py:BatchReader.open",
        "LoopKind(of_source, elements, never_ends, logs_last, inside) => LoopKind(of_source, elements, never_ends, logs_last, False)",
        "test_programs.py::test_a_batch_that_fails_leaves_nothing_behind_inside_and_outside",
    ),
    broken(
        "a step of a chain keeps what it was last traced for",
        "steps/runner.py:Runner.call",
        "self.settle(lambda: spec_of(batch)) => pass",
        "test_programs.py::test_a_chain_trains_what_is_trained_now",
        also=(
            (
                "steps/runner.py:Runner.__call__",
                "return self.call(self.batches.read(batch))[0] => self.settle(lambda: spec_of(self.batches.read(batch))); ...",
            ),
        ),
    ),
    broken(
        "the check counts what it has seen",
        "addons/verification/verify.py:Verify.around_call",
        "key not in self._keys => len(self._step.runner.programs) > len(self._keys)",
        "test_programs.py::test_what_changed_is_compared_after_a_change_of_a_setting",
    ),
    broken(
        "of each variable one copy is counted",
        "addons/tuning/counted_memory.py:_Counting._as_it_is",
        "copies_of(self._strategy, variable) => ...[:1]",
        "test_memory_before_a_run.py::test_what_is_kept_is_counted_to_one_percent[copies]",
    ),
    broken(
        "a tensor that nothing reads any more is counted",
        "addons/tuning/live_bytes.py:_Flat._alive",
        "after[value.maker] & read => after[value.maker]",
        "test_memory_before_a_run.py::test_a_step_needs_what_it_is_said_to_need_at_least",
    ),
    broken(
        "the values of the loss are looked at on the host",
        "accumulation/losses.py:_one_for_each_row",
        "shape = [tf.cast(rows, tf.int32), *values.shape[1:], 1]"
        ' => ...; tf.raw_ops.Assert(condition=tf.reduce_sum(values) < 1e30, data=["large"])',
        f"{_FILE}::test_no_update_waits_for_the_host[plain]",
        f"{_FILE}::test_no_update_waits_for_the_host[clipped]",
    ),
    broken(
        "the next loss scale is one more branch",
        "accumulation/loss_scale.py:LossScale.update",
        "tf.where(grow & tf.math.is_finite(scale * 2.0), scale * 2.0, scale) => tf.cond(grow, lambda: scale * 2.0, lambda: scale)",
        f"{_FILE}::test_no_update_waits_for_the_host[dynamic scale]",
    ),
    broken(
        "the size of data is left open",
        "steps/batches.py:BatchReader.kind_of",
        "self._keeps_rows or (self._alone and fixed is not None) => self._keeps_rows",
        "test_data_of_one_size.py::test_data_of_several_sizes_costs_two_traces_at_most[1]",
    ),
    broken(
        "the number of losses is not held to the rows",
        "accumulation/losses.py:loss_term",
        "is_counted and rows is not None => False",
        f"{_FILE}::test_another_number_of_losses_than_rows_is_refused[plain]",
        f"{_FILE}::test_another_number_of_losses_than_rows_is_refused[by XLA]",
    ),
    broken(
        "what is computed again draws other numbers",
        "steps/features/remat.py:_Seeds.repeating.draw",
        "left.pop(0)[1] => ... + 1",
        f"{TRAINS}[N=1]",
    ),
    broken(
        "what is computed again reads what was assigned",
        "steps/assignments.py:DeferredAssignments.repeating",
        "dict(values) => dict(self._values)",
        f"{TRAINS}[N=1]",
    ),
    broken(
        "a loss that is added again has no gradient",
        "steps/features/remat.py:_Call._run.add_loss",
        "tf.convert_to_tensor => tf.stop_gradient",
        f"{TRAINS}[N=1]",
    ),
    broken(
        "predictions leave functions of a RematScope to TensorFlow",
        "steps/make.py:make_predict_step",
        "[Draws(), Lookups(), CallOnce()] => [Draws(), Lookups()]",
        "test_recompute.py::test_a_remat_scope_changes_nothing",
    ),
    broken(
        "a captured tensor gets no gradient and nobody says so",
        "steps/features/repeatable.py:check_captures",
        "not strange or not trained or not _depends(list(strange.values()), trained) => trained or not _depends(list(strange.values()), trained)",
        f"{ERROR}[captured]",
    ),
    broken(
        "a table is read twice",
        "steps/features/repeatable.py",
        '("ReadVariableOp", "ResourceGather", "Collective", "Nccl", "CudnnRNN")'
        ' => ("ReadVariableOp", "LookupTable", "ResourceGather", "Collective", "Nccl", "CudnnRNN")',
        f"{ERROR}[table]",
    ),
)
