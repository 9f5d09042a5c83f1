"""The loss scale, for the old train step; it goes with that."""

from tfmultigpu.accumulation.loss_scale import (
    LossScale,
    kept_loss_scale,
    make_loss_scale,
    unwrap_optimizer,
)

__all__ = ["LossScale", "kept_loss_scale", "make_loss_scale", "unwrap_optimizer"]
