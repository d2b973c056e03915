"""Telling of what others can bring about as often as they like."""

from __future__ import annotations

import time

__all__ = ["OnceAMinute"]

_SECONDS = 60.0


class OnceAMinute:
    """When to tell of something that happens again and again: at first, and then once a minute at most."""

    def __init__(self) -> None:
        self._untold, self._next = 0, 0.0

    def due(self) -> int | None:
        """Of something that has happened once more, how often it was not told since it was; None if it is not due."""
        now, untold = time.monotonic(), self._untold
        if now < self._next:
            self._untold += 1
            return None
        self._untold, self._next = 0, now + _SECONDS
        return untold
