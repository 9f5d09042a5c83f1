"""Watching: what a run waits for, said while it waits, and the likely cause."""

from tfmultigpu.addons.watching.watches import Watch, watch

__all__ = ["Watch", "watch"]
