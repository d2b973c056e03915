"""Warnings that change nothing, whatever a handler of the log does."""

from __future__ import annotations

import logging
from contextlib import suppress

__all__ = ["warn_only"]

_logger = logging.getLogger("paddle_dist_ckpt")


def warn_only(text: str, *arguments: object) -> None:
    """Log what went wrong where the caller has to go on: what a handler of the log raises is passed over."""
    with suppress(Exception):
        _logger.warning(text, *arguments)
