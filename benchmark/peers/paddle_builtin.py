"""What Paddle itself has: no checksums, no fsync.

On several CPU ranks its load calls ``Tensor.cuda`` and fails. That call is made to do nothing here, in Paddle's favour:
otherwise there would be nothing to measure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist

from benchmark.peers import paddle_state
from benchmark.peers.paddle_state import build, local_arrays, zero

__all__ = ["build", "load", "local_arrays", "save", "setup", "versions", "zero"]


def setup(rank: int, world_size: int) -> None:
    """See :class:`benchmark.peers.Peer`."""
    paddle_state.setup(rank, world_size)
    paddle.Tensor.cuda = lambda self, *args, **kwargs: self


def versions() -> dict[str, str]:
    """Of Paddle."""
    return {"paddle": paddle.__version__}


def save(state: dict[str, Any], path: Path) -> None:
    """See :class:`benchmark.peers.Peer`."""
    dist.save_state_dict(state, str(path))


def load(state: dict[str, Any], path: Path) -> None:
    """See :class:`benchmark.peers.Peer`."""
    dist.load_state_dict(state, str(path))
