"""What became of a call on one rank, as plain data: a rank that raises would make the pool check its ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paddle_dist_ckpt import CheckpointTimeoutError, RankFailureError

__all__ = ["Outcome", "outcome_of"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended.

    Attributes:
        result: What it returned, else None.
        error: Name of the exception's class, else None.
        message: Its message.
        ranks: The ranks that it blames.
        causes: The names of their exceptions' classes.
        seconds: How long it took.
    """

    result: Any
    error: str | None
    message: str
    ranks: tuple[int, ...]
    causes: tuple[str, ...]
    seconds: float


def outcome_of(call: Callable[[], Any]) -> Outcome:
    """Make the call, and say what became of it."""
    start = time.monotonic()
    try:
        result = call()
    except Exception as error:
        ranks: tuple[int, ...] = ()
        causes: tuple[str, ...] = ()
        if isinstance(error, RankFailureError):
            ranks = tuple(sorted(error.failures))
            causes = tuple(type(error.failures[rank]).__name__ for rank in ranks)
        elif isinstance(error, CheckpointTimeoutError):
            ranks = error.missing_ranks
        return Outcome(None, type(error).__name__, str(error), ranks, causes, time.monotonic() - start)
    return Outcome(result, None, "", (), (), time.monotonic() - start)
