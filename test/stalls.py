"""What the tests of disks that hang share: jobs in folders of which one operation does not return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from paddle_dist_ckpt.errors import CheckpointTimeoutError
from paddle_dist_ckpt.testing import FaultyStorage, Stall
from test.jobs import errors_of
from test.waiting import until

__all__ = ["BOUND", "HELPER", "all_at_once", "check_error", "hanging", "helpers_end"]

BOUND = 2.0
"""Seconds; for a machine that is busy with other things."""
HELPER = "paddle_dist_ckpt storage"


def hanging(folder: Path, stall: Stall, victim: int, ranks: int) -> list[Any]:
    """A folder for each rank, which hangs for one of them."""
    return [FaultyStorage(folder, stall) if rank == victim else folder for rank in range(ranks)]


def check_error(results: Sequence[Any], victim: int, doing: str, path: str) -> None:
    """Assert that all ranks were told who hangs, at what, and where; all the same."""
    errors = errors_of(results, CheckpointTimeoutError)
    for error in errors:
        assert error.missing_ranks == (victim,), error
        assert f"on rank {victim}" in str(error)
        assert doing in str(error), error
        assert path in str(error), error
    assert len({str(error) for error in errors}) == 1


def all_at_once(cases: Sequence[tuple[Any, ...]], check: Callable[..., None]) -> None:
    """Check all cases at the same time, for they only wait."""
    problems = []
    with ThreadPoolExecutor(len(cases)) as pool:
        for case, checked in [(case, pool.submit(check, *case)) for case in cases]:
            error = checked.exception()
            if error is not None:
                problems.append(f"{case}: {type(error).__name__}: {error}")
    assert not problems, "\n".join(problems)


def helpers_end() -> None:
    """Wait until nothing is under way any more: all threads of storages have ended."""
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == HELPER])
