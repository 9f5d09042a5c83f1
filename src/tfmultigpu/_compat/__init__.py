"""Private names of TensorFlow and Keras; only ``addons/sharding/_private.py`` has others.

Each function or class says what is private, why the public API is not enough, and what happens
without it. ``tests/test_compat.py`` fails if one of them changes.
"""

from tfmultigpu._compat.keras_batch_norm import moments_of_batch, sum_in_moments
from tfmultigpu._compat.keras_callbacks import profiles_batches, set_by_loops
from tfmultigpu._compat.keras_compiled import (
    compile_arguments,
    compiled_metrics,
    division_of_losses,
    waits_for_shapes,
    without_building,
)
from tfmultigpu._compat.keras_data import KerasReading, data_adapter, reading_of_keras
from tfmultigpu._compat.keras_draws import global_seeds, home_of, set_global_seeds
from tfmultigpu._compat.keras_layers import (
    forget_empty_variables,
    inside_layer_call,
    is_part_of_keras,
    keras_mask,
    layer_call,
    layers_inside,
    own_variables,
    set_keras_mask,
)
from tfmultigpu._compat.keras_optimizers import (
    clip_as_set,
    keeping_gradients,
    optimizer_trains,
    strategy_of_optimizer,
)
from tfmultigpu._compat.python_threads import frames_of_threads
from tfmultigpu._compat.tensorflow_gradients import (
    additions,
    custom_gradients,
    may_not_be_linear,
    rematerialized,
)
from tfmultigpu._compat.tensorflow_graphs import (
    add_control_inputs,
    called_as_whole,
    graphs_inside,
    is_stateful,
    kernels_are_deterministic,
    operations_of,
    types_of_inputs,
    waiting_for,
    without_rewriting,
)
from tfmultigpu._compat.tensorflow_strategies import (
    additions_over_workers,
    numbers_collectives,
    strategies_were_made,
)
from tfmultigpu._compat.tensorflow_variables import (
    ComposedVariable,
    is_for_checkpoints,
    is_variable_handle,
    variable_of_handle,
    variables_of,
    variables_summed_when_read,
)
from tfmultigpu._compat.tensorflow_workers import (
    abort_collectives,
    cluster_value,
    configure_coordination,
    expand_slurm,
    set_cluster_value,
)

__all__ = [
    "ComposedVariable",
    "KerasReading",
    "abort_collectives",
    "add_control_inputs",
    "additions",
    "additions_over_workers",
    "called_as_whole",
    "clip_as_set",
    "cluster_value",
    "compile_arguments",
    "compiled_metrics",
    "configure_coordination",
    "custom_gradients",
    "data_adapter",
    "division_of_losses",
    "expand_slurm",
    "forget_empty_variables",
    "frames_of_threads",
    "global_seeds",
    "graphs_inside",
    "home_of",
    "inside_layer_call",
    "is_for_checkpoints",
    "is_part_of_keras",
    "is_stateful",
    "is_variable_handle",
    "keeping_gradients",
    "keras_mask",
    "kernels_are_deterministic",
    "layer_call",
    "layers_inside",
    "may_not_be_linear",
    "moments_of_batch",
    "numbers_collectives",
    "operations_of",
    "optimizer_trains",
    "own_variables",
    "profiles_batches",
    "reading_of_keras",
    "rematerialized",
    "set_by_loops",
    "set_cluster_value",
    "set_global_seeds",
    "set_keras_mask",
    "strategies_were_made",
    "strategy_of_optimizer",
    "sum_in_moments",
    "types_of_inputs",
    "variable_of_handle",
    "variables_of",
    "variables_summed_when_read",
    "waiting_for",
    "waits_for_shapes",
    "without_building",
    "without_rewriting",
]
