"""Whether operations can fail by what is in their inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

__all__ = ["any_may_fail", "checks_among", "noting_operations"]

# What gradients of Keras' layers and losses are made of. Shapes and indices of these come from the
# forward pass, which found them to fit. Anything else may check, run Python, call functions in
# which there is whatever you like, or not exist for some matrices.
_SAFE = """
Abs AddN AddV2 All Any ArgMax ArgMin AvgPool3DGrad AvgPoolGrad BatchMatMulV2 BatchMatMulV3
BatchToSpaceND BiasAddGrad BroadcastArgs BroadcastGradientArgs BroadcastTo Cast Complex ConcatOffset
ConcatV2 Conj Const Conv2D Conv2DBackpropFilter Conv2DBackpropFilterV2 Conv2DBackpropInput
Conv2DBackpropInputV2 Conv3D Conv3DBackpropFilterV2 Conv3DBackpropInputV2 Cos Cosh Cumprod Cumsum
DepthToSpace DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter
DepthwiseConv2dNativeBackpropInput Digamma DivNoNan DynamicStitch Einsum EluGrad Equal Erf Erfc Exp
ExpandDims Expm1 ExtractImagePatches FFT FFT2D Fill FloorDiv FloorMod FusedBatchNormGradV2
FusedBatchNormGradV3 GatherV2 Greater GreaterEqual Identity IdentityN IFFT IFFT2D Imag
InvertPermutation IRFFT IRFFT2D IsFinite L2Loss LeakyReluGrad Less LessEqual ListDiff Log Log1p
LogicalAnd LogicalNot LogicalOr LogSoftmax LRNGrad MatMul Max Maximum MaxPool3DGrad MaxPoolGrad
MaxPoolGradV2 Mean Min Minimum MirrorPadGrad Mul MulNoNan Neg NoOp NotEqual OnesLike Pack Pad PadV2
Pow PreventGradient Prod Range Rank ReadVariableOp Real RealDiv Reciprocal Relu Relu6Grad ReluGrad
Reshape ResizeBicubicGrad ResizeBilinearGrad ResizeNearestNeighborGrad ReverseV2 RFFT RFFT2D Roll
Rsqrt RsqrtGrad ScatterNd Select SelectV2 SeluGrad Shape ShapeN Sigmoid SigmoidGrad Sign Sin Sinh
Size Slice Softmax Softplus SoftplusGrad SoftsignGrad SpaceToBatchND SpaceToDepth Sqrt SqrtGrad
Square SquaredDifference Squeeze StopGradient StridedSlice StridedSliceGrad Sub Sum Tanh TanhGrad
Tile Transpose Unpack UnsortedSegmentSum VariableShape Xdivy Xlogy ZerosLike
"""
_KNOWN = frozenset(_SAFE.split())


@contextmanager
def noting_operations() -> Iterator[list[Any]]:
    """Yields a list that holds, once it is left, the operations that were added to the graph.

    It stays empty in eager execution, where an operation that fails ends all at once.
    """
    made: list[Any] = []
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield made
    made += graph.get_operations()[before:]


def any_may_fail(operations: list[Any]) -> bool:
    """Returns whether any of these is not known to succeed whatever numbers it is given."""
    return any(operation.type not in _KNOWN for operation in operations)


def checks_among(operations: list[Any]) -> list[Any]:
    """Returns the operations that run whether or not their results are used, and may fail."""
    return [one for one in operations if one.op_def.is_stateful and one.type not in _KNOWN]
