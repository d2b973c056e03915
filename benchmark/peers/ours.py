"""This library, with its default options: a checksum for every block, and fsync."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle

import paddle_dist_ckpt
from benchmark.peers.paddle_state import build, local_arrays, setup, zero

__all__ = ["build", "load", "local_arrays", "save", "setup", "versions", "zero"]


def versions() -> dict[str, str]:
    """Of the library and of Paddle."""
    return {"paddle_dist_ckpt": paddle_dist_ckpt.__version__, "paddle": paddle.__version__}


def save(state: dict[str, Any], path: Path) -> float:
    """See :class:`benchmark.peers.Peer`."""
    return paddle_dist_ckpt.save_state_dict(state, path).seconds["plan"]


def load(state: dict[str, Any], path: Path) -> float:
    """See :class:`benchmark.peers.Peer`."""
    return paddle_dist_ckpt.load_state_dict(state, path).seconds["plan"]
