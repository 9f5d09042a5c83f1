"""Why a forward pass cannot be tried: it changes something, or no two runs of it are alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

__all__ = ["CannotVerifyError", "check_changes_nothing", "first_line_of"]


class CannotVerifyError(Exception):
    """The forward pass cannot be tried; the message says why, as the end of a sentence."""


_HARMLESS = re.compile(
    r"ReadVariableOp|VarHandleOp|VarIsInitializedOp|VariableShape|ResourceGather(Nd)?|Assert|Print"
    r"(V2)?|(Stateful)?PartitionedCall|If|While|Case|LookupTable(Find|Size|Export)(V2)?"
    r"|CudnnRNN(V[23])?|Placeholder\w*|CheckNumerics(V2)?|Debug(Identity|NumericSummary)\w*"
    r"|StatelessRandomGetAlg|Empty|DeviceIndex|GuaranteeConst|DisableCopyOnRead|HashTable(V2)?"
)
_CHANGES = re.compile(
    r"Assign\w*|Resource(Scatter|Apply|SparseApply|CountUpTo|StridedSliceAssign)\w*"
    r"|LookupTable(Insert|Import|Remove)\w*|(Eager)?PyFunc|Iterator\w*|\w*Queue\w*|Rng\w*"
    r"|Stateful(Uniform|Standard|Random|Truncated)\w*|Write\w*|Stack(Push|Pop)\w*"
)
_NOT_REPEATED = re.compile(
    r"Random(Uniform|StandardNormal|Gamma|Poisson|Shuffle)\w*|TruncatedNormal"
    r"|ParameterizedTruncatedNormal|Multinomial|StatefulRandomBinomial"
)


def check_changes_nothing(graph: Any, operations: Sequence[Any]) -> None:
    """Checks that operations, and the functions they call, change nothing when they run.

    Args:
        graph: The graph they are in.
        operations: The operations to look at.

    Raises:
        CannotVerifyError: One changes something, or draws numbers that no two runs share.
    """
    kinds = {one.type for one in operations if one.op_def.is_stateful}
    library = graph.as_graph_def().library.function
    inner = {node.op for function in library for node in function.node_def}
    for kind in sorted(kinds | {one for one in inner if _CHANGES.fullmatch(one)}):
        if _NOT_REPEATED.fullmatch(kind):
            raise CannotVerifyError(_draws(kind))
        if not _HARMLESS.fullmatch(kind):
            raise CannotVerifyError(
                f"the forward pass runs {kind!r}, which may change something each time it runs"
            )
    drawn = sorted(one for one in inner if _NOT_REPEATED.fullmatch(one))
    if drawn:
        raise CannotVerifyError(_draws(drawn[0]))


def _draws(kind: str) -> str:
    return (
        f"the forward pass draws by {kind!r}, which no two runs repeat; draw by keras.random with "
        "a keras.random.SeedGenerator"
    )


_AROUND = re.compile(
    r"Exception encountered when|Graph execution error|Detected at node|File \"|\[\[\{\{|<stack"
)


def first_line_of(error: Exception) -> str:
    """Returns what happened, without what Keras and TensorFlow put before it and around it."""
    lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not _AROUND.match(line)]
    return said[0] if said else type(error).__name__
