"""Strategies: the choice for a machine, and what the other packages ask of a strategy."""

from tfmultigpu.strategies.factory import create_strategy, plan_strategy
from tfmultigpu.strategies.plan import StrategyPlan
from tfmultigpu.strategies.process_state import explaining_lost_workers

__all__ = ["StrategyPlan", "create_strategy", "explaining_lost_workers", "plan_strategy"]
