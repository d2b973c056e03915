"""Stands for Paddle's pinned memory, which it has for GPUs alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import paddle
import pytest

from paddle_dist_ckpt.core.memory import Bytes1D, address_of, fresh_pages
from paddle_dist_ckpt.paddle_adapter import device
from test.device_plugin import control

__all__ = ["pinned_memory"]


@contextmanager
def pinned_memory() -> Iterator[list[Bytes1D]]:
    """Have the host memory that the library makes for copies pinned: those to a device read it when it is their turn.

    Yields what was made.
    """
    made: list[Bytes1D] = []

    def pinned(nbytes: int) -> Bytes1D:
        memory = fresh_pages(nbytes)
        control.pin(address_of(memory), nbytes)
        made.append(memory)
        return memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "pinned_memory", pinned)
        yield made
    paddle.device.synchronize()
    for memory in made:
        control.unpin(address_of(memory))
