"""What a compiled step holds, and where it may run, broken on purpose."""

from __future__ import annotations

from mutation import broken

PROGRAMS = (
    broken(
        "a step does not see that its model has other variables",
        "        if not now.has_objects_of(before):\n",
        "        if False:\n",
        "test_programs.py::test_each_step_computes_with_the_model_as_it_is",
    ),
    broken(
        "a model that a loss calls is not looked at",
        "            called[id(layer)] = layer\n",
        "            pass\n",
        "test_programs.py::test_each_step_computes_with_the_model_as_it_is",
    ),
    broken(
        "settings inside others are not looked at",
        "waiting.append((kept.name_of(key), value))",
        "pass",
        "test_programs.py::test_a_setting_at_any_depth_acts_from_the_next_step_on[halve_item]",
        "test_programs.py::test_a_setting_at_any_depth_acts_from_the_next_step_on[halve_inner]",
    ),
    broken(
        "cuts with other offsets are equal",
        "            and self._fixed == other._fixed\n",
        "",
        "test_programs.py::test_a_run_has_the_offsets_of_its_own_dataset",
    ),
    broken(
        "a loop made outside is used inside",
        "never_ends, logs_last, inside)",
        "never_ends, logs_last, False)",
        "test_programs.py::test_a_batch_that_fails_leaves_nothing_behind_inside_and_outside",
    ),
    broken(
        "a step of a chain keeps what it was last traced for",
        "            self.settle(lambda: spec_of(batch))\n            result",
        "            result",
        "test_programs.py::test_a_chain_trains_what_is_trained_now",
        also=(
            (
                "                return self.call(self.batches.read(batch))[0]\n",
                "                self.settle(lambda: spec_of(self.batches.read(batch)))\n"
                "                return self.call(self.batches.read(batch))[0]\n",
            ),
        ),
    ),
    broken(
        "the check counts what it has seen",
        "        if key not in self._keys:  #",
        "        if len(self._step.runner.programs) > len(self._keys):  #",
        "test_programs.py::test_what_changed_is_compared_after_a_change_of_a_setting",
    ),
)
