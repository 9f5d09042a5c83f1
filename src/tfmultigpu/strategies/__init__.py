"""Strategies: the choice for a machine, and the questions of the packages above."""

from tfmultigpu.strategies.communication import (
    CommunicationTimes,
    communication_times,
    measure_communication,
)
from tfmultigpu.strategies.factory import create_strategy, plan_strategy
from tfmultigpu.strategies.plan import StrategyPlan
from tfmultigpu.strategies.variable_sharding import sharded_variables

__all__ = [
    "CommunicationTimes",
    "StrategyPlan",
    "communication_times",
    "create_strategy",
    "measure_communication",
    "plan_strategy",
    "sharded_variables",
]
