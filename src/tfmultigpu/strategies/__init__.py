"""Strategies: the choice for a machine, and the questions of the packages above."""

from tfmultigpu.strategies.factory import create_strategy, plan_strategy
from tfmultigpu.strategies.plan import StrategyPlan

__all__ = [
    "StrategyPlan",
    "create_strategy",
    "plan_strategy",
]
