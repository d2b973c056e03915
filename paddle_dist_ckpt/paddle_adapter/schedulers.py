"""Learning rate schedulers: given their states back so that they go on as they would have."""

from __future__ import annotations

from typing import Any

import paddle

__all__ = ["is_scheduler", "restore_scheduler"]


def is_scheduler(value: Any) -> bool:
    """Whether it is one of Paddle's learning rate schedulers."""
    return isinstance(value, paddle.optimizer.lr.LRScheduler)


def restore_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Give a scheduler its state back.

    ``CosineAnnealingWarmRestarts`` leaves out of its state where it is between two restarts. It follows from the epoch.
    """
    scheduler.set_state_dict(state)
    if isinstance(scheduler, paddle.optimizer.lr.CosineAnnealingWarmRestarts) and scheduler.last_epoch >= 0:
        since, length = scheduler.last_epoch, scheduler.T_0
        while since >= length:
            since, length = since - length, length * scheduler.T_mult
        scheduler.T_cur, scheduler.T_i = since, length
