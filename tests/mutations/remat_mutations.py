"""What a rematerialized function repeats, broken on purpose."""

from __future__ import annotations

from mutation import broken

TRAINS = "test_recompute.py::test_recomputing_trains_what_computing_once_trains"
SCOPE = "test_recompute.py::test_a_remat_scope_changes_nothing"
ERROR = "test_recompute.py::test_what_cannot_be_repeated_is_an_error"

REMAT = (
    broken(
        "what is computed again draws other numbers",
        "return delay(left.pop(0)[1])",
        "return delay(left.pop(0)[1] + 1)",
        f"{TRAINS}[N=1]",
    ),
    broken(
        "what is computed again reads what was assigned",
        "self._values, self.variables, self._repeats = dict(values), [], True",
        "self._values, self.variables, self._repeats = dict(self._values), [], True",
        f"{TRAINS}[N=1]",
    ),
    broken(
        "a loss that is added again has no gradient",
        "losses.append(tf.convert_to_tensor(loss))",
        "losses.append(tf.stop_gradient(loss))",
        f"{TRAINS}[N=1]",
    ),
    broken(
        "predictions leave functions of a RematScope to TensorFlow",
        "model, strategy, _features(strategy, [Draws(), Lookups(), CallOnce()], verify)",
        "model, strategy, _features(strategy, [Draws(), Lookups()], verify)",
        SCOPE,
    ),
    broken(
        "a captured tensor gets no gradient and nobody says so",
        "if not strange or not trained or not",
        "if trained or not",
        f"{ERROR}[captured]",
    ),
    broken(
        "a table is read twice",
        '"ReadVariableOp", "ResourceGather",',
        '"ReadVariableOp", "LookupTable", "ResourceGather",',
        f"{ERROR}[table]",
    ),
)
