"""What is asked of GPUs alone: host memory that they reach by themselves.

Copies between a GPU and pinned memory go at the link's full speed and beside all else; those of other host memory go
through a small pinned buffer of the driver's, and hold up the thread that asks for them. Everything else that the
library does with a device (streams, events, copies, collectives) is the same for all devices: :mod:`.device`.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
from paddle.base import core

from ..core.memory import array_at

__all__ = ["is_gpu_build", "pinned_memory"]

_logger = logging.getLogger("paddle_dist_ckpt")
_PAGE = 4096


def is_gpu_build() -> bool:
    """Whether this Paddle drives GPUs."""
    return bool(paddle.is_compiled_with_cuda() or paddle.is_compiled_with_rocm())


def pinned_memory(nbytes: int) -> npt.NDArray[np.uint8] | None:
    """Pinned memory from the beginning of a page; None where this Paddle has none, or no more of it.

    Args:
        nbytes: How much.
    """
    place = _pinned_place()
    if place is None or nbytes == 0:
        return None
    try:
        tensor = paddle.to_tensor(np.empty(nbytes + _PAGE, np.uint8), place=place)
    except (RuntimeError, MemoryError, OSError) as error:
        _logger.warning("%d bytes of pinned memory cannot be had, so other memory is used: %s", nbytes, error)
        return None
    address = int(tensor.data_ptr())
    return array_at(address + -address % _PAGE, (nbytes,), None, np.dtype(np.uint8), tensor)


def _pinned_place() -> Any:
    """The place of pinned memory, if this Paddle knows one."""
    if is_gpu_build():
        return paddle.CUDAPinnedPlace()
    if paddle.is_compiled_with_xpu() and hasattr(core, "XPUPinnedPlace"):
        return core.XPUPinnedPlace()
    return None
